"""The search against trying every layout, and the plans that it gives against the project's own memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from launcher.programs.scale import Asked, asked_of, configuration_file
from rl_megatron.config import yaml_text
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.scaling.memory import GB, check_memory, fullest
from rl_megatron.scaling.planner.layouts import described, layouts, stage_layers, with_keys
from rl_megatron.scaling.planner.search import NEAR, PlannedRun, savings, search
from rl_megatron.scaling.rl_step import filled, rl_step

SMALL = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=64")


def asked(*arguments: str) -> Asked:
    return asked_of(arguments)


def tried(given: Asked, placed: dict[str, object]) -> float:
    """The least seconds of all layouts of a placement, each with the first savings that fit, one after the other."""
    wanted, best = given.wanted, float("inf")
    base = with_keys(wanted.base, placed)
    for keys in layouts(wanted, base.slurm.nodes * base.slurm.gpus_per_node):
        for saved in savings(wanted):
            config = with_keys(base, {**keys, **saved})
            try:
                fits = fullest(config, wanted.shape).total <= wanted.gpu.memory * GB
            except ConfigError:
                break
            if fits:
                found = rl_step(config, wanted.shape, wanted.gpu, wanted.lengths, prompt=wanted.prompt)
                best = min(best, found.seconds)
                break
    return best


def test_the_best_layout_is_that_of_trying_all() -> None:
    """With micro-batches of 8,192 tokens, all layouts of 16 GPUs are few enough to be planned one by one."""
    given = asked(*SMALL, "learner.tp=2", "rollout.server.colocated=true")
    best = search(given.wanted).plans[0]
    where = ("slurm", "rollout", "weights", "learner.offload.while")
    placed = {key: value for key, value in best.keys.items() if key.startswith(where)}
    assert best.step.seconds == pytest.approx(tried(given, placed), rel=1e-9)


def test_a_plan_fits_by_the_projects_own_plan_and_fills_the_gpus() -> None:
    given = asked(*SMALL)
    for plan in search(given.wanted).plans[:3]:
        config = plan.config
        assert config.learner.dims.world_size == config.slurm.nodes * 8
        assert (config.slurm.nodes + config.slurm.engines.nodes) * 8 == 16
        most = check_memory(config, given.wanted.shape)
        assert most is not None
        assert most.total == plan.footprint.total <= 80 * GB
        assert dict(most.terms) == dict(plan.footprint.terms)


def test_the_users_keys_stay_and_goals_differ() -> None:
    kept = search(asked(*SMALL, "learner.tp=4", "learner.recompute.uniform=1").wanted).plans[0].config.learner
    assert (kept.tp, kept.recompute.uniform, kept.recompute.moe_act) == (4, 1, False)
    plans = {goal: search(asked(*SMALL, f"goal={goal}").wanted).plans[0] for goal in ("tokens", "memory", "step")}
    assert plans["memory"].footprint.total <= plans["tokens"].footprint.total
    assert plans["memory"].step.seconds <= NEAR * plans["tokens"].step.seconds
    assert plans["step"].step.staleness == 0
    assert plans["tokens"].step.seconds <= plans["step"].step.seconds


@pytest.mark.parametrize(
    "key",
    [
        "learner.optimizer.name=muon",  # refused together with some of the savings
        "learner.offload.optimizer=0.5",  # beside what leaves while servers sample
        "learner.max_tokens_per_micro_batch=12288",
        "rollout.server.memory_fraction=0.5",
        "train.max_staleness=2",  # only with servers apart
    ],
)
def test_a_users_key_that_the_search_would_not_try_is_planned_as_it_is_written(key: str) -> None:
    given = asked(*SMALL, key)
    plan = search(given.wanted).plans[0]
    assert dict(fullest(plan.config, given.wanted.shape).terms) == dict(plan.footprint.terms)
    name, _, value = key.partition("=")
    found: object = plan.config
    for part in name.split("."):
        found = getattr(found, part)
    assert str(found) == value
    assert configuration_file(given, plan)


def test_a_critic_and_float8_change_the_seconds_of_a_layout() -> None:
    plain = search(asked(*SMALL).wanted).plans[0]
    wanted = asked(*SMALL).wanted

    def parts(config: RunConfig) -> Mapping[str, float]:
        return rl_step(config, wanted.shape, wanted.gpu, wanted.lengths, prompt=wanted.prompt).parts

    usual = parts(plain.config)
    learner = plain.config.learner.model_copy(update={"fp8": "tensorwise"})
    assert parts(plain.config.model_copy(update={"learner": learner}))["training"] < 0.95 * usual["training"]
    ppo = asked(*SMALL, "algorithm=ppo").wanted.base.algorithm
    critic = parts(plain.config.model_copy(update={"algorithm": ppo}))["critic"]
    assert usual["training"] < critic < 1.5 * usual["training"]


def test_no_data_parallel_rank_computes_less_than_a_sequence() -> None:
    wanted = asked(*SMALL).wanted
    sequences = wanted.base.completions_per_step / wanted.base.train.minibatches
    assert filled(wanted.base, 1e6, int(2 * sequences), 1000.0) == filled(wanted.base, 1e6, int(sequences), 1000.0)


def test_a_thousand_gpus_of_a_model_with_61_layers_have_uneven_stages() -> None:
    best = search(asked("deepseek-v3", "gpus=1024", "gpu=h100", "rollout.prompts_per_step=512").wanted).plans[0]
    stages = best.config.learner.stages
    assert stages is not None
    assert sum(stages) == 61
    assert stages[-1] < max(stages)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "text"),
    [(48, 4, 2, None), (61, 8, 1, "7+8*6+6"), (94, 8, 1, "11+12*6+11")],
)
def test_uneven_stages_have_fewer_layers_at_the_ends(layers: int, pp: int, vpp: int, text: str | None) -> None:
    """The second and the last are those of our recipes."""
    assert stage_layers(layers, pp, vpp) == text


def test_rejected_layouts_say_why_and_what_would_help() -> None:
    found = search(asked("deepseek-v3", "gpus=256", "gpu=h100").wanted)
    assert found.rejected
    for one in found.rejected:
        assert described(one.keys)
        assert any(words in one.reason for words in ("GB of 80", "servers alone take at least", "learner."))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("deepseek-v3", "gpus=8", "gpu=h100"), "on 8 GPUs of 80 GB was tried: servers' weights fit in none"),
        ((*SMALL, "learner.max_tokens_per_micro_batch=8192", "learner.ep=3"), "or these keys leave none: rollout."),
        ((*SMALL, "rollout.server.pp=2"), "scale plans servers of one stage"),
        ((*SMALL, "goal=step", "train.max_staleness=2"), "goal=step is synchronous, but train.max_staleness=2"),
        ((*SMALL, "gpus=12"), "gpus=12 are no whole nodes of 8 GPUs; give a multiple of 8"),
        (("gpus=8", "gpu=h100"), "give a model, its GPUs and their kind, as in rl-megatron scale kimi-k2 gpus=1024"),
        ((*SMALL, "goal=speed"), "goal=speed: must be one of tokens, memory, step"),
        ((*SMALL, "gpus=many"), "gpus=many: must be a whole number above 0"),
        ((*SMALL, "mean_tokens=9000"), "mean_tokens=9000 is more than rollout.max_new_tokens=7168; lower the first"),
        ((*SMALL, "learner.ttp=2"), "learner.ttp=2: no such key"),
        (("qwen4", "gpus=8", "gpu=h100"), "qwen4 is neither a folder nor a known model"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_reason(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(asked(*arguments).wanted)
    assert reason in str(caught.value)


def test_a_written_configuration_has_the_plans_keys_and_no_others() -> None:
    given = asked(*SMALL, "rollout=sglang", "algorithm=cispo")
    best: PlannedRun = search(given.wanted).plans[0]
    tree = yaml_text._parsed(configuration_file(given, best))
    assert isinstance(tree, dict)
    assert {"algorithm": "cispo"} in tree["defaults"]
    assert {"rollout": "sglang"} in tree["defaults"]
    learner = tree["learner"]
    assert learner.get("ep", 1) == best.config.learner.ep
    assert "vpp" not in learner or learner["vpp"] > 1
    worse = replace(best, keys={**best.keys, "learner.ep": 7, "learner.dp": 2})
    with pytest.raises(ConfigError, match="does not divide"):
        configuration_file(given, worse)
