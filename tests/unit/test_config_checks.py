"""Rules over several sections: a configuration that would train on nothing, or with keys without effect, is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.__main__ import _COMMANDS, app
from rl_megatron.config import yaml_text
from rl_megatron.config.errors import is_removed_key
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.removed import (
    COMMANDS,
    REMOVED,
    VALUES,
    drop_removed,
    is_removed,
    new_name,
    removed_key,
    with_new_names,
)
from rl_megatron.config.resume import flat
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import PARAMETERS
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import ConfigError
from tests.rows import BESIDE, PAIR_ROWS

REPO = Path(__file__).resolve().parents[2]

ONE = "rollout.group_size=1"
SINGLE = [ONE, "rollout.prompts_per_step=1", "train.minibatches=1"]
REFILL = "rollout.dynamic_sampling=refill"
TURNS = ["environment.function=calculator", "environment.template=plain", "algorithm.credit=turn"]


def problem(*keys: str) -> str | None:
    try:
        load_config("tiny_cpu", list(keys))
    except ConfigError as error:
        return str(error)
    return None


def test_a_floor_of_the_learning_rate_lies_below_it_and_has_a_decay() -> None:
    given = ["train.learning_rate=1e-3", "train.lr_min=2e-3"]
    assert "train.lr_min=0.002 with train.learning_rate=0.001: the learning rate cannot fall to" in (
        problem(*given) or ""
    )
    assert problem("train.learning_rate=1e-3", "train.lr_min=1e-3") is None
    assert "with train.lr_decay=none the learning rate stays" in (
        problem("train.lr_decay=none", "train.lr_min=1e-5") or ""
    )


@pytest.mark.parametrize(
    ("preset", "limit"), [("tiny_cpu", "rollout.max_new_tokens"), ("calculator", "environment.max_tokens")]
)
def test_an_overlong_buffer_that_leaves_no_length_without_a_penalty_is_refused(preset: str, limit: str) -> None:
    keys = ["algorithm.overlong_factor=0.5", "rollout.max_new_tokens=40", f"{limit}=40"]
    for buffer in (40, 41):
        with pytest.raises(ConfigError, match=rf"algorithm\.overlong_buffer={buffer} is not below {limit}=40"):
            load_config(preset, [*keys, f"algorithm.overlong_buffer={buffer}"])
    for buffer in (0.99, 1, 39):
        load_config(preset, [*keys, f"algorithm.overlong_buffer={buffer}"])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=grpo", ONE], "group_size=1 with algorithm.advantage_mean=group, algorithm.advantage_std=group: "),
        (["algorithm=rloo", ONE], "group_size=1 with algorithm.advantage_mean=group: "),
        (["algorithm=liteppo", "algorithm.advantage_mean=batch", "algorithm.advantage_std=group", ONE], "std=group: "),
        (["algorithm=reinforce", *SINGLE], "group_size=1 with algorithm.advantage_mean=batch: "),
        (["algorithm=gkd", ONE], "group_size=1 with algorithm.advantage_mean=group, algorithm.advantage_std=group: "),
        (
            ["algorithm=reinforce", "algorithm.advantage_mean=none", "algorithm.whiten=true", *SINGLE],
            "group_size=1 with algorithm.whiten=true: ",
        ),
        ([*TURNS, "algorithm.turn_baseline=index", ONE], "group_size=1 with algorithm.advantage_mean"),
        (["algorithm=reinforce", "algorithm.advantage_mean=none", ONE, REFILL], "=refill drops every group of one"),
        (["algorithm=ppo", REFILL], "but algorithm.credit=gae learns from"),
        (["algorithm=remax", REFILL], "but algorithm.advantage_mean=greedy learns from"),
        (["algorithm=reinforce", "rollout.dynamic_sampling=drop"], "but algorithm.advantage_mean=batch learns from"),
        (["algorithm=reinforce_plus_plus", REFILL], "but algorithm.whiten=true learns from"),
        (["algorithm=gkd", "algorithm.kl.reference=.", REFILL], "but algorithm.kl.estimator=top_k learns from"),
        (["algorithm=grpo", "algorithm.nll_coefficient=0.1", REFILL], "but algorithm.nll_coefficient=0.1 learns from"),
        (
            ["algorithm=grpo", REFILL, "algorithm.kl.coefficient=0.1", "algorithm.kl.placement=completion_reward"],
            "but algorithm.kl.placement=completion_reward learns from",
        ),
    ],
)
def test_groups_that_teach_nothing_and_those_that_do_are_not_mistaken(keys: list[str], reason: str) -> None:
    assert reason in (problem(*keys) or "")


@pytest.mark.parametrize(
    "keys",
    [
        ["algorithm=reinforce", ONE],
        ["algorithm=ppo", ONE],
        [*TURNS, ONE],
        [*TURNS, ONE, REFILL],
        ["algorithm=remax", *SINGLE],
        ["algorithm=reinforce_plus_plus", "algorithm.gamma=0.9", *SINGLE],
        ["algorithm=grpo", REFILL],
        ["algorithm=reinforce_plus_plus_baseline", REFILL],
        ["algorithm=dpo", REFILL],
        ["algorithm=gkd", "algorithm.kl.reference=.", ONE],
        ["algorithm=gkd", "algorithm.kl.reference=.", "algorithm.advantage_mean=batch", *SINGLE],
        ["algorithm=reinforce", "algorithm.advantage_mean=mine:f", ONE, REFILL],  # the function is asked
        ["algorithm=reinforce", "algorithm.advantage_mean=none", REFILL],  # REINFORCE-Rej, arXiv:2504.11343
    ],
)
def test_groups_of_one_and_filters_are_taken_where_they_mean_something(keys: list[str]) -> None:
    assert problem(*keys) is None


PAIRS = {"type": "files", "train": "a.jsonl", "eval": "b.jsonl", "fields": {"rejected": "bad"}}


@pytest.mark.parametrize("job", ["rl", "sft"])
def test_pairs_of_a_file_are_for_jobs_on_pairs(job: str) -> None:
    said = rf"data\.fields\.rejected=bad: job={job} does not read it, job=dpo or job=reward_model may; leave it out"
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate({"job": job, "data": PAIRS})


@pytest.mark.parametrize("job", ["dpo", "reward_model"])
def test_a_job_on_pairs_asks_for_the_worse_answer_of_every_source(job: str) -> None:
    RunConfig.model_validate({"job": job, "data": PAIRS})
    RunConfig.model_validate({"job": job})  # generated sums have wrong ones
    files = {key: value for key, value in PAIRS.items() if key != "fields"}
    with pytest.raises(ValueError, match=rf"job={job} trains on pairs of answers, and data\.fields\.rejected is not"):
        RunConfig.model_validate({"job": job, "data": files})
    for key in ("answer", "rejected"):
        with pytest.raises(
            ValueError, match=r"data\.fields\.prompt='bad' is also the field of an answer, .* HH-RLHF's"
        ):
            RunConfig.model_validate(
                {"job": job, "data": {**PAIRS, "fields": {"rejected": "bad", "prompt": "bad", key: "bad"}}}
            )
    one = {"type": "files", "train": "a", "eval": "b", "fields": {"prompt": "q", "answer": "q"}}
    RunConfig.model_validate({"job": "rl", "data": one})  # a reward may need no answer
    led = {"environment": {"function": "calculator", "template": "plain"}, "warm_start": {"steps": 1}}
    RunConfig.model_validate({"job": "rl", "data": one, **led})  # demonstrations are learned, no answers
    with pytest.raises(ValueError, match=r"data\.fields\.prompt='q' is also the field of an answer"):
        RunConfig.model_validate({"job": "rl", "data": one, "warm_start": led["warm_start"]})
    mixture = {"type": "mixture", "sources": {"good": PAIRS, "bad": files}}
    with pytest.raises(ValueError, match=r"and data\.sources\.bad\.fields\.rejected is not given"):
        RunConfig.model_validate({"job": job, "data": mixture})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["job=dpo", "reward_model.centring=0.1"], "reward_model.centring=0.1: job=dpo does not read it, job=reward_m"),
        (["job=sft", "data=gsm8k", "data.fields.margin=m"], "fields.margin=m: job=sft does not read it, job=reward_mo"),
        (["job=reward_model", "learner.head_dtype=float32"], "head_dtype=float32: job=reward_model does not read it"),
        (["job=reward_model", "roles.reference=separate"], "roles.reference=separate: job=reward_model does not read"),
        (["job=dpo", "algorithm=dpo"], "algorithm.preference.beta=0.1: job=dpo does not read it, job=rl may"),
        (["job=dpo", "learner.padding.sequences=1"], "both sequences of a pair are in one micro-batch"),
        (["job=dpo", "dpo.max_tokens=9000"], "less than the pair of the longest sequences, 2 * (dpo.max_tokens=9000)"),
        (
            ["job=dpo", "dpo.max_tokens=508", "learner.max_tokens_per_micro_batch=1016", "learner.cp=4"],
            "each (dpo.max_tokens=508) padded for learner.cp=4 to a multiple of 8: 1024; raise",
        ),
        (["job=dpo", "dpo.on_long=cut"], "dpo.on_long='cut': must be 'fail' or 'drop'"),
        (["job=reward_model", "reward_model.centring=-1"], "reward_model.centring=-1"),
    ],
)
def test_keys_that_a_job_on_pairs_cannot_use_are_refused(keys: list[str], said: str) -> None:
    assert said in (problem(*keys) or "").replace("\n", " ")


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("learner.lora.rank=2", "adapters freeze its value layer"),
        ("learner.overlap.gradients=true", "in a warm start the value layer has no gradient"),
        ("learner.cuda_graphs=true", "capturing a value layer is untested"),
        ("learner.draft.train=true", "the combination is untested"),
        ("algorithm.critic.only_steps=2", r"critic\.backbone=policy does not read it"),
        ("roles.critic=separate", "the algorithm has no critic"),
    ],
)
def test_a_policy_that_is_its_own_critic_is_refused_beside_what_would_not_fit(key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm=ppo", "algorithm.critic.backbone=policy", key])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            ["rollout=sglang", "rollout.router_noise=0.1"],
            "router_noise=0.1 with rollout.engine=sglang: servers compute routers in their own kernels, without "
            "noise; set rollout.engine=local",
        ),
        (["rollout.router_noise=-1"], "rollout.router_noise=-1"),
    ],
)
def test_noise_and_flips_of_routers_that_nobody_reaches_are_refused(keys: list[str], reason: str) -> None:
    assert reason in (problem(*keys) or "")


@pytest.mark.parametrize(
    "key",
    [
        *("learner.device=cuda", "rollout.server.tp=2", "rollout.server.dp=2", "rollout.server.options=--x"),
        *("rollout.server.addresses=http://a:1", "weights.transport=direct"),
    ],
)
def test_servers_of_the_in_process_engine_are_one_process_each(key: str) -> None:
    assert problem("rollout=local", "rollout.server.replicas=2", "rollout.router_noise=0.1") is None
    said = problem("rollout=local", "rollout.server.replicas=2", key) or ""
    assert f"rollout.engine=local with rollout.server.replicas=2 and {key}: each of these servers is one" in said


def another(key: str) -> str:
    """A value of a key of servers that is not its default."""
    default = ServerSection.model_fields[key].get_default()
    texts = {"running_requests": "abort", "quantization": "int8", "probes": "always", "options": "--x"}
    texts |= {"addresses": "http://a:1", "token_file": "token.txt"}
    if isinstance(default, bool):
        return "true"
    if key in texts:
        return texts[key]
    return "2" if default is None or float(default).is_integer() else "0.25"


@pytest.mark.parametrize("key", sorted(ServerSection.model_fields.keys() - {"replicas", "memory_fraction"}))
def test_keys_of_servers_are_refused_where_none_sample(key: str) -> None:
    said = problem(f"rollout.server.{key}={another(key)}") or ""
    reason = "with rollout.engine=local this engine samples in the learner's processes, and only servers read it"
    assert f"rollout.server.{key}=" in said
    assert reason in said, said


def test_an_interpreter_or_a_share_of_gpus_is_for_engines_that_have_one() -> None:
    for given in ("rollout.python=/opt/python", "rollout.server.memory_fraction=0.25"):
        assert "samples in the learner's processes, and only servers read it" in (problem(given) or "")
        said = problem("rollout.server.replicas=2", given) or ""
        reason = "with rollout.engine=local servers run in the trainer's interpreter, on CPUs"
        assert said.startswith(f"{given} does nothing: {reason}")


def test_the_in_process_engine_takes_every_key_of_servers_back_and_loads_a_file() -> None:
    group = yaml_text.read(REPO / "conf" / "rollout" / "local.yaml")
    assert isinstance(group, dict)
    assert group["server"] == ServerSection().model_dump(mode="json")
    keys = ["rollout=local", "rollout.server.replicas=2", "run.launcher=slurm", "slurm.engines.nodes=2"]
    assert load_config("tiny_cpu", keys).transport.name == "file"


SERVED = "rollout.server.replicas=2"


@pytest.mark.parametrize("given", ["1e-300", "9e-7", "2e6", "1e300"])
@pytest.mark.parametrize("key", ["rollout.temperature", "eval.temperature", "eval.sets.held.temperature"])
def test_a_temperature_that_leaves_float32_is_refused(key: str, given: str) -> None:
    assert re.search(f"{re.escape(key)}=.*must be", problem(f"{key}={given}") or "")


def test_a_limit_of_completions_is_of_whole_groups_at_servers() -> None:
    few = ["rollout.group_size=8", "rollout.max_in_flight=7", SERVED]
    assert "max_in_flight=7 with rollout.group_size=8: no group could be sampled" in (problem(*few) or "")
    assert "samples in the learner's processes, and rollout.slots" in (problem("rollout.max_in_flight=64") or "")
    assert problem("rollout.group_size=8", "rollout.max_in_flight=8", SERVED) is None


LUFFY = "algorithm=luffy"
FILES = ["data.type=files", "data.train=a", "data.eval=b", "warm_start.steps=0"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ([LUFFY, "algorithm.old_logprobs=interpolated", "train.max_staleness=1"], "no version of the policy sampled"),
        ([LUFFY, "algorithm.correction.mode=truncate"], "correction.mode=truncate: a demonstration has no log-probs"),
        ([LUFFY, "algorithm.kl.coefficient=0.1"], "kl.coefficient=0.1: only sampled tokens can estimate that KL"),
        ([LUFFY, "algorithm.old_kl_limit=0.1", "train.minibatches=2"], "old_kl_limit=0.1: only sampled tokens"),
        ([LUFFY, "algorithm.tokens.choose=top_entropy"], "tokens.choose=top_entropy: it chooses among sampled"),
        ([LUFFY, "algorithm.balance.share=0.4"], "gamma=0.1: it balances clipped ratios, and a demonstration has none"),
        ([LUFFY, "algorithm.credit=discounted"], "credit=discounted: a demonstration has one advantage; set credit=c"),
        ([LUFFY, "algorithm.routing_replay=r3"], "algorithm.routing_replay=r3: no engine chose its experts; leave one"),
        ([LUFFY, "train.route_flips=true"], "train.route_flips=true: no engine chose its experts; leave one of them"),
        (
            [LUFFY, "environment.function=calculator", "environment.template=plain", "warm_start.steps=0"],
            "environment.function=calculator: a demonstration is one answer, without turns",
        ),
        (["algorithm=dpo", "algorithm.demonstration_gamma=0.1"], "demonstration_gamma=0.1 does nothing:"),
        ([*FILES, "data.fields.demonstration=x"], "fields.demonstration=x with algorithm.demonstration_gamma=null: no"),
        ([LUFFY, *FILES, "data.fields.demonstration=answer"], "'answer' is data.fields.answer, the default"),
        ([LUFFY, *FILES, "data.fields.prompt=answer"], "is also the field of an answer, so a model would learn to rep"),
        (["job=sft", *FILES[:3], "data.fields.demonstration=x"], "fields.demonstration=x: job=sft does not read it, j"),
    ],
)
def test_what_needs_a_token_that_was_sampled_is_refused_beside_demonstrations(keys: list[str], reason: str) -> None:
    assert reason in (problem(*keys) or "")


def test_a_demonstration_is_a_second_completion_of_its_group() -> None:
    for one in ([ONE], [ONE, REFILL], SINGLE, [ONE, "train.minibatch_by_group=true", "train.minibatches=2"]):
        assert problem("algorithm=dr_grpo", *one)
        assert problem(LUFFY, *one) is None
    assert problem(LUFFY, *FILES, "data.fields.prompt=answer", "data.fields.demonstration=x") is None


# Keys that only some values of others read: set without these they are refused by name, with the reason; at their
# defaults they are taken, so that a saved configuration is. Keys of a step: test_every_key_acts.py.
ROWS = ("data=gsm8k", "data.train=a.jsonl", "data.eval=b.jsonl")
SET = "eval.sets.hard.temperature"
UNREAD = [  # the key, what makes it one that nothing reads, and what reads it
    ("model.tiny.num_layers=3", ("model.path=models/mine",), ()),
    ("model.cache_dir=cache", ("model.path=models/mine",), ()),
    ("warm_start.batch_size=8", ("warm_start.steps=0",), ("warm_start.steps=3",)),
    ("warm_start.stop_at_accuracy=0.5", ("warm_start.steps=0",), ("warm_start.steps=3",)),
    ("data.on_leak=drop", (), ROWS),
    ("data.on_leak=drop", (), ("eval.sets.own.data.type=files", "eval.sets.own.data.eval=b.jsonl")),
    ("eval.temperature=0.5", (f"{SET}=1",), ("eval.sets.hard.limit=3",)),
    ("log.project=mine", (), ("log.sinks=wandb:offline",)),
    ("slurm.container_runtime=apptainer", (), ("slurm.container=/a.sif",)),
    ("slurm.container_mounts=/data", (), ("slurm.container=/a.sif",)),
    ("slurm.container_python=python3", (), ("slurm.container=/a.sif",)),
    ("rollout.server.running_requests=abort", ("rollout=vllm",), ("rollout=vllm", "train.max_staleness=1")),
    ("rollout.server.running_requests=abort", ("rollout=vllm",), ("rollout=vllm", "eval.mode=background")),
]


@pytest.mark.parametrize(("key", "idle", "read"), UNREAD)
def test_only_a_key_that_acts_is_taken(key: str, idle: tuple[str, ...], read: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", [*idle, key])
    assert any(line.startswith(f"{key} does nothing: ") for line in str(caught.value).splitlines()), caught.value
    assert "leave it out, or set it to its default, " in str(caught.value)
    load_config("tiny_cpu", [*read, key])
    load_config("tiny_cpu", idle)


def test_a_number_of_steps_beside_epochs_is_refused() -> None:
    load_config("sft_tiny", ["train.steps=7"])
    with pytest.raises(ConfigError, match=r"^train\.steps=7 does nothing: with sft\.epochs=2 epochs set the number"):
        load_config("sft_tiny", ["sft.epochs=2", "train.steps=7"])


@pytest.mark.parametrize("field", ["fields.prompt", "fields.answer", "prompt_template"])
def test_rows_of_conversations_have_no_fields_of_a_problem(field: str) -> None:
    data = {"type": "files", "train": "a", "eval": "b", "fields": {"messages": "messages"}}
    RunConfig.model_validate({"job": "sft", "data": data})
    name = field.removeprefix("fields.")
    own = {"fields": {"messages": "messages", name: "other"}} if name != field else {field: "other"}
    with pytest.raises(ValueError, match=rf"{field}='other' does nothing with fields.messages='messages'"):
        RunConfig.model_validate({"job": "sft", "data": data | own})


def test_what_was_set_before_gives_way_to_an_override_that_leaves_it_nothing_to_do(tmp_path: Path) -> None:
    """tiny_cpu has a warm start, gsm8k_tiny the sizes of a tiny model, sft_tiny a number of steps."""
    assert load_config("tiny_cpu", ["warm_start.batch_size=8", "warm_start.steps=0"]).warm_start.batch_size == 256
    without = load_config("tiny_cpu", ["warm_start.steps=0"])
    assert without.warm_start == RunConfig().warm_start
    assert load_config("gsm8k_tiny", [*ROWS[1:], "model.path=models/mine"]).model.tiny == RunConfig().model.tiny
    assert load_config("sft_tiny", ["sft.epochs=2"]).train.steps == RunConfig().train.steps
    save_resolved(without, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml"), []) == without


def test_a_file_gives_way_to_one_that_starts_from_it_but_not_to_itself(tmp_path: Path) -> None:
    above = tmp_path / "mine.yaml"
    above.write_text("defaults: tiny_cpu\nwarm_start: {steps: 0}\n")
    assert load_config(str(above), []).warm_start == RunConfig().warm_start
    above.write_text("defaults: tiny_cpu\nwarm_start: {steps: 0, batch_size: 8}\n")
    with pytest.raises(ConfigError, match=r"^warm_start\.batch_size=8 does nothing: with warm_start\.steps=0 there is"):
        load_config(str(above), [])


# Each shipped configuration with each choice of a group: it loads, or is refused with the reason.
CONF = Path(__file__).resolve().parents[2] / "conf"
CONFIGS = sorted(path.stem for path in CONF.glob("*.yaml"))
CHOICES = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml"))
OF_COMPLETIONS = {
    **{f"algorithm={name}": " with algorithm" for name in (*PAIR_ROWS, "remax")},
    "algorithm=scalerl": ": only single completions",
    "algorithm=grpo_process": " with reward=.*: the environment gives",  # environments judge their own turns
    "algorithm=luffy": ": a demonstration is one answer",
    "algorithm=gdpo": " with algorithm.advantage_of=parts and job=rl: an environment gives one reward",
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_shipped_config_loads_with_every_choice(choice: str) -> None:
    for name in CONFIGS:  # here, since a test of pytest takes as long as a configuration
        refused = loaded_or_refused_by(name, choice)
        assert refused is None, f"{name}: {refused}"


def loaded_or_refused_by(name: str, choice: str) -> str | None:
    """None where the configuration loads with the choice, or is refused with the reason that it should be."""
    none = ["slurm.engines.nodes=0", "weights.transport=auto", "weights.folder=null"]
    none += ["learner.offload.while_sampling=null"]
    where = none if choice == "rollout=local" else []  # no servers: no nodes, no route and no file for them
    of_two = choice.removeprefix("algorithm=") in PAIR_ROWS  # sequences
    pairs = ["learner.max_tokens_per_micro_batch=16384"] if of_two else []
    hub = ["data.repo=a/b", f"data.revision={'a' * 40}", "data.train=a.jsonl", "data.eval=b.jsonl"]
    if name in ("dpo_tiny", "reward_tiny"):
        hub, pairs = (
            [*hub, "data.fields.rejected=bad"],
            ["data.fields.rejected=bad"] if choice in ("data=gsm8k", "data=dapo_math") else [],
        )
    given = {"data=mixture": ["data.sources.sums.type=arithmetic"], "data=hub": hub}.get(choice, [])
    plain = ["learner.head_dtype=null"] if choice == "algorithm=gkd" else []
    keys = [choice, "model.path=/given", *where, *pairs, *given, *plain, *BESIDE.get(choice.partition("=")[2], ())]
    refused, samples_none = "", name in ("sft_tiny", "dpo_tiny", "reward_tiny")
    if name in ("calculator", "guess") and choice in OF_COMPLETIONS:
        refused = rf"environment\.function={name}{OF_COMPLETIONS[choice]}"
    elif name in ("calculator", "guess") and choice == "data=dapo_math":
        refused = rf"environment\.function={name} with data\.chat_template=true"
    elif name.endswith("_async") and choice == "algorithm=remax":
        refused = r"train\.max_staleness=\d+ with algorithm\.advantage_mean=greedy"
    elif choice == "algorithm=scalerl" and load_config(name, keys[1:2]).rollout.server.colocated:
        refused = r"train\.max_staleness=8: colocated servers cannot sample while the learner trains"
    elif samples_none and (choice.startswith("algorithm=") or choice in ("rollout=vllm", "rollout=sglang")):
        refused = r"job=\w+ does not read it, job=rl may"
    elif choice == "algorithm=gigpo" and load_config(name, keys[1:2]).environment.function is None:
        refused = r"algorithm\.credit=turn without environment\.function"
    elif name == "distill_tiny" and choice.startswith("algorithm=") and choice[10:] not in BESIDE:  # without a teacher
        refused = r"reward\.parts: the weights of exact_match are all 0|preference\.beta|with reward\.parts"
    try:
        load_config(name, keys)
    except ConfigError as error:
        return None if refused and re.search(refused, str(error)) else str(error)
    return f"not refused: {refused}" if refused else None


# Keys, values and commands that are no longer there are answered by one table.
@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_answered_with_what_to_do(key: str) -> None:
    named = key.replace("*", "one")
    assert is_removed_key(named)
    row = removed_key(named)
    assert row is not None
    assert row.name is None or not is_removed_key(row.name)
    if row.name is not None and not row.entries:  # it is read, as the next test says
        return
    mixture = ["data.type=mixture", "data.sources.one.type=arithmetic"] if key.startswith("data.sources.") else []
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", [*mixture, f"{named}=0.123456"])
    assert row.advice in str(caught.value) or "one value, without keys" in str(caught.value)


@pytest.mark.parametrize("key", [key for key, row in REMOVED.items() if row.name is not None])
def test_a_renamed_key_is_read_by_its_new_name(key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    named, row = key.replace("*", "one"), REMOVED[key]
    assert row.name is not None
    new, value = row.name.replace("*", "one"), list(row.entries)[-1] if row.entries else 0.5
    expected = [*dict.fromkeys((*row.usual, row.entries[value]))] if isinstance(value, bool | str) else value
    assert dict(flat(with_new_names(nested(named, value)))) == {new: expected}
    assert caplog.messages == [f"{named} is read as {new}"]
    assert new_name(named, value, {}) == (new, expected)
    if not row.entries and not named.startswith(new):  # both are given: the schema refuses the old one
        both = {**nested(named, value), **nested(new, 1)} if named.split(".")[0] != new.split(".")[0] else None
        assert both is None or with_new_names(both) == both


def test_a_renamed_value_is_read_by_its_new_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "old.yaml").write_text("defaults: [tiny_cpu]\neval: {mode: beside}\nrollout: {server: {replicas: 1}}\n")
    for keys in ((str(tmp_path / "old.yaml"), []), ("tiny_cpu", ["rollout.server.replicas=1", "eval.mode=beside"])):
        caplog.clear()
        assert load_config(*keys).eval.mode == "background"
        assert caplog.messages == ["eval.mode=beside is read as background"]


@pytest.mark.parametrize("above", [None, 0, "grpo", {"kl": 1}, [1]])
def test_a_renamed_key_stays_where_its_new_section_is_none(above: object, tmp_path: Path) -> None:
    tree = {"dpo": {"reference": "folder"}, "algorithm": above}
    assert with_new_names(tree) == tree
    (tmp_path / "old.yaml").write_text(json.dumps(tree))
    with pytest.raises(
        ConfigError, match=r"dpo\.reference='folder': no such key; it is called algorithm\.kl\.reference"
    ):
        load_config(str(tmp_path / "old.yaml"), [])


def nested(key: str, value: object) -> dict[str, object]:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def test_switches_are_entries_of_lists(tmp_path: Path) -> None:
    """In a file, in one of a resolved configuration, on a command line, and over a list."""
    text = "defaults: [tiny_cpu]\nlearner: {recompute: {moe: false, moe_act: true, core_attn: true, uniform: null}}\n"
    (tmp_path / "old.yaml").write_text(text)
    moe = "learner.recompute.moe_act"
    for keys, parts in (
        ((str(tmp_path / "old.yaml"), []), ("core_attn", "moe_act")),
        ((str(tmp_path / "old.yaml"), [f"{moe}=false"]), ("core_attn",)),
        (("tiny_cpu", [f"{moe}=true", "learner.recompute.core_attn=true"]), ("core_attn", "moe_act")),
        (("tiny_cpu", ["learner.recompute.parts=moe_act,core_attn,moe_act"]), ("core_attn", "moe_act")),
    ):
        assert load_config(*keys).learner.recompute.parts == parts
    (tmp_path / "both.yaml").write_text("learner: {recompute: {moe_act: true, parts: [moe]}}")
    with pytest.raises(ConfigError, match=r"moe_act=True: no such key; set learner\.recompute\.parts=moe_act"):
        load_config(str(tmp_path / "both.yaml"), [])
    (tmp_path / "unknown.yaml").write_text("learner: {offload: {activations: {moe: true, mole: true}}}")
    with pytest.raises(ConfigError, match=r"activations=.*mole.*: a list now; set learner\.offload\.activations=moe"):
        load_config(str(tmp_path / "unknown.yaml"), [])


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_dropped_where_it_says_what_happens_now(key: str) -> None:
    """As in config.yaml of an older version's run, which names every key."""
    named = key.replace("*", "one")
    for value in REMOVED[key].fixed:
        tree: dict[str, object] = {"kept": 1}
        inner = tree
        *sections, leaf = named.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        inner[leaf] = value
        assert not any(found == named for found, _ in flat(drop_removed(tree)))
        assert is_removed(named, value, {}.get)
    assert not is_removed(named, "another", {}.get)


def test_a_critics_optimizer_of_an_older_version_must_be_the_policys() -> None:
    """Else a critic that AdamW trained would go on by Muon, unsaid."""
    of_policy, critic = ["learner.optimizer.name=muon"], ["algorithm=ppo", "algorithm.unfinished_reward=null"]
    name = "algorithm.critic.optimizer.name"
    for same in ([*critic, f"{name}=adamw"], [*of_policy, *critic, f"{name}=muon"], [*of_policy, f"{name}=adamw"]):
        load_config("tiny_cpu", same)
    for other in ([*critic, f"{name}=muon"], [*of_policy, *critic, f"{name}=adamw"], [f"{name}=muon"]):
        with pytest.raises(ConfigError, match=r"critic\.optimizer.*: no such key; the critic is trained by the pol"):
            load_config("tiny_cpu", other)


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_a_removed_value_is_answered_with_another(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="must be ") as caught:
        load_config("tiny_cpu", [f"{key}={value}"])
    assert f"{key}={value!r}: must be {VALUES[key, value]}" in str(caught.value)


def test_a_removed_command_is_answered_with_what_to_do() -> None:
    assert not COMMANDS.keys() & _COMMANDS.keys()
    for name, advice in COMMANDS.items():
        result = CliRunner().invoke(app, [name, "x"])
        assert result.exit_code == 2
        assert advice.split()[0] in result.output


def test_a_name_of_a_map_is_a_key_as_any_other() -> None:
    config = load_config(
        "tiny_cpu", ["algorithm=sapo", "algorithm.tau_positive=2", "algorithm.parameters.tau_negative=3"]
    )
    assert config.algorithm.parameters == {**PARAMETERS, "tau_positive": 2, "tau_negative": 3}
    for key, said in (
        ("algorithm=vespo algorithm.tau_positive=2", r"tau_positive=2 does nothing: algorithm\.objective=vespo"),
        ("algorithm.parameters.tau_positve=2", r"tau_positve: no such key \(did you mean 'tau_positive'\?\); keys: "),
        ("algorithm.parameters.tau_positive=no", r"parameters\.tau_positive='no': must be a valid number"),
        ("algorithm.parameters.tau_positive=true", r"tau_positive=True: must be a number, not true or false"),
        ("algorithm.parameters=2", r"algorithm\.parameters=2: a section of names, not one value"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("tiny_cpu", key.split())


def test_the_configuration_of_a_run_of_0_3_0_loads() -> None:
    """config_0.3.0.yaml is the config.yaml that 0.3.0 wrote for its default run, every key of that version in it."""
    written = Path(__file__).with_name("config_0.3.0.yaml")
    assert load_config(str(written), []) == load_config("tiny_cpu", [])
    with pytest.raises(ConfigError, match=r"weights\.verify=False: no such key; receivers compare"):
        load_config(str(written), ["weights.verify=false"])
