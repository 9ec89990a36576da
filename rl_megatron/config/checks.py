"""Rules over several sections of the configuration: each problem names both numbers and the change to make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.beside import (
    problems_of_reward_models,
    problems_of_separate,
    problems_of_teachers,
    separate,
)
from rl_megatron.config.environments import problems_of_environments
from rl_megatron.config.evaluating import problems_of_evaluating
from rl_megatron.config.keeping import problems_of_keeping
from rl_megatron.config.modes import problems_of_modes
from rl_megatron.config.reads import problems_of_job, problems_of_unread_keys
from rl_megatron.config.rewards import problems_of_rewards
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.feature import feature_rules
from rl_megatron.options.padding import most_padded, padded_tokens, sequence_multiple
from rl_megatron.options.table import problems as option_problems
from rl_megatron.rules import broken

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def problems_of(config: RunConfig) -> list[str]:
    """A line for each rule between sections that the configuration breaks."""
    return [
        *_model_problems(config),
        *option_problems(config.learner),
        *_critic_problems(config),
        *_transport_problems(config),
        *_batch_problems(config),
        *_group_problems(config),
        *_server_problems(config.rollout),
        *_quantization_problems(config),
        *_route_problems(config),
        *_role_problems(config),
        *problems_of_separate(config),
        *_colocation_problems(config),
        *problems_of_modes(config),
        *broken(feature_rules(), config),
        *problems_of_rewards(config),
        *problems_of_environments(config),
        *problems_of_teachers(config),
        *problems_of_reward_models(config),
        *problems_of_keeping(config),
        *problems_of_evaluating(config),
        *problems_of_job(config),
        *problems_of_unread_keys(config),
    ]


def _model_problems(c: RunConfig) -> list[str]:
    if c.model.path is not None:
        return []
    out = []
    if c.model.name is not None:
        out.append(
            f"model.path is not given, but the configuration is for model.name={c.model.name}; set model.path to a "
            "folder with its config.json, tokenizer and safetensors, seen by all nodes"
        )
    if c.model.random_weights:
        out.append(
            "model.random_weights=true takes the sizes of model.path, which is not given; set it, or leave "
            "random_weights out: the tiny model's weights are random"
        )
    if c.learner.model is not None:
        out.append(
            f"learner.model={c.learner.model} reads the config.json of model.path, which is not given; set model.path, "
            "or leave learner.model out: this package has the tiny model's family"
        )
    return out


def _critic_problems(c: RunConfig) -> list[str]:
    """What options refuse of the critic's optimizer and not of the policy's."""
    if not c.algorithm.needs_critic:
        return []
    if c.learner.cuda_graphs and c.roles.critic == "learner":
        return [
            "learner.cuda_graphs=true with roles.critic=learner: megatron-core captures the layers of one trained "
            "model of a process; set roles.critic=separate"
        ]
    learner = c.learner_of("critic")
    own = learner.model_copy(update={"optimizer": c.algorithm.critic.optimizer})
    known = set(option_problems(learner))
    return [f"of algorithm.critic.optimizer: {line}" for line in option_problems(own) if line not in known]


def _transport_problems(c: RunConfig) -> Iterator[str]:
    """A transport that cannot reach the engine, or a folder that not all ranks see."""
    if not c.rollout.served:
        if c.weights.transport == "file":
            yield (
                "weights.transport=file is for servers, but "
                f"rollout.engine={c.rollout.engine} samples in the learner's processes; set weights.transport=auto"
            )
        return
    if c.slurm.engines.nodes and c.weights.folder and c.weights.folder.is_relative_to(NODE_MEMORY):
        yield (
            f"weights.folder={c.weights.folder} is in each node's own memory, and the learner's ranks cannot write it "
            f"on slurm.engines.nodes={c.slurm.engines.nodes}; give a folder that all nodes see, or leave it out"
        )


def _batch_problems(c: RunConfig) -> list[str]:
    out = []
    if c.train.lr_min > c.train.learning_rate:
        out.append(
            f"train.lr_min={c.train.lr_min:g} is above train.learning_rate={c.train.learning_rate:g}; lower the first"
        )
    parts, named = c.parts_of_minibatches
    if c.kind.samples and parts < c.train.minibatches:
        out.append(
            f"train.minibatches={c.train.minibatches} is more than the {parts} {named}; lower the first or raise the "
            "others"
        )
    longest, pairs = c.longest_sequence, c.kind.rows == "pairs" or c.algorithm.pairs
    wanted, most, dims = 2 * longest if pairs else longest, c.learner.max_tokens_per_micro_batch, c.learner.dims
    multiple = sequence_multiple(dims)
    padded = 2 * padded_tokens(longest, multiple, ())
    if wanted > most:
        what = "pair of the longest sequences, 2 * (" if pairs else "longest sequence, ("
        out.append(
            f"learner.max_tokens_per_micro_batch={most} is less than the {what}"
            f"{c.named_longest}) = {wanted}; raise the first or lower the others"
        )
    elif pairs and padded > most_padded(most, dims):
        out.append(
            f"learner.max_tokens_per_micro_batch={most} is less than the pair of the longest sequences, each "
            f"({c.named_longest}) padded for learner.cp={dims.cp} to a multiple of {multiple}: {padded}; "
            "raise the first or lower the others"
        )
    if pairs and c.learner.padding.sequences == 1:
        out.append(
            "learner.padding.sequences=1: the two sequences of a pair are of one micro-batch; set "
            "learner.padding.sequences to 2 or more"
        )
    if c.algorithm.pairs and c.rollout.group_size < 2:
        out.append(
            f"algorithm.preference.beta pairs a group's completions, but rollout.group_size={c.rollout.group_size}; "
            "set rollout.group_size=2 or more"
        )
    return out


def _group_problems(c: RunConfig) -> list[str]:
    """Groups that give no gradient, and groups that dynamic sampling would drop although they give one."""
    a, r, out = c.algorithm, c.rollout, []
    size = r.group_size + (a.demonstration_gamma is not None)
    levels = {f"algorithm.{key}={getattr(a, key)}" for key in ("advantage_mean", "advantage_std", "normalise_rewards")}
    over_group, over_batch = (sorted(k for k in levels if k.endswith(e)) for e in ("=group", ("=batch", "=advantages")))
    if a.whiten and a.credit == "completion":
        over_batch.append("algorithm.whiten=true")
    if a.credit == "optimal":
        over_group.append("algorithm.credit=optimal")
    of_turns = a.credit == "turn" and a.turn_baseline != "index"  # which one trajectory may have several of
    compares = not (a.needs_top and a.kl.has_teacher)  # else that trains every token
    if compares and size == 1 and over_group and not a.pairs and not of_turns:
        out.append(
            f"rollout.group_size=1 with {', '.join(over_group)}: a group has no second completion to compare with, so "
            "all advantages are 0 and nothing is trained; set rollout.group_size=2 or more, or batch or none for group"
        )
    if compares and size * r.prompts_per_step == 1 and over_batch:
        out.append(
            f"rollout.prompts_per_step=1 and rollout.group_size=1 with {', '.join(over_batch)}: the batch has no "
            "second completion to compare with, so all advantages are 0 and nothing is trained; raise one of the two"
        )
    if r.dynamic_sampling != "off" and a.taught_by_equal:
        out.append(
            f"rollout.dynamic_sampling={r.dynamic_sampling} drops groups of equal rewards, from which "
            f"{', '.join(a.taught_by_equal)} learns too; set rollout.dynamic_sampling=off"
        )
    elif r.dynamic_sampling != "off" and size == 1 and not of_turns and (a.levels_equal or not a.own_decides):
        out.append(
            f"rollout.dynamic_sampling={r.dynamic_sampling} drops every group of one completion, whose rewards cannot "
            "differ, so nothing is trained; set rollout.group_size=2 or more, or rollout.dynamic_sampling=off"
        )
    return out


def _server_problems(r: RolloutSection) -> list[str]:
    out = []
    if r.server.addresses and (r.python or r.server.count > 1 or r.server.options):
        out.append(
            f"rollout.server.addresses={r.server.addresses} are running servers; rollout.python, "
            "rollout.server.replicas and rollout.server.options are for starting some: leave them out"
        )
    if r.server.addresses and r.server.memory_fraction is not None:
        out.append(
            f"rollout.server.addresses={r.server.addresses} are running servers, which have their memory already; "
            "rollout.server.memory_fraction is for starting some: set it to null"
        )
    out += _degree_problems(r)
    if r.server.token_file and not r.server.addresses:
        out.append(
            "rollout.server.token_file is for rollout.server.addresses, and the run makes a token for servers that it "
            "starts; leave it out"
        )
    return out


def _degree_problems(r: RolloutSection) -> list[str]:
    server, out = r.server, []
    given = {
        key: getattr(server, key) for key in ("tp", "pp", "dp", "ep", "nodes") if getattr(server, key) not in {1, None}
    }
    if given and server.addresses:
        named = ", ".join(f"rollout.server.{key}={value}" for key, value in given.items())
        out.append(
            f"rollout.server.addresses={server.addresses} are running servers, which have their degrees already; leave "
            f"out {named}"
        )
    whole = server.tp * server.dp
    if server.ep not in {1, whole}:
        out.append(
            f"rollout.server.ep={server.ep}: engines spread experts over all of a stage's GPUs or over none; set "
            f"rollout.server.ep=tp*dp={whole}, or 1"
        )
    if (server.nodes or 1) > 1 and server.ranks % (server.nodes or 1):
        out.append(
            f"rollout.server.nodes={server.nodes} does not divide its tp*pp*dp = {server.tp}*{server.pp}*{server.dp} = "
            f"{server.ranks} GPUs; change one of them"
        )
    return out


def _quantization_problems(c: RunConfig) -> list[str]:
    server = c.rollout.server
    if server.quantization == "none":
        return []
    out, given = [], f"rollout.server.quantization={server.quantization}"
    if c.learner.device == "cpu":
        out.append(
            f"{given}: the engines' kernels for quantised weights need GPUs, but learner.device=cpu; set "
            "rollout.server.quantization=none"
        )
    if c.learner.dtype != "bfloat16":
        out.append(
            f"{given}: the engines' kernels give bfloat16, but learner.dtype={c.learner.dtype}; set "
            "learner.dtype=bfloat16"
        )
    if server.addresses:
        out.append(
            f"{given} is for servers that the run starts, but rollout.server.addresses={server.addresses} are running "
            "ones, whose format it cannot see; set rollout.server.quantization=none"
        )
    return out


def _route_problems(c: RunConfig) -> list[str]:
    """Noise on routers that no engine of the run adds."""
    if not c.rollout.router_noise or c.rollout.embedded:
        return []
    return [
        f"rollout.router_noise={c.rollout.router_noise:g} with rollout.engine={c.rollout.engine}: servers compute "
        "routers in kernels of their own, to which nothing can be added; set rollout.engine=local, or "
        "rollout.router_noise=0"
    ]


def _role_problems(c: RunConfig) -> list[str]:
    out, engines = [], c.slurm.engines
    given = f"slurm.engines.nodes={engines.nodes}"
    if engines.nodes and not c.rollout.served:
        out.append(f"{given}, but rollout.engine={c.rollout.engine} samples in the learner's processes; set it to 0")
    if engines.nodes and c.rollout.server.addresses:
        out.append(f"{given}, but rollout.server.addresses are running servers; leave one of them out")
    if c.slurm.heterogeneous and not (engines.nodes or separate(c)):
        out.append(f"slurm.heterogeneous=true, but {given}; set the number of the engines' nodes")
    if engines.shaped and not c.slurm.heterogeneous:
        out.append("slurm.engines requests nodes unlike the learner's; set slurm.heterogeneous=true, or only its nodes")
    if c.slurm.heterogeneous and c.slurm.array:
        out.append(f"slurm.array={c.slurm.array}: Slurm has no arrays of heterogeneous jobs; leave one of them out")
    if engines.container and not c.rollout.python:
        out.append(
            f"slurm.engines.container={engines.container}, but rollout.python is not given; set it to the interpreter "
            "inside the image that has the engine"
        )
    if engines.container and c.run.launcher == "ray":
        out.append(
            f"slurm.engines.container={engines.container} with run.launcher=ray: Ray starts servers outside of "
            "containers; set run.launcher=slurm, or leave it out"
        )
    if c.slurm.container and c.run.launcher == "ray":
        out.append(
            "slurm.container with run.launcher=ray: the controller, outside the container, would not reach Ray inside; "
            "set run.launcher=slurm, or have Ray in slurm.python"
        )
    return out


def _colocation_problems(c: RunConfig) -> list[str]:
    if not (c.rollout.served and c.rollout.server.colocated):
        if (level := c.learner.offload.while_sampling) is None:
            return []
        return [
            f"learner.offload.while_sampling={level}, but no servers take turns with the learner; set "
            "rollout.server.colocated=true with rollout=vllm or sglang, or leave it out"
        ]
    out, turns = [], "rollout.server.colocated=true lets learner and servers take turns"
    if c.train.max_staleness:
        out.append(
            f"{turns}, but with train.max_staleness={c.train.max_staleness} servers sample while the learner trains; "
            "set one of them to its default"
        )
    if c.learner.device != "cpu" and c.rollout.server.addresses is None and c.rollout.server.memory_fraction is None:
        out.append(
            f"{turns}, but an engine takes nearly a whole GPU, where the learner's weights and optimizer stay; set "
            "rollout.server.memory_fraction to a share that they leave"
        )
    if c.slurm.engines.nodes:
        out.append(
            f"{turns} on the same nodes, but slurm.engines.nodes={c.slurm.engines.nodes} are for servers alone; leave "
            "one of them out"
        )
    return out
