"""The search against trying every layout, and the plans that it gives against the project's own memory plan."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rl_megatron.config import yaml_text
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB, ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.placement.seats import place_servers
from rl_megatron.types import ParallelDims
from tests.unit.launcher.test_memory import CONF, KIMI, QWEN3, RECIPES
from tools.planner.hardware import GPUS
from tools.planner.layouts import SearchRequest, described, layouts, placements, stage_layers, with_keys
from tools.planner.memory import check_memory, copies_bytes, file_bytes, fullest, host_bytes
from tools.planner.rl_step import filled, learner_work, rl_step
from tools.planner.scale import ScaleRequest, config_value, configuration_file, parse_request
from tools.planner.search import NEAR, PlannedRun, explain_term, savings, search
from tools.planner.time import step_terms

SMALL = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=64")


def asked(*arguments: str) -> ScaleRequest:
    return parse_request(arguments)


def fitting(wanted: SearchRequest) -> Iterator[tuple[float, float]]:
    """The seconds of every layout of all placements with each of the savings that fits, and its bytes of a GPU; with
    checkpoints that training waits for where the host's memory holds no copies."""
    room, host = wanted.gpu.memory * GB, 0.8 * wanted.gpu.host * GB
    for _, placed in placements(wanted):
        base = with_keys(wanted.base, placed)
        for keys in layouts(wanted, base.slurm.nodes * base.slurm.gpus_per_node):
            for saved in savings(wanted):
                config = with_keys(base, {**keys, **saved})
                try:
                    held = fullest(config, wanted.shape).total
                    copied = copies_bytes(config, wanted.shape)
                    kept = host_bytes(config, wanted.shape) + file_bytes(config, wanted.shape)
                except ConfigError:
                    continue
                if kept + copied > host:
                    config = with_keys(config, {"checkpoint.async_save": False})
                if held <= room and kept <= host:
                    step = rl_step(config, wanted.shape, wanted.gpu, wanted.lengths, prompt=wanted.prompt)
                    yield step.seconds, held


@pytest.mark.parametrize(
    "arguments",
    [
        ("gpus=8", "gpu=h200", "learner.vpp=1"),
        ("gpu=h100", "learner.pp=4", "slurm.engines.nodes=1"),
        ("gpu=h200", "learner.pp=2", "slurm.engines.nodes=1"),
    ],
)
def test_the_best_layout_is_that_of_trying_all(arguments: tuple[str, ...]) -> None:
    """With a key or two they are few enough to plan each with all savings: the fastest may need none, be far from the
    fastest without savings, or have whole layers computed again but no float32 head."""
    wanted = asked(*SMALL, *arguments).wanted
    fastest = min(seconds for seconds, _ in fitting(wanted))
    assert search(wanted).plans[0].step.seconds == pytest.approx(fastest, rel=1e-9)


def test_of_plans_whose_step_the_servers_set_the_best_has_the_fastest_learner() -> None:
    plans = search(asked("qwen3-235b-a22b", "gpus=128", "gpu=h100").wanted).plans
    tied = [plan.learner for plan in plans if plan.step.seconds == plans[0].step.seconds]
    assert len(tied) > 1
    assert tied[0] == min(tied)


def command_of(recipe: str) -> list[str]:
    """What a recipe's second line says after ``rl-megatron scale``."""
    line = (CONF / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()[1]
    return shlex.split(line.removeprefix("# rl-megatron scale ").removesuffix(" --write FILE.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_what_its_command_writes(recipe: str) -> None:
    given = asked(*command_of(recipe))
    best = search(given.wanted).plans[0]
    assert (CONF / f"{recipe}.yaml").read_text(encoding="utf-8") == configuration_file(given, best)
    assert (best.config.data.type, best.step.staleness > 0) == ("hub", recipe.endswith("_async"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_takes_at_most_1_2_times_the_best_of_the_search(recipe: str) -> None:
    """On the same GPUs, with its batch and lengths. All together take 20 seconds."""
    config = load_config(recipe, ["model.path=.", "run.launcher=slurm"])
    same = ("gpus=", "gpu=", "goal=", "rollout.prompts_per_step=")
    model, *keys = command_of(recipe)
    free = asked(model, *(key for key in keys if key.startswith(same))).wanted
    assert free.base.longest_sequence == config.longest_sequence
    found = rl_step(
        config, free.shape, free.gpu, free.lengths, prompt=free.prompt, staleness=config.train.max_staleness
    )
    assert found.seconds <= 1.2 * search(free).plans[0].step.seconds


def test_a_plan_fits_by_the_projects_own_plan_and_fills_the_gpus() -> None:
    given = asked(*SMALL)
    for plan in search(given.wanted).plans[:3]:
        config = plan.config
        assert config.learner.dims.world_size == config.slurm.nodes * 8
        assert (config.slurm.nodes + config.slurm.engines.nodes) * 8 == 16
        most = check_memory(config, given.wanted.shape)
        assert most.total == plan.footprint.total <= 80 * GB
        assert dict(most.terms) == dict(plan.footprint.terms)


def test_the_users_keys_stay_and_goals_differ() -> None:
    kept = search(asked(*SMALL, "learner.tp=4", "learner.recompute.uniform=1").wanted).plans[0].config.learner
    assert (kept.tp, kept.recompute.uniform, kept.recompute.parts) == (4, 1, ())
    plans = {goal: search(asked(*SMALL, f"goal={goal}").wanted).plans[0] for goal in ("tokens", "memory", "step")}
    assert plans["memory"].footprint.total <= plans["tokens"].footprint.total
    assert plans["memory"].step.seconds <= NEAR * plans["tokens"].step.seconds
    assert plans["step"].step.staleness == 0
    assert plans["tokens"].step.seconds <= plans["step"].step.seconds


def test_goal_memory_has_the_least_of_all_layouts_and_savings_within_its_time() -> None:
    """A saving that takes some time is taken although the layout fits without."""
    slow = ("slurm.engines.nodes=1", "rollout.slots=256")
    wanted = asked(*SMALL, "gpu=h200", "goal=memory", "learner.tp=2", "learner.vpp=1", *slow).wanted
    plans, tried = search(wanted).plans, list(fitting(wanted))
    fastest = min(seconds for seconds, _ in tried)
    least = min(held for seconds, held in tried if seconds <= NEAR * fastest)
    assert plans[0].footprint.total == pytest.approx(least)
    assert plans[0].step.seconds <= NEAR * fastest
    savings_of = ("learner.recompute", "learner.offload.optimizer", "learner.head_dtype", "learner.layers")
    bare = {key: value for key, value in plans[0].keys.items() if not key.startswith(savings_of)}
    assert 1.1 * least < fullest(with_keys(wanted.base, bare), wanted.shape).total <= wanted.gpu.memory * GB


def test_what_the_hosts_memory_does_not_hold_is_rejected(tmp_path: Path) -> None:
    """Of 30.5 B parameters on one host: moments, float32 copies and gradients, 16 B each."""
    (tmp_path / "small.yaml").write_text("like: h100\nhost: 100\n")
    keys = ("qwen3-30b-a3b", "gpus=16", "rollout.prompts_per_step=64", "learner.offload.optimizer=1")
    keys += ("learner.layers=torch", "slurm.engines.nodes=1", "learner.tp=2", "learner.pp=4", "learner.vpp=1")
    with pytest.raises(ConfigError, match=r"GB of the host's memory .*, of 80 that a node's 100 leave beside all else"):
        search(asked(*keys, f"gpu={tmp_path / 'small.yaml'}").wanted)
    found = search(asked(*keys, "gpu=h100").wanted).plans[0]
    assert 30.5e9 * 16 < host_bytes(found.config, NAMED["qwen3-30b-a3b"]) < 0.8 * 2000e9


def test_training_waits_for_checkpoints_where_the_hosts_memory_holds_no_copies(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("like: h200\nhost: 300\n")
    keys = (*SMALL, f"gpu={tmp_path / 'small.yaml'}", "slurm.engines.nodes=1", "learner.pp=2", "learner.vpp=1")
    given = asked(*keys)
    best = search(given.wanted).plans[0]
    assert best.keys["checkpoint.async_save"] is False
    assert best.step.seconds == pytest.approx(min(seconds for seconds, _ in fitting(given.wanted)), rel=1e-9)
    assert "without async_save" in described(best.keys)
    assert "async_save: false" in configuration_file(given, best)
    with pytest.raises(ConfigError, match=r"copies of what it saves \(\d+, checkpoint.async_save\)"):
        search(asked(*keys, "checkpoint.async_save=true").wanted)
    assert search(asked(*keys, "goal=memory").wanted).plans[0].config.checkpoint.async_save is False
    assert search(asked(*keys, "gpu=h200").wanted).plans[0].config.checkpoint.async_save is True


def test_experts_are_not_spread_over_groups_that_deepep_refuses() -> None:
    """Of 384 experts: groups of 48 and 96 have no settings in deep_ep/buffer.py, groups of 32 and 64 have."""
    wanted = asked("kimi-k2", "gpus=1536", "gpu=h100").wanted
    groups: dict[object, set[object]] = {}
    for keys in layouts(wanted, 1536):
        groups.setdefault(keys["learner.dispatcher"], set()).add(keys["learner.ep"])
    assert {16, 24, 32, 64, 128} <= groups["deepep"]
    assert not {48, 96} & groups["deepep"]
    assert {48, 96} <= groups["alltoall"]
    with pytest.raises(ConfigError, match=r"DeepEP has no settings for 48 ranks, only for 2, 4, 8"):
        asked("kimi-k2", "gpus=1536", "gpu=h100", "learner.dispatcher=deepep", "learner.ep=48")


def test_keys_are_given_by_their_names_of_today() -> None:
    old = ("algorithm=sapo", "algorithm.tau_negative=1.5", "learner.recompute.moe_act=true")
    given = asked(*SMALL, *old).wanted.given
    given = {key: given[key] for key in given if key != "rollout.prompts_per_step"}
    assert given == {"algorithm.parameters.tau_negative": 1.5, "learner.recompute.parts": ("moe_act",)}


def test_a_key_without_a_section_is_a_key_and_no_group() -> None:
    given = asked(*SMALL, "seed=3")
    assert given.wanted.base.seed == 3
    written = yaml_text._parsed(configuration_file(given, search(given.wanted).plans[0]))
    assert isinstance(written, dict)
    assert written["seed"] == 3
    assert {"seed": "3"} not in written["defaults"]


def test_the_servers_of_our_recipe_are_planned_where_they_share_out_experts_that_are_no_power_of_two() -> None:
    """Of Kimi-K2, which has 384 experts a layer: no other servers hold it on 12 nodes."""
    own = load_config(KIMI, ["model.path=/models/given"])
    nodes, server = own.slurm.engines.nodes, own.rollout.server
    given = (f"slurm.engines.nodes={nodes}", f"rollout.slots={own.rollout.slots}")
    best = search(asked("kimi-k2", "gpus=480", "gpu=h100", *given).wanted).plans[0]
    keys = ("replicas", "tp", "dp", "ep")
    assert [best.keys[f"rollout.server.{key}"] for key in keys] == [getattr(server, key) for key in keys]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6, 8])
def test_servers_fill_their_nodes(dp: int) -> None:
    """Also those of a dp that does not divide a node's GPUs, where a GPU has room for all."""
    wanted = asked("kimi-k2", "gpus=192", "gpu=h100", f"rollout.server.dp={dp}").wanted
    found = list(placements(replace(wanted, gpu=replace(wanted.gpu, memory=20_000.0))))
    assert found
    for _, placed in found:
        config = with_keys(wanted.base, placed)
        nodes = [f"node {i}" for i in range(config.slurm.engines.nodes or config.slurm.nodes)]
        seats = place_servers(config.rollout.server, nodes, 8, shared=False)
        assert sorted((s.node, gpu) for s in seats for gpu in s.gpus) == sorted((n, i) for n in nodes for i in range(8))


def test_servers_of_a_plan_have_as_many_requests_as_they_can_take() -> None:
    best = search(asked("kimi-k2", "gpus=1024", "gpu=h100", "rollout.prompts_per_step=1024").wanted).plans[0]
    assert best.config.rollout.server.max_concurrent_groups == best.keys["rollout.server.max_concurrent_groups"] > 256
    assert not best.step.sampled.held_back
    few = search(asked(*SMALL, "rollout.server.max_concurrent_groups=4").wanted).plans[0]
    assert few.config.rollout.server.max_concurrent_groups == 4
    assert few.step.sampled.held_back


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
    plain, wanted = search(asked(*SMALL).wanted).plans[0], asked(*SMALL).wanted

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
    assert sum(stages) == 61
    assert stages[-1] < max(stages)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "text"), [(48, 4, 2, None), (61, 8, 1, "7+8*6+6"), (94, 8, 1, "11+12*6+11")]
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
        (
            ("deepseek-v3", "gpus=8", "gpu=h100"),
            "on 8 GPUs of 80 GB was tried: servers' weights fit in none of its placements; give more GPUs\n",
        ),
        ((*SMALL, "learner.max_tokens_per_micro_batch=8192", "learner.ep=3"), "or these keys leave none: rollout."),
        ((*SMALL, "weights.transport=file"), "weights.transport is tried as direct"),
        ((*SMALL, "rollout.server.tp=3"), "leave one out; rollout.server.tp is tried as 1, 2, 4, 8"),
        ((*SMALL, "rollout.server.pp=2"), "scale plans servers of one stage"),
        (
            (*SMALL, "learner.draft.train=true", "rollout.server.draft_tokens=1"),
            "draft_tokens=1: scale plans pushes straight into servers' ranks",
        ),
        (("qwen3-30b-a3b", "gpus=16", "gpu=a100", "learner.fp8=blockwise"), "A100 multiplies nothing in float8; leave"),
        (("qwen3-30b-a3b", "gpus=16", "gpu=h100", "learner.fp8=mxfp8"), "H100 has no scales of 32 values, which b200"),
        (
            ("deepseek-v3.2", "gpus=512", "gpu=h100", "rollout.max_new_tokens=163000"),
            "163000 = 164024 is more than the model's max_position_embeddings=163840; lower them",
        ),
        (("deepseek-v3.2", "gpus=512", "gpu=h100", "learner.cp=2"), "with learner.cp=2 ranks share a sequence"),
        ((*SMALL, "learner.lora.rank=16"), "learner.lora.rank=16: scale predicts seconds of training and pushing all"),
        ((*SMALL, "goal=step", "train.max_staleness=2"), "goal=step is synchronous, but train.max_staleness=2"),
        ((*SMALL, "gpus=12"), "gpus=12 are no whole nodes of 8 GPUs; give a multiple of 8"),
        (("gpus=8", "gpu=h100"), "give a model, its GPUs and their kind, as in rl-megatron scale kimi-k2 gpus=1024"),
        ((*SMALL, "goal=speed"), "goal=speed: must be one of tokens, memory, step"),
        ((*SMALL, "gpus=many"), "gpus=many: must be a whole number above 0"),
        ((*SMALL, "mean_tokens=9000"), "mean_tokens=9000 is more than rollout.max_new_tokens=7168; lower the first"),
        ((*SMALL, "learner.ttp=2"), "learner.ttp=2: no such key"),
        (
            ("qwen3-30b", "gpus=8", "gpu=h100"),
            "nor a known model (did you mean 'qwen3-30b-a3b'?); known: qwen3-30b-a3b",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_reason(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(asked(*arguments).wanted)
    assert reason in f"{caught.value}\n"


def test_no_advice_is_a_layout_that_the_search_refuses() -> None:
    """A critic does not fit beside the learner, and may not leave it; what differs in no word is named once."""
    arguments = ("qwen3-30b-a3b", "gpus=8", "gpu=h100", "algorithm=ppo")
    with pytest.raises(ConfigError, match=r"most of it critic, .* GB; raise learner.tp") as caught:
        search(asked(*arguments).wanted)
    assert "roles." not in str(caught.value)
    nearest = re.findall(r"(?:Nearest: |; )([\w ]+), \d+ servers? of \d+ GPUs? on the same GPUs", str(caught.value))
    assert len(set(nearest)) == len(nearest) == 3
    with pytest.raises(ConfigError, match=r"or roles: scale plans .* no nodes for a critic"):
        asked(*arguments, "roles.critic=separate")


def test_layouts_that_do_not_fit_are_named_with_the_savings_that_need_least(tmp_path: Path) -> None:
    """With the optimizer on the host come torch's layers, which hold all scores of long sequences: 724 GB, and 12,144
    of 250,000 tokens, where TransformerEngine's hold 82. What stays on a GPU is named where that alone is too much."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "max_position_embeddings": 262144}))
    keys = (str(tmp_path), "gpu=h100", "learner.tp=1")
    lasting = r"205 GB of 80 .*, even without what passes hold, most of it gradients, 122 GB"
    with pytest.raises(ConfigError, match=lasting) as caught:
        search(asked(*keys, "gpus=8", "learner.pp=1", "learner.ep=1", "rollout.max_new_tokens=60000").wanted)
    assert "activations" not in str(caught.value)
    more = ("gpus=16", "learner.pp=2", "learner.cp=2", "learner.ep=4", "rollout.max_new_tokens=250000")
    with pytest.raises(ConfigError, match="most of it activations, 82 GB") as caught:
        search(asked(*keys, *more).wanted)
    assert max(map(int, re.findall(r"(\d+) GB of 80", str(caught.value)))) < 150


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


def test_a_users_configuration_keeps_its_keys_and_gets_another_layout(tmp_path: Path) -> None:
    """What `import` writes: the layout of another framework, which does not fit, in turns and synchronous."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults: [{algorithm: dapo}, {data: dapo_math}]\n"
        "model: {path: FOLDER, name: qwen3-30b-a3b}\n"
        "rollout: {engine: vllm, prompts_per_step: 64, group_size: 8,\n"
        "  server: {colocated: true, memory_fraction: 0.5, tp: 2, replicas: 8}}\n"
        "learner: {device: cuda, dtype: bfloat16, cp: 8, dp: 2, recompute: {uniform: 1}}\n"
        "slurm: {nodes: 2, gpus_per_node: 8, signal_seconds: 900}\n"
    )
    given = asked(str(mine), "gpus=16", "gpu=h100", "train.minibatches=8")
    best = search(given.wanted).plans[0]
    (tmp_path / "written").mkdir()
    (written := tmp_path / "written" / "best.yaml").write_text(configuration_file(given, best))
    config = load_config(str(written), ["run.launcher=slurm"])
    assert best.keys.items() <= {key: config_value(config, key) for key in best.keys}.items()
    assert (config.learner.cp, config.train.max_staleness, config.train.minibatches) == (1, 0, 8)
    assert (config.rollout.prompts_per_step, config.algorithm.clip_high, config.slurm.signal_seconds) == (64, 0.28, 900)
    assert config.learner.timeout_seconds == 1800
    assert "rl-megatron submit FILE.yaml slurm" in written.read_text()
    mine.write_text("defaults: [tiny_cpu]\n")
    with pytest.raises(ConfigError, match=r"rollout.engine=local has no servers to plan; add rollout=vllm"):
        asked(str(mine), "gpus=16", "gpu=h100")


def test_every_term_of_a_step_is_explained() -> None:
    """Of a learner with each axis, option and role that adds a term, and of a teacher by the user's name."""
    plan = search(asked(*SMALL, "algorithm=ppo", "algorithm.kl.coefficient=0.1").wanted).plans[0]
    work = learner_work(plan.config, NAMED["deepseek-v3"], GPUS["h100"], 4000)
    more = replace(work, drafts=1, moved=(1e6, 1e6), offloaded=0.5, again=frozenset({"full"}), stages=None, muon=True)
    terms = step_terms(replace(more, dims=ParallelDims(tp=2, ep=4, cp=2, dp=2)))
    terms |= step_terms(replace(more, dims=ParallelDims(tp=2, ep=4, pp=2, dp=2)))
    assert {"draft layers", "activations on the host", "optimizer on the host", "between stages"} <= terms.keys()
    assert "orthogonalization" in terms
    parts = {**plan.step.parts, "teacher_of_sums": 1.0}
    shown = replace(plan, step=replace(plan.step, training=terms, parts=parts))
    for term in (*terms, *parts):
        assert any(
            line.startswith(f"{term}: ") and not line[len(term) + 2].isdigit() for line in explain_term(term, shown)
        )


@pytest.mark.parametrize(
    ("gpus", "keys"),
    [
        (64, {"slurm.engines.nodes": 3}),
        (64, {"slurm.nodes": 5}),
        (192, {"learner.ep": 12, "slurm.engines.nodes": 6}),
        (64, {"learner.pp": 4, "learner.vpp": 3}),
        (64, {"learner.pp": 2, "learner.stage_layers": "25+23"}),
    ],
)
def test_values_that_the_search_has_not_are_tried_where_they_are_given(gpus: int, keys: Mapping[str, object]) -> None:
    shape = "hunyuan-3" if "learner.ep" in keys else "qwen3-30b-a3b"
    given = asked(shape, f"gpus={gpus}", "gpu=h200", *(f"{key}={value}" for key, value in keys.items()))
    plan = search(given.wanted).plans[0]
    assert {key: config_value(plan.config, key) for key in keys} == dict(keys)
    assert configuration_file(given, plan)
