"""The rules between keys, in the order of their messages: rows, and the functions of checks.py for what needs code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config import checks, reads
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.feature import feature_rules
from rl_megatron.rules import (
    SET,
    UNSET,
    Above,
    Below,
    CheckFunction,
    Condition,
    Excludes,
    Needs,
    Not,
    On,
    OneOf,
    ReadIf,
    Rule,
    When,
    broken,
    read_with_reference,
)
from rl_megatron.rules import excluded as _excluded

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig

SERVED = On("rollout.served", True, "rollout.engine")
NOT_SERVED = On("rollout.served", False, "rollout.engine")
RUNNING = On("rollout.server.addresses")
COLOCATED = On("rollout.server.colocated", True)
ON_CPU, ON_GPUS = On("learner.device", "cpu"), On("learner.device", Not("cpu"))
DIRECT = On("transport.direct", True, "weights.transport")
ONE_NCCL = (SERVED, ON_GPUS, On("transport.members", True, "weights.transport"))
SAMPLES = On("kind.samples", True, "job")
PAIRS = On("algorithm.preference.beta")
KL, IN_REWARDS = On("algorithm.kl.coefficient", Above(0)), On("algorithm.kl.placement", Not("loss"))
CORRECTION = On("algorithm.correction.acts", True, "algorithm.correction.mode")
TURNS = On("algorithm.credit", "turn")
GREEDY = On("algorithm.advantage_mean", "greedy")
STALE = On("train.max_staleness", Above(0))
ENGINE_NODES = On("slurm.engines.nodes", Above(0))
ENVIRONMENT = On("training_environments@function")
DEMONSTRATIONS = On("algorithm.demonstration_gamma")
WARM_START = On("warm_start.steps", Above(0))
STEPS = On("reward.steps", True), On("data.sources.*.reward.steps", True)
BACKGROUND = On("eval.mode", Not("blocking"))

_WITH_SERVERS = "set rollout.server.replicas, or rollout=vllm or sglang, or leave it out"
_LEAVE_OUT, _LEAVE_IT = "leave one of them out", "leave it out"
_IN_LEARNER = "this engine samples in the learner's processes"
_NCCL = (
    "ranks of one NCCL group that choose different algorithms wait for each other forever",
    "set weights.transport=file",
)


def _all_excluded(one: Condition, others: tuple[On, ...], why: str, fix: str) -> Iterator[Rule]:
    """Returns a row for each of ``others``; all have one reason and one fix."""
    return (Excludes(one=one, other=other, why=why, fix=fix) for other in others)


def _read(why: str, *keys: str, any_of: Condition) -> Rule:
    return ReadIf(keys=keys, any_of=(any_of,) if isinstance(any_of, On) else any_of, why=why)


# fmt: off
def _model_rules() -> Iterator[Rule]:
    path = On("model.path")
    yield Needs(when=On("model.name"), all=path, why="the configuration is for the model of that name",
          fix="set model.path to a folder with its config.json, tokenizer and safetensors, seen by all nodes")
    yield Needs(when=On("model.random_weights", True), all=path, why="random weights take the sizes of model.path, and "
          "the tiny model always has random weights", fix="set model.path, or leave random_weights out")
    yield Needs(when=On("learner.model"), all=path, why="it reads the config.json of model.path, and the tiny model "
          "needs no custom family", fix="set model.path, or leave learner.model out")


def _server_problems() -> Iterator[Rule]:
    """Servers, and the transport of weights to them."""
    yield Excludes(one=On("weights.transport", "file"), other=NOT_SERVED,
          why=f"files are for servers, and {_IN_LEARNER}", fix="set weights.transport=auto")
    started = tuple(On(f"rollout.server.{key}", Above(1)) for key in ("replicas", "tp", "pp", "dp", "ep", "nodes"))
    yield from _all_excluded(RUNNING, (On("rollout.python"), On("rollout.server.options"),
          On("rollout.server.memory_fraction"), *started), "these servers are already running, and the second key "
          "is for servers that the run starts", "leave one of them out")
    yield Needs(when=On("rollout.server.token_file"), all=RUNNING, why="it is for rollout.server.addresses, and the "
          "run makes a token for servers that it starts", fix="leave it out")
    yield Excludes(one=On("rollout.router_noise", Above(0)), other=On("rollout.engine", Not("local")),
          why="servers compute routers in their own kernels, without noise",
          fix="set rollout.engine=local, or rollout.router_noise=0")
    yield Needs(when=On("learner.offload.while_sampling"), all=(SERVED, COLOCATED),
          why="only colocated servers take turns with the "
                "learner", fix="set rollout.server.colocated=true with rollout=vllm or "
          "sglang, or leave it out")
    yield from _excluded((COLOCATED, SERVED),
        (STALE, "colocated servers cannot sample while the learner trains", "set one of them to its default"),
        ((ON_GPUS, On("rollout.server.addresses", UNSET), On("rollout.server.memory_fraction", UNSET)),
         "by default an engine takes nearly all GPU memory, but the learner's weights and optimizer stay there",
         "set rollout.server.memory_fraction to the share that remains"),
        (ENGINE_NODES, "those nodes run only servers", _LEAVE_OUT))
    yield from _all_excluded((On("rollout.engine", "local"), On("rollout.server.replicas")), (ON_GPUS, *started[1:],
          RUNNING, On("rollout.server.options"), DIRECT), "each of these servers is one CPU process and loads "
          "weights from a file", "leave one of them out, or set rollout=vllm or sglang")
    invariant = On("rollout.server.batch_invariant", True)
    yield from _excluded(invariant,
        (NOT_SERVED, f"{_IN_LEARNER} with torch's products, whose last bits depend on the number of rows",
         "set rollout=vllm or sglang, or leave it out"),
        (ON_CPU, "the engines' kernels for it need GPUs", "leave it out"),
        (RUNNING, "it is for servers that the run starts", "start your servers with it (docs/troubleshooting.md), and "
         "leave it out"))
    yield from _excluded((invariant, *ONE_NCCL),
        (On("rollout.engine", Not("sglang")), *_NCCL),
        ((On("rollout.engine", "sglang"), On("rollout.server.ranks", Above(1), "rollout.server.tp")), *_NCCL))
    kept = On("rollout.server.running_requests", "keep_cache"), SERVED
    yield from _excluded(kept,
        (COLOCATED, "servers release their caches before each training, so nothing is left to keep", _LEAVE_OUT))
    yield Excludes(one=STALE, other=(GREEDY, SERVED), why="a push between a group's completions and its greedy one "
          "would make the baseline another policy's reward", fix="set one of them to its default")


def _sampling_rules() -> Iterator[Rule]:
    """Stop texts, limits of time and number."""
    yield Excludes(one=On("rollout.completion_timeout_seconds"), other=NOT_SERVED,
          why=f"{_IN_LEARNER} a whole batch in one call, so it cannot end one completion "
                "early", fix=_WITH_SERVERS)
    yield Excludes(one=On("rollout.stop", Not(())), other=On("rollout.ignore_eos", True),
          why="ignore_eos ends no completion early", fix=_LEAVE_OUT)
    limit = "rollout.max_in_flight"
    yield Excludes(one=On(limit, Below("rollout.group_size")), why="no group could be sampled",
          fix="raise the first, or lower the second")
    yield Excludes(one=On(limit), other=NOT_SERVED, why=f"{_IN_LEARNER}, and rollout.slots limits it",
          fix=_WITH_SERVERS)


def _learner_rules() -> Iterator[Rule]:
    """Modes of the learner: adapters, a value layer of the policy, determinism, fused routers."""
    deterministic = On("learner.deterministic", True)
    yield from _excluded(deterministic,
        ((ON_GPUS, NOT_SERVED), f"{_IN_LEARNER} by torch.cumsum, which has no deterministic kernel for GPUs",
         "set rollout=vllm or sglang, or leave it out"),
        (ONE_NCCL, f"the learner's ranks choose NCCL's algorithm by NCCL_ALGO, and {_NCCL[0]}", _NCCL[1]))
    yield Excludes(one=On("learner.head_dtype"), other=On("algorithm.needs_top", True, "algorithm.kl.estimator"),
          why="it computes the logits of a few positions at a time and keeps none, but top_k needs "
                "all", fix="leave it out, or set "
          "kl.estimator=k1, k2 or k3")


def _algorithm_rules() -> Iterator[Rule]:
    """Rules between the algorithm and what is sampled, shown and read in turns."""
    yield Excludes(one=On("train.lr_min", Above("train.learning_rate")), why="the learning rate cannot fall to "
          "a higher value", fix="lower the first")
    yield from _excluded(PAIRS,
        (On("rollout.group_size", Below(2)), "a pair needs two completions", "set rollout.group_size=2 or more"),
        (On("algorithm.old_logprobs", "interpolated"), "pairs have no ratio to an old policy",
         "set old_logprobs=rollout"),
        (KL, "a loss of pairs has its own KL, or none", "set algorithm.kl.coefficient=0"))
    yield from _excluded(DEMONSTRATIONS,
        (On("algorithm.old_logprobs", "interpolated"), "no version of the policy sampled the "
         "demonstration", "set learner or rollout"),
        (CORRECTION, "a demonstration has no log-probs of an engine",
         "leave algorithm.correction out"),
        (KL, "only sampled tokens can estimate that KL", "set kl.coefficient=0"),
        (On("algorithm.old_kl_limit"), "only sampled tokens can estimate that KL", "set old_kl_limit=null"),
        (On("algorithm.tokens.choose", Not("all")), "it chooses among sampled tokens, and a demonstration was not "
         "sampled",
         "set tokens.choose=all"),
        (On("algorithm.credit", Not("completion")), "a demonstration has one advantage", "set credit=completion"),
        (ENVIRONMENT, "a demonstration is one answer, without turns of an environment", _LEAVE_OUT))
    yield Needs(when=On("sources@fields.demonstration"), all=DEMONSTRATIONS, why="nothing reads it",
          fix="set that, or leave it out")


def _advantage_rules() -> Iterator[Rule]:
    """The parts of an advantage: its baseline, its std, its credit and what it compares."""
    mean, std, credit = (f"algorithm.{key}" for key in ("advantage_mean", "advantage_std", "credit"))
    whole, of_batch = On(mean, OneOf(("greedy", "moving", "tracked"))), OneOf(("batch", "advantages"))
    yield from _all_excluded(On(credit, OneOf(("gae", "optimal"))), (On(mean, Not("none")), On(std, Not("none"))),
          "it has its own baseline", "set both to none")
    yield Excludes(one=On(credit, "optimal"), other=CORRECTION, why="its baseline is optimal only without a "
          "correction's weights",
          fix="leave the correction out")
    yield Excludes(one=On(std, "advantages"), other=On(mean, Not("group")), why="with one baseline for the batch it is "
          "the std of rewards", fix="set advantage_std=batch, or advantage_mean=group")
    yield Excludes(one=GREEDY, other=On(std, Not("none")), why="the difference from the greedy completion is not "
          "divided", fix="set advantage_std=none")
    yield Excludes(one=(On("algorithm.whiten_of", "completions"), On("algorithm.whiten", True)), other=On(credit,
          Not("completion")), why="a completion then has several advantages", fix="set whiten_of=tokens, or "
          "credit=completion")
    yield from _excluded(TURNS,
        (whole, "that baseline is the reward of a whole completion, and credit=turn compares rewards of turns",
         "set advantage_mean=group, batch or none"),
        ((KL, IN_REWARDS), "the KL of all turns would go into the last turn's reward", "set kl.placement=loss"))
    for baseline, alike in (("index", "turns with the same number"), ("state", "turns that began from one state")):
        yield from _all_excluded((TURNS, On("algorithm.turn_baseline", baseline)), (On(mean, of_batch), On(std,
              of_batch)), f"{alike} are compared within their group", "set it to group or none, or turn_baseline=all")
    yield Excludes(one=(TURNS, On("algorithm.turn_baseline", "state")), other=(On("algorithm.turn_compared",
          "rewards"), On("algorithm.gamma_turn", Not(0))), why="a turn before the reward gets none of it unless "
          "another turn began from the same state", fix="set turn_compared=returns, or gamma_turn=0")
    of_sum = "it changes the sum", "leave it out, and make it a part or a weight"
    yield from _excluded(On("algorithm.advantage_of", "parts"),
        (whole, "that baseline is for the sum, and each part needs its own",
         "set advantage_mean=group, batch or none"),
        (On(credit, OneOf(("turn", "gae"))), "parts are compared between whole completions, so turns and a critic "
         "would have no effect", "set credit=completion or discounted, or advantage_of=sum"),
        (On("algorithm.unfinished_reward"), *of_sum),
        (On("algorithm.overlong_buffer", Above(0)), *of_sum),
        ((KL, On("algorithm.kl.placement", "completion_reward")), "the KL is not one of the compared "
         "parts", "set kl.placement=loss"))
    yield from _excluded(On("algorithm.best_of", Above(1)),
        (TURNS, "best_of compares a group's completions, not turns", "set best_of=1"),
        (On("algorithm.advantage_of", "parts"), "each part would have different best completions", "set best_of=1"),
        (On(std, of_batch), "best_of uses the std of a group's best rewards", "set advantage_std=group or none"))


def _loss_rules() -> Iterator[Rule]:
    """Ratio, objective and aggregation, the KL, and losses of pairs."""
    level, sums = "algorithm.ratio_level", ("token_mean", "seq_mean_token_sum_norm", "prompt_mean")
    through_ratio = On("algorithm.objective", OneOf(("clip", "importance", "sapo")))
    by_mean = "set aggregation=seq_mean_token_mean"
    yield Excludes(one=through_ratio, other=On(level, "sequence_sum"), why="its ratio is a detached weight, but the "
          "objective needs a ratio with a gradient", fix="set ratio_level=sequence")
    for given, other in (("sequence", OneOf(sums)), ("turn", Not("seq_mean_token_mean"))):
        yield Excludes(one=(On(level, given), through_ratio), other=On("algorithm.aggregation", other), why="the ratio "
              "of a long sequence would weigh more than that of a short one", fix=by_mean)
    yield from _all_excluded(On("learner.padding.sequences", 1), (PAIRS, On("kind.rows", "pairs", "job")),
          "both sequences of a pair are in one micro-batch", "set it to 2 or more")
    yield Excludes(one=On("algorithm.objective", "gmpo"), other=On("algorithm.aggregation", Not("seq_mean_token_mean")),
          why="a sequence has one loss for all of its tokens, which its length would weight", fix=by_mean)
    for low, high in (("cap_low", "cap_high"), ("correction.low", "correction.high"),
                      ("parameters.covariance_low", "parameters.covariance_high")):
        yield Excludes(one=On(f"algorithm.{low}", Above(f"algorithm.{high}")), why="the lower limit is above the "
              "upper one", fix="swap them")
    yield Excludes(one=On("algorithm.correction.level", "worst"), other=On("algorithm.correction.mode",
          OneOf(("truncate", "mask", "band"))), why="weights are per token or per sequence; only mode=reject can use "
          "the worst token", fix="set level=token, sequence or product, or mode=reject")
    estimator, placement = "algorithm.kl.estimator", "algorithm.kl.placement"
    yield from _excluded(KL,
        ((On(placement, "token_reward"), On("algorithm.credit", "completion")), "the advantage is per completion, so a "
         "token's reward would have no effect", "set kl.placement=completion_reward, or credit=discounted, optimal or "
         "gae"),
        ((On(estimator, "top_k"), IN_REWARDS), "top_k compares tokens that were not sampled, so it cannot be a reward "
         "of the sampled one", "set kl.placement=loss or estimator=k1"),
        ((On(estimator, OneOf(("k1", "abs"))), On(placement, "loss"), On("algorithm.kl.importance_weighted", False)),
         "on tokens that the policy samples, its gradient is not the KL's (the gradient of k1 is 0 on average)",
         "set kl.importance_weighted=true, or k2 or k3"))
    for key in ("algorithm.preference", "dpo"):
        yield Excludes(one=On(f"{key}.target_margin", Above(0)), other=On(f"{key}.loss", Not("dpo")),
              why="the loss does not read it", fix="set it to 0, or loss=dpo")
        yield Needs(when=On(f"{key}.loss", "orpo"), all=(On(f"{key}.per_token", True), On(f"{key}.reference_free",
              True)), why="it compares odds of mean token probabilities", fix="set both to true")
    yield Excludes(one=On("algorithm.preference.loss", "kto"), why="kto trains on single labeled answers, but "
          "this section is for pairs of completions", fix="set another loss, or job=dpo dpo.loss=kto")


def _reward_rules() -> Iterator[Rule]:
    for key in ("reward", "data.sources.*.reward", "eval.sets.*.reward"):
        yield Excludes(one=On(f"{key}.length.min_tokens", Above(f"{key}.length.max_tokens")), why="no length is in "
              "that range",
              fix="raise the second or lower the first")


def _environment_rules() -> Iterator[Rule]:
    plain = On("environments@template", "plain")
    yield from _excluded(plain,
        (On("environments@thinking", Not("template")), "without a chat template no thinking is "
         "dropped", "leave thinking out"),
        (On("environments@tool_parser"), "plain texts show neither tools nor calls",
         "set template=chat, or leave tool_parser out"))
    yield Excludes(one=On("environments@min_turn_tokens", Above("environments@max_tokens")),
          why="no trajectory would have a turn", fix="lower the first")
    yield Excludes(one=On("algorithm.ratio_level", "turn"), other=On("training_environments", {},
          "environment.function"), why="a completion is one turn", fix="set ratio_level=sequence, or "
          "environment.function")
    own, function = "data.sources.*.environment", "data.sources.*.environment.function"
    yield Excludes(one=On(own, SET, function), other=On(function, UNSET),
          why="a source's environment needs a function", fix="set one, or leave the section out to use the run's "
          "environment")
    yield from _excluded(On(own, SET, function),
        (On("data.sources.*.reward"), "the environment gives the reward", _LEAVE_OUT),
        (WARM_START, "a warm start learns the answers of rows, or the demonstrations of the run's environment",
         "set warm_start.steps=0"),
        (On("algorithm.overlong_buffer", Not(0)), "the buffer is subtracted from the longest length, which differs by "
         "source",
         "leave the buffer out"))
    yield from _all_excluded(On("algorithm.compares_states", True, "algorithm.turn_baseline"), STEPS,
          "steps of a completion have no observations between them, so there are no states to compare",
          "set turn_baseline=all or index")
    yield from _excluded(ENVIRONMENT,
        (PAIRS, "pairs consist of single completions", _LEAVE_OUT),
        (GREEDY, "greedy turns lead to other observations, so a greedy trajectory is no baseline for sampled ones",
         "set advantage_mean=group"),
        (On("rollout.completion_timeout_seconds"), "environment.seconds already limits a trajectory, sampling included",
         "leave completion_timeout_seconds out"),
        ((On("algorithm.advantage_of", "parts"), SAMPLES), "an environment gives one reward", "set advantage_of=sum"))
    yield from _all_excluded(On("environment.function"), (On("reward", Not(RewardSection())),
          On("data.sources.*.reward"), On("eval.sets.*.reward")), "the environment gives the reward",
          "leave the reward out, or call it in the environment's score")
    yield Excludes(one=(On("environment.function"), On("environment.template", "chat")), other=WARM_START,
          why="an environment's demonstrations are plain text, but template=chat makes conversations",
          fix="set environment.template=plain, or warm_start.steps=0")


def _job_rules() -> Iterator[Rule]:
    """Rules on nodes and containers of jobs, on checkpoints and on evaluations during training."""
    yield from _excluded(ENGINE_NODES,
        (NOT_SERVED, _IN_LEARNER, "set slurm.engines.nodes=0"),
        (RUNNING, "servers are running already", _LEAVE_OUT))
    yield Needs(when=On("slurm.engines.container"), all=On("rollout.python"), why="the run does not know the engine's "
          "interpreter in the image", fix="set rollout.python to the interpreter inside the image that has the engine")
    yield from _excluded(On("run.launcher", "ray"),
        (On("slurm.engines.container"), "Ray starts servers outside of containers",
         "set run.launcher=slurm, or leave it out"),
        (On("slurm.container"), "the controller runs outside the container and cannot reach Ray inside",
         "set run.launcher=slurm, or install Ray in slurm.python"))
    separate = "set roles.{}=learner"
    yield Excludes(one=On("roles.critic", "separate"), other=On("algorithm.needs_critic", False, "algorithm.credit"),
          why="the algorithm has no critic", fix=separate.format("critic"))
    yield Excludes(one=On("roles.reference", "separate"), other=On("needs_reference", False,
          "algorithm.kl.coefficient"), why="the algorithm has no reference", fix=separate.format("reference"))
    best, every = On("checkpoint.keep_best", Above(0)), On("checkpoint.every", Above(0))
    yield from _excluded(best,
        (On("checkpoint.every", 0), "only the last step's checkpoint is written", "set checkpoint.every"),
        ((every, BACKGROUND), "a checkpoint is written before its step's evaluation ends", "set eval.mode=blocking"))
    yield Excludes(one=On("eval.at_once"), other=On("eval.mode", "blocking"),
          why="only evaluations in the background have a limit", fix="set eval.mode=background, or leave it out")
    yield from _excluded(BACKGROUND,
        (NOT_SERVED, f"{_IN_LEARNER}, which train at the same time", "set rollout.server.replicas, or rollout=vllm or "
         "sglang, or eval.mode=blocking"),
        ((SERVED, COLOCATED), "servers release their GPUs while the learner trains", "set eval.mode=blocking"),
        ((On("eval.at_once"), On("environments@function")), "the wait of a turn for a request counts toward "
         "environment.seconds", "leave at_once out"))
    yield Needs(when=(BACKGROUND, On("eval.every", 0)), all=On("eval.sets.*.every", Above(0)),
          why="nothing is evaluated between the first and the last step", fix="set eval.every")
    yield Excludes(one=On("profile.memory", True), other=ON_CPU, why="it records only GPU memory", fix="leave it out")
    yield Needs(when=On("sandbox.type", "remote"), all=On("sandbox.url"), why="the run posts programs to a server",
          fix="set its address")
    yield Excludes(one=On("dpo.reference_free", True), other=On("algorithm.kl.reference"), why="no reference is loaded",
          fix="keep one of them")
    yield from _excluded(On("dpo.loss", "kto"),
        (On("dpo.per_token", True), "kto compares sums over tokens with an estimate of the KL", _LEAVE_IT),
        (On("dpo.reference_free", True), "kto estimates the KL to a frozen model", _LEAVE_IT),
        (On("dpo.label_smoothing", Above(0)), "kto has single answers, so no pair can be in the wrong "
         "order", _LEAVE_IT),
        (On("dpo.nll", Above(0)), "kto has single answers, and nll is for the better answer of a pair", _LEAVE_IT),
        (On("dpo.batch_size", Below(2)), "kto estimates the KL on each prompt with the answer of another row of the "
         "batch", "set it to 2 or more"))


def _shape_rules() -> Iterator[Rule]:
    """Rules on keys of experts for a model without experts."""
    whole = "the model has no experts, so replicas of its attention share nothing"
    none = On("shape.num_experts", 0, "shape.family")
    for one, other, why, fix in (
        (On("rollout.router_noise", Above(0)), On("shape.num_experts", Below(2)), "it changes nothing", "leave it out"),
        (On("rollout.server.dp", Above(1)), (none, SERVED), whole, "raise rollout.server.replicas instead"),
        (On("rollout.server.ep", Above(1)), (none, SERVED), "the model has no experts", "set it to 1"),
    ):
        yield Excludes(one=one, other=other, why=why, fix=fix, where="shape")


def _reads() -> Iterator[Rule]:
    """The readers of keys that are not of the algorithm alone; reads.py has the keys that its choices read."""
    of_learner = f"{_IN_LEARNER}, and only servers read it"
    yield _read("is the model, and no tiny model is created", "model.tiny", "model.cache_dir", any_of=On("model.path",
          UNSET))
    yield _read("there is no warm start", "warm_start", any_of=WARM_START)
    yield _read(of_learner, "rollout.python", "rollout.server", "weights.folder", "weights.rendezvous_host",
          any_of=SERVED)
    yield _read("servers run in the trainer's interpreter, on CPUs", "rollout.python", "rollout.server.memory_fraction",
          any_of=On("rollout.engine", Not("local")))
    yield _read("no request runs at a push", "rollout.server.running_requests", any_of=(STALE, On("eval.mode",
          "background"), On("environments@function"), RUNNING))
    yield _read("the algorithm compares whole completions (credit=turn compares steps)", "reward.steps",
          "data.sources.*.reward.steps", "eval.sets.*.reward.steps", any_of=TURNS)
    groups = "train.minibatch_by_group"
    yield _read("a minibatch is the whole batch", groups, any_of=On("train.minibatches", Above(1)))
    yield _read("each group's pair stays together", groups, any_of=On("algorithm.preference.beta", UNSET))
    yield _read("a group is one completion", groups, any_of=(On("rollout.group_size", Above(1)), DEMONSTRATIONS))
    yield _read("the learning rate stays (set linear or cosine)", "train.lr_min", any_of=On("train.lr_decay",
          Not("none")))
    epochs = On("written_epochs", UNSET, "sft.epochs")
    yield _read("epochs set the number of steps", "train.steps", any_of=epochs)
    yield _read("weights go through a file, without a rendezvous", "weights.rendezvous_host", any_of=DIRECT)
    yield _read("nothing depends on pass rates", "data.curriculum.min_seen",
          any_of=(On("data.curriculum.retire_above"), On("data.curriculum.explore")))
    yield _read("programs run on this machine", "sandbox.url", "sandbox.token_file", any_of=On("sandbox.type",
          "remote"))
    yield _read("the server isolates programs", "sandbox.allow_unfenced", any_of=On("sandbox.type", "subprocess"))
    yield _read("answers have no labels", "dpo.desirable_weight", "dpo.undesirable_weight", any_of=On("dpo.loss",
          "kto"))
    yield _read("there is no environment", "environment", any_of=On("environment.function"))
    yield _read("no sink has projects", "log.project", any_of=On("log.names_project", True, "log.sinks"))
    container, of_engines = On("slurm.container"), On("slurm.engines.container")
    yield _read("nothing runs in a container", "slurm.container_runtime", "slurm.container_mounts", any_of=(container,
          of_engines))
    yield _read("ranks run in slurm.python", "slurm.container_python", any_of=container)
    yield _read("the only optimizer step begins at the old policy", "algorithm.old_kl_limit", any_of=(On("train.epochs",
          Above(1)), On("train.minibatches", Above(1)), On("algorithm.old_logprobs", Not("learner"))))
    yield _read("the only optimizer step begins at the old policy, where abs has no gradient (raise train.minibatches)",
          "algorithm.tokens", any_of=(On("train.epochs", Above(1)), On("train.minibatches", Above(1)),
          On("algorithm.old_logprobs", Not("learner")), On("algorithm.tokens.choose", Not("kl_cov"))))
    yield _read("the run does not train on pairs", "algorithm.preference", any_of=PAIRS)
    yield read_with_reference("algorithm.kl.reference")
    yield _read("turns are not compared", "algorithm.turn_baseline", "algorithm.turn_compared",
          any_of=(On("algorithm.advantage_mean", Not("none")), On("algorithm.advantage_std", Not("none"))))
    yield _read("the return from a turn on is its own reward", "algorithm.turn_compared",
          any_of=On("algorithm.gamma_turn", Not(0)))
    yield _read("the other lambdas replace it for policy and critic", "algorithm.lam", any_of=(
          On("algorithm.lam_length_factor", UNSET), On("algorithm.critic.lam", UNSET)))

# fmt: on

RULES: tuple[Rule, ...] = (
    *_model_rules(),
    CheckFunction(checks.problems_of_options),
    CheckFunction(checks.problems_of_servers),
    *_server_problems(),
    CheckFunction(checks.problems_of_batches),
    CheckFunction(checks.problems_of_groups),
    *_job_rules(),
    CheckFunction(checks.check_separate_roles),
    *_learner_rules(),
    *_sampling_rules(),
    CheckFunction(checks.problems_of_limits),
    *_algorithm_rules(),
    *_advantage_rules(),
    *_loss_rules(),
    *_reward_rules(),
    CheckFunction(checks.problems_of_rewards),
    *_environment_rules(),
    CheckFunction(checks.problems_of_environments),
    CheckFunction(checks.problems_of_keeping),
    CheckFunction(reads.problems_of_job),
    CheckFunction(reads.problems_of_unread_keys),
    *_reads(),
    *_shape_rules(),
)
"""The rules of this package; features have theirs in their declarations."""


def find_problems(config: RunConfig, where: When = "config", shape: object = None) -> list[str]:
    """A line for each broken rule of ``where``; ``shape`` is the model's, for ``where="shape"``."""
    return broken((*RULES, *feature_rules()), config, where, shape)
