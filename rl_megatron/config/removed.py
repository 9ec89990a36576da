"""Keys, values and commands of older versions: what each is called now, or what to do without it.

`load_config` reads a renamed key by its new name, and drops a removed one whose value says what is done now; an error
answers any other value.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_megatron.errors import quote_start

logger = logging.getLogger(__name__)

_OFF: tuple[object, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class Removed:
    """A key that no longer exists."""

    advice: str
    """The rest of the sentence "no such key; ..."."""
    fixed: tuple[object, ...] = _OFF
    """Values that say what is done now: null, false, 0 and empty ones, if none is given. A key with one is dropped."""
    name: str | None = None
    """The key that replaced it; the first ``*`` in it is what that of the old name is."""
    entries: Mapping[bool | str, str | None] = field(default_factory=dict)
    """Value of a switch -> the entry that it adds to the list ``name``; None, and a value that is off, add no entry."""
    usual: tuple[str, ...] = ()
    """The default of the list ``name``."""
    of_policy: str | None = None
    """The policy's key that a critic of its own follows now; ``fixed`` is the default of both."""


def _renamed(name: str) -> Removed:
    return Removed(f"it is called {name}", name=name)


def _entries(section: str, name: str, *switches: str) -> Mapping[str, Removed]:
    """Rows of switches of a section that are entries of the list ``name`` now."""
    return {f"{section}.{one}": Removed(f"set {name}={one}", name=name, entries={True: one}) for one in switches}


_STARTED = "start the server in slurm.setup or in a job of its own, and give its URL (docs/data.md)"
_ON_BAD_CALL = Removed("the model reads why a call cannot be read", fixed=("observe",))
_CLOSE_SECONDS = Removed("an environment has 10 s to close", fixed=(10.0,))
_RETRIES = Removed("a request is sent at most 3 times again", fixed=(3,))
_BACKOFF = Removed("the waits before retries are 0.5, 1 and 2 s", fixed=(0.5,))
_BATCH_SIZE = Removed("a forward pass has 32 completions", fixed=(32,))
_DEVICE = Removed("a classifier in the controller is on the CPU; reward_models.<name> has one on ranks", fixed=("cpu",))
_FALLOFF = Removed("a length outside the range gets 0")
_IN_FLIGHT = Removed("at most 16 requests are in flight", fixed=(16,))
_DTYPE = Removed("a model in the controller computes in float32", fixed=("float32",))
_TINY = Removed("the tiny model's heads are fixed, and its embeddings are not tied; give model.path for another")
_CRITICS = Removed("the critic is trained by the policy's optimizer, learner.optimizer; leave it out to have that")
_FUSION = Removed("TransformerEngine's layers sort tokens by kernels, and routers choose experts without one")
_NODES_ALIKE = Removed("the nodes of a job are alike, and a role has as many as its ranks fill")
_SINKS = "log.sinks"
_SPARE = Removed("a trajectory that fails drops its group, with environment.on_error=drop")

REMOVED: Mapping[str, Removed] = {
    "algorithm.correction.estimator": Removed("mode=reject goes by k3", fixed=("k3",)),
    "algorithm.correction.normalise": Removed("weights are not divided by their mean"),
    "algorithm.correction.of": Removed("every token is weighed, whatever its advantage", fixed=("all",)),
    "algorithm.correction.times": Removed("a run has one correction; write a product of several as an objective"),
    **{
        f"algorithm.critic.optimizer.{key}": replace(_CRITICS, fixed=(usual,), of_policy=f"learner.optimizer.{key}")
        for key, usual in (
            *(("beta1", 0.9), ("beta2", 0.95), ("clip_grad", 1.0), ("distributed", True), ("eps", 1e-8)),
            *(("moments_dtype", "float32"), ("muon.momentum", 0.95), ("muon.nesterov", True)),
            *(("muon.newton_schulz_steps", 5), ("muon.scale", "match_rms_adamw"), ("name", "adamw")),
            ("weight_decay", 0.0),
        )
    },
    "algorithm.critic.optimizer": _CRITICS,
    "algorithm.entropy_step": Removed("the weight of the entropy bonus is fixed", fixed=(0.005,)),
    "algorithm.entropy_target": Removed("the weight of the entropy bonus is fixed; set entropy_coefficient"),
    "algorithm.kl.follow_every": _renamed("algorithm.kl.reference_update_every"),
    "algorithm.kl.follow_rate": _renamed("algorithm.kl.reference_update_rate"),
    "algorithm.kl.horizon": Removed("the weight of the KL is fixed", fixed=(10000,)),
    "algorithm.kl.reset_moments": Removed("the policy's optimizer keeps its moments"),
    "algorithm.kl.target": Removed("the weight of the KL is fixed; set kl.coefficient"),
    "algorithm.kl.teachers.*.concurrency": Removed("64 sequences are in flight", fixed=(64,)),
    "algorithm.kl.teachers.*.retries": Removed("a sequence is retried five times", fixed=(5,)),
    "algorithm.max_length": Removed("token sums are divided by the most that is sampled, rollout.max_new_tokens"),
    "algorithm.normalise_rewards": Removed("map them in a reward.function of your own", fixed=("none",)),
    "algorithm.preference_beta": _renamed("algorithm.preference.beta"),
    "algorithm.preference_per_token": _renamed("algorithm.preference.per_token"),
    "algorithm.reward_bias": Removed("add it in a reward.function of your own"),
    "algorithm.reward_clip": Removed("clip rewards in a reward.function of your own"),
    "algorithm.reward_scale": Removed("set reward.parts.<name>.weight", fixed=(1.0,)),
    **{
        f"algorithm.{name}_{sign}": _renamed(f"algorithm.parameters.{name}_{sign}")
        for name in ("rate", "shape", "tau")
        for sign in ("negative", "positive")
    },
    "algorithm.second_moment_limit": Removed(
        "it is called algorithm.parameters.second_moment, with tokens.choose=second_moment"
    ),
    "algorithm.std_eps": Removed("1e-6 is added to the standard deviation", fixed=(1e-06,)),
    "algorithm.tokens.high": _renamed("algorithm.parameters.covariance_high"),
    "algorithm.tokens.kl_coefficient": _renamed("algorithm.parameters.kl_cov"),
    "algorithm.tokens.kl_estimator": Removed("the KL of choose=kl_cov is abs, as in the paper's code", fixed=("abs",)),
    "algorithm.tokens.limit": _renamed("algorithm.parameters.second_moment"),
    "algorithm.tokens.low": _renamed("algorithm.parameters.covariance_low"),
    "algorithm.whiten_mean": Removed("advantages are whitened by the mean of the batch", fixed=("batch",)),
    "algorithm.whiten_rewards": Removed("set algorithm.whiten=true, or advantage_std"),
    "algorithm.whiten_std": Removed("advantages are whitened by the standard deviation of the batch", fixed=("batch",)),
    "checkpoint.in_flight": Removed("a checkpoint holds the tokens of completions in flight", fixed=("tokens",)),
    "checkpoint.keep_every": Removed("use checkpoint.keep and checkpoint.keep_best, or copy the folders to keep"),
    "data.curriculum.decay": Removed("a pass rate is the mean of the one before and the new one", fixed=(0.5,)),
    "data.curriculum.highest": Removed("use retire_above or explore", fixed=(1,)),
    "data.curriculum.initial": Removed("pass rates are unknown at the start"),
    "data.curriculum.lowest": Removed("use retire_above or explore"),
    "data.curriculum.min_left": Removed("it is 0.1", fixed=(0.1,)),
    "data.curriculum.outside": Removed("use retire_above or explore", fixed=(0.1,)),
    "data.sources.*.environment.close_seconds": _CLOSE_SECONDS,
    "data.sources.*.environment.on_bad_call": _ON_BAD_CALL,
    "data.sources.*.environment.spare": _SPARE,
    "data.sources.*.reward.http.backoff_seconds": _BACKOFF,
    "data.sources.*.reward.http.concurrency": _IN_FLIGHT,
    "data.sources.*.reward.http.retries": _RETRIES,
    "data.sources.*.reward.model.batch_size": _BATCH_SIZE,
    "data.sources.*.reward.length.falloff_tokens": _FALLOFF,
    "data.sources.*.reward.model.device": _DEVICE,
    "data.sources.*.reward.model.dtype": _DTYPE,
    **{
        f"{section}.{name}_field": _renamed(f"{section}.fields.{name}")
        for section in ("data", "data.sources.*", "eval.sets.*.data")
        for name in (
            "answer",
            "context",
            "demonstration",
            "margin",
            "messages",
            "prompt",
            "rejected",
            "system",
            "tools",
        )
    },
    "dpo.reference": _renamed("algorithm.kl.reference"),
    "environment.close_seconds": _CLOSE_SECONDS,
    "environment.on_bad_call": _ON_BAD_CALL,
    "environment.spare": _SPARE,
    "eval.replicas": Removed("no server samples for evaluations alone; set eval.mode=background"),
    "eval.sets.*.at_steps": Removed("use eval.sets.<name>.every"),
    "eval.sets.*.environment.close_seconds": _CLOSE_SECONDS,
    "eval.sets.*.environment.on_bad_call": _ON_BAD_CALL,
    "eval.sets.*.environment.spare": _SPARE,
    "eval.sets.*.reward.http.backoff_seconds": _BACKOFF,
    "eval.sets.*.reward.http.concurrency": _IN_FLIGHT,
    "eval.sets.*.reward.http.retries": _RETRIES,
    "eval.sets.*.reward.model.batch_size": _BATCH_SIZE,
    "eval.sets.*.reward.length.falloff_tokens": _FALLOFF,
    "eval.sets.*.reward.model.device": _DEVICE,
    "eval.sets.*.reward.model.dtype": _DTYPE,
    "learner.draft.learning_rate_factor": Removed("a draft layer has the policy's learning rate", fixed=(1.0,)),
    "learner.first_stage_layers": Removed("it is called learner.stage_layers, which has a number for each stage"),
    "learner.fusion.permute": replace(_FUSION, fixed=(None,)),
    "learner.fusion": _FUSION,
    "learner.last_stage_layers": Removed("it is called learner.stage_layers, which has a number for each stage"),
    "learner.logprob_chunk_tokens": Removed("logits of at most 1024 positions are in float32 at once", fixed=(1024,)),
    **_entries("learner.offload.activations", "learner.offload.activations", "attention", "mlp", "moe"),
    "learner.optimizer.distributed": Removed("data-parallel ranks shard the optimizer's state", fixed=(True,)),
    "learner.optimizer.muon.momentum": Removed("Muon's momentum is 0.95", fixed=(0.95,)),
    "learner.optimizer.muon.nesterov": Removed("Muon's momentum is Nesterov's", fixed=(True,)),
    "learner.optimizer.muon.newton_schulz_steps": Removed("Muon's iteration has 5 steps", fixed=(5,)),
    "learner.overlap.bucket_parameters": Removed("a bucket ends after 40 million parameters, or a million a data rank"),
    "learner.recompute.block": Removed("use learner.recompute.uniform, or parts of layers"),
    **_entries("learner.recompute", "learner.recompute.parts", "core_attn", "layernorm", "mla_up_proj", "mlp", "moe"),
    **_entries("learner.recompute", "learner.recompute.parts", "moe_act", "shared_experts"),
    "learner.recompute_layers": Removed("it is called learner.recompute.uniform, 1 for true and null for false"),
    "learner.vocab_multiple": Removed("rows of the vocabulary are padded to a multiple of 8 times tp", fixed=(8,)),
    "log.samples_per_group": Removed("the first four completions of a group are written", fixed=(4,)),
    "log.tensorboard": Removed(
        "set log.sinks=tensorboard, or log.sinks=[]", name=_SINKS, entries={True: "tensorboard"}, usual=("tensorboard",)
    ),
    "log.wandb": Removed(
        "set log.sinks=wandb, or log.sinks=wandb:offline",
        name=_SINKS,
        entries={"off": None, "online": "wandb", "offline": "wandb:offline"},
        usual=("tensorboard",),
    ),
    "log.wandb_project": _renamed("log.project"),
    "model.tiny.head_dim": _TINY,
    "model.tiny.num_heads": replace(_TINY, fixed=(4,)),
    "model.tiny.num_kv_heads": replace(_TINY, fixed=(2,)),
    "model.tiny.tie_embeddings": _TINY,
    "profile.engines": Removed("the engines' own profilers record their kernels, see rollout.server.options"),
    "profile.nvtx": Removed("profile.steps records kernels, and rl-megatron report RUN --trace FILE shows them"),
    "profile.ranks": Removed("the first rank of each role is profiled", fixed=([0], 0, "0")),
    "reward.http.backoff_seconds": _BACKOFF,
    "reward.http.concurrency": _IN_FLIGHT,
    "reward.http.retries": _RETRIES,
    "reward.model.batch_size": _BATCH_SIZE,
    "reward.length.falloff_tokens": _FALLOFF,
    "reward.model.device": _DEVICE,
    "reward.model.dtype": _DTYPE,
    "rollout.interrupt.thinking_ends": Removed("thinking ends with </think>", fixed=("</think>",)),
    "rollout.max_refills": Removed("a step draws at most 8 batches of prompts", fixed=(8,)),
    "rollout.max_seconds": _renamed("rollout.completion_timeout_seconds"),
    "rollout.server.backoff_seconds": Removed("retries and restarts wait 0.5, 1, 2, ... seconds", fixed=(0.5,)),
    "rollout.server.concurrency": _renamed("rollout.server.max_concurrent_groups"),
    "rollout.server.health_seconds": Removed("a server has 60 s for three health checks", fixed=(60.0,)),
    "rollout.server.least_replicas": Removed("the run goes on while one server is left", fixed=(1,)),
    "rollout.server.meeting_host": _renamed("weights.rendezvous_host"),
    "rollout.server.retries": Removed("a request is sent at most 3 times again", fixed=(3,)),
    "rollout.server.transport": _renamed("weights.transport"),
    "rollout.server.weights_dir": _renamed("weights.folder"),
    "run.slow_factor": Removed("ranks/slowest is the slowest rank, and log.txt names its node", fixed=(1.5, None)),
    "run.slow_steps": Removed("each row has ranks/slowest", fixed=(20,)),
    "run.watchdog_disk_seconds": Removed("it is an hour; run.watchdog_seconds may be longer", fixed=(3600.0,)),
    "sandbox.backoff_seconds": Removed("retries wait 0.5, 1, 2, ... seconds", fixed=(0.5,)),
    "sandbox.concurrency": Removed("as many programs run at once as there are cores", fixed=(4,)),
    "sandbox.cpu_seconds": Removed("a program may take sandbox.seconds of processor time", fixed=(10.0,)),
    "sandbox.files_mb": Removed("a program's files may take 64 MiB", fixed=(64,)),
    "sandbox.image": Removed("set sandbox.type=remote, whose server runs the container"),
    "sandbox.output_kb": Removed("a program may print 64 KiB", fixed=(64,)),
    "sandbox.processes": Removed("a program may have 16 processes", fixed=(16,)),
    "sandbox.retries": Removed("a program is posted again six times", fixed=(6,)),
    "services": Removed(_STARTED),
    "slurm.array": Removed("submit a run for each seed: for s in 0 1 2; do rl-megatron submit CONFIG seed=$s; done"),
    "slurm.dependency": Removed("set slurm.options=[--dependency=afterok:123]"),
    "slurm.critic.nodes": replace(_NODES_ALIKE, fixed=(0,)),
    "slurm.critic": replace(_NODES_ALIKE, fixed=(None, {})),
    **{
        f"slurm.engines.{key}": replace(_NODES_ALIKE, fixed=(None,))
        for key in ("constraint", "cpus_per_server", "gpus_per_node", "memory_per_node")
    },
    "slurm.engines.no_kill": Removed("a job that loses a node is requeued, and resumes from its last checkpoint"),
    "slurm.engines.partition": replace(_NODES_ALIKE, fixed=(None,)),
    "slurm.exclude_slow": Removed("name nodes in slurm.exclude"),
    "slurm.heterogeneous": _NODES_ALIKE,
    "slurm.modules": Removed("set slurm.setup='module load cuda nccl && ...'"),
    "slurm.qos": Removed("set slurm.options=[--qos=NAME]"),
    "slurm.reference.nodes": replace(_NODES_ALIKE, fixed=(0,)),
    "slurm.reference": replace(_NODES_ALIKE, fixed=(None, {})),
    "slurm.reservation": Removed("set slurm.options=[--reservation=NAME]"),
    "slurm.services": Removed(_STARTED),
    "slurm.speeds.draft_acceptance": Removed("each proposal that follows accepted ones is accepted with 0.85"),
    **{
        f"slurm.speeds.{key}": Removed(f"write {name}: NUMBER into a file of slurm.speeds.gpu", fixed=(usual,))
        for key, name, usual in (
            *(("memory", "node_file", 10.0), ("nic", "network", 50.0), ("nvlink", "nvlink", 450.0)),
            *(("storage", "storage", 100.0), ("storage_node", "storage_node", 5.0)),
        )
    },
    "slurm.speeds.step_seconds": Removed("set slurm.speeds.gpu, by which a step is predicted"),
    "slurm.speeds.tflops": Removed("set slurm.speeds.gpu, whose peak is known", fixed=(989.0,)),
    "train.on_nonfinite": Removed("at most 3 optimizer steps in a row are skipped", fixed=("skip:3",)),
    "train.stream_micro_batches": Removed(
        "gradients are computed once the batch is whole; train.max_staleness overlaps them"
    ),
    "train.whole_groups": _renamed("train.minibatch_by_group"),
    "weights.meeting_host": _renamed("weights.rendezvous_host"),
    "weights.verify": Removed("receivers compare a digest of every box", fixed=(True,)),
}
"""Dotted key -> row; ``*`` is the name of a mapping's entry. A section stands for all keys in it, and so comes after
keys that have a row, because the first row of a key counts."""

RENAMED_VALUES: Mapping[tuple[str, str], str] = {("eval.mode", "beside"): "background"}
"""(key, old value) -> the value that replaced it."""

_EXAMPLE = "with docs/examples/environments on PYTHONPATH, as docs/environments.md shows"

VALUES: Mapping[tuple[str, str], str] = {
    ("eval.mode", "pinned"): "'background', which samples evaluations on the servers of training, or 'blocking'",
    ("environment.function", "nemo_gym"): f"nemo_gym_sessions:NemoGym {_EXAMPLE}",
    ("environment.function", "openenv"): f"openenv_episodes:OpenEnv {_EXAMPLE}",
    ("environment.function", "reasoning_gym"): f"reasoning_gym_problems:ReasoningGym {_EXAMPLE}",
    ("environment.function", "verifiers"): f"verifiers_episodes:play {_EXAMPLE}",
    ("learner.optimizer.moments_dtype", "float8"): "'bfloat16', which takes 4 bytes a parameter, or 'float32'",
    ("sandbox.type", "docker"): "'subprocess' or 'remote'; a server at sandbox.url may run the container",
    ("weights.transport", "disk"): "'file', the new name of 'disk'",
    **{
        ("weights.transport", value): "'direct', which sends weights by process group, CUDA IPC or carriers as it fits"
        for value in ("process_group", "shared_memory", "cuda_ipc", "carried", "memory")
    },
    ("weights.transport", "package.module:name"): "'auto', 'file' or 'direct'; no code of your own moves weights",
}
"""(key, removed value) -> the rest of the sentence "must be ..."."""

COMMANDS: Mapping[str, str] = {
    "attach": "rl-megatron status RUN prints the line to type, `tail -F ...`",
    "cancel": "rl-megatron status RUN prints the line to type, `scancel ...`",
    "logs": "rl-megatron status RUN prints the line to type, `tail -F ...`",
    "inspect": "rl-megatron convert FOLDER --inspect, and with a layout convert MODEL --inspect --layout LAYOUT",
    "engines": "resume the run with another rollout.server.replicas",
    "profile": "set profile.steps, and resume the run",
    "rehearse": "rl-megatron submit --smoke tries two steps, a kill and a resume on a run's own nodes",
    "serve": "serve the exported folder by an engine, `vllm serve runs/NAME/hf_step_N` (docs/evaluation.md)",
    "verify": "rl-megatron convert FOLDER --verify, with the same options",
    "watch": "open runs/NAME/report.html, which is written again each minute while the run trains",
}
"""Name of a removed command -> what to do in its place."""


def removed_key(key: str) -> Removed | None:
    """The row of a dotted key; None if no version had it, or this one has it."""
    return _row(key)[1]


@functools.lru_cache(4096)  # all keys of all files are looked up, and again at each load
def _row(key: str) -> tuple[str, Removed | None]:
    """The pattern that a key matches, and its row."""
    parts = key.split(".")
    for pattern, row in REMOVED.items():
        wanted = pattern.split(".")
        if len(wanted) <= len(parts) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False)):
            return pattern, row
    return "", None


def describe_replacement(key: str, value: object) -> str | None:
    """The rest of the sentence "must be ..." for a removed value of ``key``; None for any other value."""
    if not isinstance(value, str):
        return None
    return VALUES.get((key, value)) or VALUES.get((key, "package.module:name" if ":" in value else ""))


def is_off(value: object) -> bool:
    """True if a value turns its key off: null, false, 0 or empty."""
    return _is_among(value, _OFF)


def is_removed(key: str, value: object, given: Callable[[str], object]) -> bool:
    """True if the key no longer exists and its value is what happens now. ``given`` returns the values of other keys,
    which what happens depends on."""
    row = removed_key(key)
    if row is None:
        return False
    has_own = given("algorithm.credit") == "gae" and given("algorithm.critic.backbone") != "policy"
    of_policy = given(row.of_policy) if row.of_policy is not None and has_own else None
    return _is_among(value, row.fixed if of_policy is None else (of_policy,))


def renamed(key: str) -> str | None:
    """Returns the key that replaced ``key``, or None if it was not renamed."""
    pattern, row = _row(key)
    if row is None or row.name is None:
        return None
    stars = (part for part, old in zip(key.split("."), pattern.split("."), strict=False) if old == "*")
    return row.name.replace("*", next(stars, "*"))


def new_name(key: str, value: object, tree: Mapping[str, Any]) -> tuple[str, object] | None:
    """Returns the new name of a renamed key and its value there, or a key and its renamed value. A switch adds its
    entry to the list in ``tree``, or takes it out. None for any other key, and a switch that is neither on nor off."""
    if isinstance(value, str) and (key, value) in RENAMED_VALUES:
        logger.info("%s=%s is read as %s", key, value, RENAMED_VALUES[key, value])
        return key, RENAMED_VALUES[key, value]
    row, name = _row(key)[1], renamed(key)
    if row is None or name is None:
        return None
    is_known = isinstance(value, bool | str) and value in row.entries
    if row.entries and not is_known and not is_off(value):
        return None
    logger.info("%s is read as %s", key, name)
    if not row.entries:
        return name, value
    present = given_value(tree, name)
    others = [one for one in (present if isinstance(present, list) else row.usual) if one not in row.entries.values()]
    entry = row.entries[value] if isinstance(value, bool | str) and is_known else None
    return name, others if entry is None else [*others, entry]


def with_new_names(tree: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Copies the values of a section and gives renamed keys their new names, one log line each.

    A key keeps its old name, and the schema refuses it, if its new name is given, too. So does a key with a new name
    in another section, or inside a value that is not a section.
    """
    out = copy.deepcopy(dict(tree))
    prefix = f"{section}." if section else ""
    for parts, value in _leaves(tree):
        found = new_name(prefix + ".".join(parts), value, {section: out} if section else out)
        if found is None or not found[0].startswith(prefix):
            continue
        *above, leaf = found[0].removeprefix(prefix).split(".")
        inner: object = out
        for name in above:
            inner = inner.get(name, {}) if isinstance(inner, dict) else None
        there = given_value(tree, found[0].removeprefix(prefix))
        switches = isinstance(there, dict) and all(_row(f"{found[0]}.{one}")[1] for one in there)
        is_free = there is None or switches or found[0] == prefix + ".".join(parts)
        if not isinstance(inner, dict) or not is_free:
            continue
        _take(out, parts)
        functools.reduce(lambda inner, name: inner.setdefault(name, {}), above, out)[leaf] = found[1]
    return out


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def given_value(tree: object, key: str) -> object:
    """The value at a dotted key; None where it or a section of it is not given."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _take(tree: dict[str, Any], parts: Sequence[str]) -> None:
    """Takes a value out, and each section that is empty then."""
    name, *below = parts
    if below and isinstance(tree.get(name), dict):
        _take(tree[name], below)
    if not below or tree.get(name) == {}:
        tree.pop(name, None)


def drop_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the tree of values without removed keys that have the value of what happens now; one log line each."""
    return dict(_kept(tree, "", functools.partial(given_value, tree)))


def _kept(tree: Mapping[str, Any], above: str, given: Callable[[str], object]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{above}{name}"
        if (row := removed_key(key)) is not None and is_removed(key, value, given):
            logger.info("%s=%s is dropped, for there is no such key: %s", key, quote_start(value), row.advice)
        elif isinstance(value, dict) and value:
            inner = dict(_kept(value, f"{key}.", given))
            if inner or row is None:  # a removed section is dropped if all its keys are
                yield name, inner
        else:
            yield name, value


def _is_among(value: object, values: tuple[object, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)
