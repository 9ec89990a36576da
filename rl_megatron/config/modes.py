"""Rules of several sections: adapters, modes in which equal work gives equal numbers, fused routers, sampling ahead
of training, caches that outlive weights, and demonstrations beside what is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.sections.data import FileKeys, data_sources

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.rollout import RolloutSection


_ADAPTERS, _HOLD_ADAPTERS = "weights.push=adapters", ("vllm", "sglang")


def problems_of_modes(c: RunConfig) -> Iterator[str]:
    """A line for each mode that the run's parts do not have."""
    if c.learner.lora.rank is not None:
        yield from _of_adapters(c)
    if c.algorithm.is_own_critic:
        yield from _of_own_critic(c)
    if c.weights.push == "adapters":
        yield from _of_adapters_beside(c)
    if c.learner.deterministic and c.learner.device != "cpu" and not c.rollout.served:
        yield (
            f"learner.deterministic=true with learner.device={c.learner.device}: rollout.engine={c.rollout.engine} "
            "samples in the learner's processes by torch.cumsum, which has no deterministic kernel for GPUs; set "
            "rollout=vllm or sglang, or leave it out"
        )
    if c.learner.fusion.router and c.algorithm.routing_replay != "off":
        yield (
            f"learner.fusion.router=true with algorithm.routing_replay={c.algorithm.routing_replay}: the fused kernel "
            "chooses experts by itself, and takes and tells none; set one of them to its default"
        )
    if c.learner.fusion.router and c.train.route_flips:
        yield (
            "learner.fusion.router=true with train.route_flips=true: the fused kernel chooses experts by itself and "
            "tells none; set one of them to its default"
        )
    if c.learner.deterministic and _one_nccl(c):
        yield (
            f"learner.deterministic=true with weights.transport={c.weights.transport} over NCCL into servers: "
            f"the learner's ranks choose NCCL's algorithm by NCCL_ALGO, {_ONE_GROUP}"
        )
    if c.algorithm.needs_top and c.learner.head_dtype is not None:
        yield (
            f"learner.head_dtype={c.learner.head_dtype} with algorithm.kl.estimator=top_k: it makes logits of a few "
            "positions at a time and keeps none; leave it out, or set kl.estimator=k1, k2 or k3"
        )
    if c.rollout.server.batch_invariant:
        yield from _of_servers(c)
    if c.rollout.server.running_requests == "keep_cache":
        yield from _of_kept_caches(c)
    if c.train.max_staleness:
        yield from _of_staleness(c)
    if c.rollout.max_seconds is not None and not c.rollout.served:
        yield (
            f"rollout.max_seconds={c.rollout.max_seconds:g}, but rollout.engine={c.rollout.engine} samples a whole "
            "batch in one call of the learner's processes, which ends no completion before the others; set "
            "rollout.server.replicas, or rollout=vllm or sglang, or leave it out"
        )
    if c.rollout.stop and c.rollout.ignore_eos:
        yield "rollout.stop with rollout.ignore_eos=true, which ends no completion early; leave one of them out"
    if c.rollout.stop and c.rollout.engine == "vllm" and (asking := c.asks_for_routes) is not None:
        yield (
            f"rollout.stop with {asking}: vLLM finds texts outside of its engine, which then returns no routes; set "
            "rollout=sglang or local, or leave one of them out"
        )
    if c.rollout.top_p < 1 and c.kind.samples:
        yield from _of_top_p(c)
    if c.rollout.interrupt.earliest:
        yield from _of_interruptions(c)
    if c.rollout.max_in_flight is not None:
        yield from _of_a_limit(c.rollout, c.rollout.max_in_flight)
    if c.rollout.embedded and c.rollout.served:
        yield from _of_own_servers(c)
    yield from _of_demonstrations(c)


def _of_adapters(c: RunConfig) -> Iterator[str]:
    given = f"learner.lora.rank={c.learner.lora.rank}"
    if c.kind.scores:
        yield f"{given} with job={c.job}: its score layer starts at 0, and adapters freeze it; leave learner.lora out"
    if c.algorithm.needs_critic:
        yield (
            f"{given} with an algorithm that has a critic: that is a second model, trained whole; take one without, as "
            "algorithm=gspo, or leave learner.lora out"
        )


def _of_own_critic(c: RunConfig) -> Iterator[str]:
    """Options that a value layer beside the output layer does not go with, or that no pass with one was tried with."""
    reasons = {
        f"learner.lora.rank={c.learner.lora.rank}": "adapters freeze its value layer",
        "learner.overlap.gradients=true": "in a warm start the value layer has no gradient to wait for",
        "learner.cuda_graphs=true": "no pass with a value layer was captured yet",
    }
    given = (
        c.learner.lora.rank is not None,
        c.learner.overlap.gradients,
        c.learner.cuda_graphs,
    )
    for (key, reason), is_set in zip(reasons.items(), given, strict=True):
        if is_set:
            yield f"algorithm.critic.backbone=policy with {key}: {reason}; leave it out, or set critic.backbone=own"


def _of_adapters_beside(c: RunConfig) -> Iterator[str]:
    """Servers hold several versions of adapters beside one model, which they load once, while they sample."""
    server = c.rollout.server
    if c.learner.lora.rank is None:
        yield f"{_ADAPTERS} without learner.lora.rank: the whole model is trained; set rank, or leave weights.push out"
    if c.rollout.engine not in _HOLD_ADAPTERS:
        yield (
            f"{_ADAPTERS} with rollout.engine={c.rollout.engine}: only {' and '.join(_HOLD_ADAPTERS)} hold adapters "
            "beside a model here; set rollout=vllm or sglang, or weights.push=merged"
        )
    excluded = {
        f"rollout.server.addresses={server.addresses}: a run starts its servers with places for its adapters": (
            server.addresses is not None
        ),
        "rollout.server.colocated=true: servers that release their memory lose the model, which is pushed once": (
            server.colocated
        ),
        f"rollout.server.quantization={server.quantization}: the model is pushed as it is, and once": (
            server.quantization != "none"
        ),
        f"rollout.server.running_requests={server.running_requests}: no push pauses a request": (
            server.running_requests != "recompute"
        ),
    }
    for key in (key for key, there in excluded.items() if there):
        yield f"{_ADAPTERS} with {key}; leave the key out, or set weights.push=merged"


def _of_staleness(c: RunConfig) -> Iterator[str]:
    given = f"train.max_staleness={c.train.max_staleness}"
    recomputed = c.rollout.engine == "sglang" and c.rollout.server.running_requests == "recompute"
    if recomputed and (asking := c.asks_for_routes) is not None:
        yield (
            f"{given} with {asking} and rollout.server.running_requests=recompute: SGLang keeps routes by their place "
            "in its cache, so of a completion that it computes again at a push it returns those of the new weights for "
            "all tokens, also for those that older weights sampled and whose log-probs they do not explain; set "
            "running_requests=abort"
        )
    if c.rollout.served and c.algorithm.advantage_mean == "greedy":
        yield (
            f"{given} with algorithm.advantage_mean=greedy: weights may be pushed between a group's completions and "
            "its greedy one, whose reward would be another policy's baseline; set one of them to its default"
        )


def _of_top_p(c: RunConfig) -> Iterator[str]:
    """Ratios to the engine that top_p makes useless: a product over a sequence, and those of the loss itself."""
    a, one, top_p = c.algorithm, c.algorithm.correction, c.rollout.top_p
    near_one = one.level == "sequence" and one.mode in {"mask", "band"} and one.low > top_p
    in_rewards = a.kl.coefficient > 0 and a.kl.placement != "loss"
    no_ratio = a.objective == "reinforce" and a.old_kl_limit is None and a.tokens.choose != "kl_cov" and not in_rewards
    readers = {
        f"algorithm.old_logprobs={a.old_logprobs}": a.old_logprobs != "learner" and not (a.pairs or no_ratio),
        f"algorithm.correction.level={one.level}": one.mode != "none" and (one.level == "product" or near_one),
    }
    for key in (key for key, reads in readers.items() if reads):
        yield (
            f"rollout.top_p={top_p:g} with {key}: the engine's log-probs are of the tokens that top_p keeps and the "
            f"learner's of all, so each token's ratio is too small by up to {top_p:g}, and a sequence's by all of its "
            "tokens'; set rollout.top_p=1, or algorithm.old_logprobs=learner without correction"
        )


def _of_interruptions(c: RunConfig) -> Iterator[str]:
    given = f"rollout.interrupt.earliest={c.rollout.interrupt.earliest:g}"
    first, last = c.rollout.interrupt.between(c.rollout.max_new_tokens)
    if not first <= last < max(c.rollout.max_new_tokens, 2):
        yield (
            f"{given}: completions of at most rollout.max_new_tokens={c.rollout.max_new_tokens} would be interrupted "
            f"after {first} to {last} sampled tokens; make the first at most the second, and both less than that"
        )
    others = {
        **{f"{key}.function": one.function for key, one in c.training_environments.items()},
        "algorithm.preference.beta": c.algorithm.preference.beta,
        "rollout.max_seconds": c.rollout.max_seconds,
    }
    for key in (key for key, value in others.items() if value is not None):
        yield f"{given} with {key}={others[key]}: only single completions without a time limit can be; leave one out"
    if (asking := c.asks_for_routes) is not None:
        yield f"{given} with {asking}: routes are of one request, and what is interrupted takes two; leave one out"


def _of_a_limit(rollout: RolloutSection, most: int) -> Iterator[str]:
    if most < rollout.group_size:
        yield (
            f"rollout.max_in_flight={most} is less than rollout.group_size={rollout.group_size}: no group could be "
            "sampled; raise the first, or lower the other"
        )
    if not rollout.served:
        yield (
            f"rollout.max_in_flight={most}, but rollout.engine={rollout.engine} samples one batch at a time in the "
            "learner's processes, by rollout.slots at once; set rollout.server.replicas, or rollout=vllm or sglang, or "
            "leave it out"
        )


def _of_own_servers(c: RunConfig) -> Iterator[str]:
    """What servers of the in-process engine do not have: they are one process each, on CPUs, and load files."""
    server = c.rollout.server
    given = {
        f"learner.device={c.learner.device}": c.learner.device != "cpu",
        **{
            f"rollout.server.{key}={getattr(server, key)}": getattr(server, key) != 1
            for key in ("tp", "pp", "dp", "ep")
        },
        f"rollout.server.nodes={server.nodes}": (server.nodes or 1) > 1,
        f"rollout.server.addresses={server.addresses}": server.addresses is not None,
        f"rollout.server.options={server.options}": server.options is not None,
        f"weights.transport={c.weights.transport}": c.transport.direct,
    }
    for key in (key for key, does in given.items() if does):
        yield (
            f"{key} with rollout.engine=local and rollout.server.replicas={server.replicas}: these servers are one "
            "process each on CPUs, and load weights from a file; leave one of them out, or set "
            "rollout=vllm or sglang"
        )


_ONE_GROUP = (
    "and ranks of one group that choose differently wait for each other without end; set weights.transport=file"
)


def _one_nccl(c: RunConfig) -> bool:
    """Whether ranks of learner and servers may be one group over NCCL, which compares no settings (docs/engines.md)."""
    return c.rollout.served and c.transport.members and c.learner.device != "cpu"


def _of_servers(c: RunConfig) -> Iterator[str]:
    given, server = "rollout.server.batch_invariant=true", c.rollout.server
    if not c.rollout.served:
        yield (
            f"{given}, but rollout.engine={c.rollout.engine} samples in the learner's processes with torch's products, "
            "whose last bits depend on the number of rows; set rollout=vllm or sglang, or leave it out"
        )
    if c.learner.device == "cpu":
        yield f"{given}: the engines' kernels for it need GPUs, but learner.device=cpu; leave it out"
    if server.addresses is not None:
        yield (
            f"{given} is for servers that the run starts, but rollout.server.addresses={server.addresses} are running "
            "ones; start those so (docs/mismatch.md), and leave it out"
        )
    if _one_nccl(c) and (c.rollout.engine != "sglang" or server.ranks > 1):  # SGLang's mode sets none for one rank
        yield (
            f"{given} with weights.transport={c.weights.transport} over NCCL: in this mode {c.rollout.engine} "
            f"sets NCCL's algorithm and channels in its ranks, {_ONE_GROUP}"
        )


def _of_kept_caches(c: RunConfig) -> Iterator[str]:
    given = "rollout.server.running_requests=keep_cache"
    if c.rollout.served and (asking := c.asks_for_routes) is not None:
        yield (
            f"{given} with {asking}: keys and values in the cache were made by the experts that older weights chose, "
            "which the learner's one pass cannot repeat, so its routes and log-probs would be of another computation; "
            "set running_requests=abort, or leave routes out"
        )
    if c.rollout.served and c.rollout.server.colocated:
        yield (
            f"{given} with rollout.server.colocated=true: servers release their caches before each training, so "
            "nothing is left to keep; leave one of them out"
        )


def _of_demonstrations(c: RunConfig) -> Iterator[str]:
    """Fields that nothing reads, or that are read anyway; and what `_of_sampled_tokens` says."""
    if c.algorithm.demonstration_gamma is not None:
        yield from _of_sampled_tokens(c, f"algorithm.demonstration_gamma={c.algorithm.demonstration_gamma:g}")
    for key, one in data_sources(c.data).items():
        if not isinstance(one, FileKeys) or one.demonstration_field is None:
            continue
        given = f"{key}.demonstration_field={one.demonstration_field!r}"
        if c.algorithm.demonstration_gamma is None:
            yield f"{given} does nothing without algorithm.demonstration_gamma; set that, or leave it out"
        elif one.demonstration_field == one.answer_field:
            yield f"{given} is {key}.answer_field, which is the demonstration where none is named; leave it out"


def _of_sampled_tokens(c: RunConfig, given: str) -> Iterator[str]:
    """What is of tokens that an engine or the policy sampled, which a demonstration has none of."""
    a = c.algorithm
    if a.old_logprobs == "interpolated":
        yield f"{given} with algorithm.old_logprobs=interpolated: no version sampled it; set learner or rollout"
    if a.correction.acts:
        yield f"{given} with algorithm.correction: no engine has its log-probs; leave the correction out"
    if a.kl.coefficient > 0:
        yield (
            f"{given} with algorithm.kl.coefficient={a.kl.coefficient:g}: that KL is estimated from what the policy "
            "samples; set kl.coefficient=0"
        )
    if a.old_kl_limit is not None:
        yield f"{given} with algorithm.old_kl_limit={a.old_kl_limit:g}: as kl.coefficient; set old_kl_limit=null"
    if a.tokens.choose != "all":
        yield (
            f"{given} with algorithm.tokens.choose={a.tokens.choose}: these are chosen among the tokens that were "
            "sampled; set tokens.choose=all"
        )
    if a.balance.share is not None:
        yield (
            f"{given} with algorithm.balance.share={a.balance.share:g}: it is of clipped ratios, and a demonstration "
            "has none; set balance.share=null"
        )
    if a.credit != "completion":
        yield f"{given} with algorithm.credit={a.credit}: a demonstration has one advantage; set credit=completion"
    if (asking := c.asks_for_routes) is not None:
        yield f"{given} with {asking}: no engine chose its experts; leave one of them out"
    for key, one in c.training_environments.items():
        yield (
            f"{given} with {key}.function={one.function}: a demonstration is the text of one answer, which no "
            "environment leads; leave one of them out"
        )
