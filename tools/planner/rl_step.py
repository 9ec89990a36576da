"""Seconds of reinforcement learning's whole step: rollout, log-probs, training, push, and how they overlap. No torch.

Synchronous phases follow each other. With ``train.max_staleness`` = k, sampling and training overlap. A step then takes
the longest of the learner's seconds, the engines', and W / k, where W are the seconds of the longest completion. A
batch is trained on at most k steps after its start (Little's law; simulated least k: W over the step, within one).
A step takes at most the synchronous time, because its batch starts no later than in synchronous training.

Sampling is a decode roofline with the tail of lengths. One token for all decoding rows costs the larger of reading and
computing, and a fixed time for launches and messages. Read are weights (of experts only those that some row chose) and
the rows' cache, with the states of delta nets. Once no prompt waits, rows end one after the other, and the longest
decodes nearly alone. With a draft layer, the model makes one pass over the proposed tokens of each row and the token
before them. The draft layer makes one pass for each proposal. A row gets one token more than were accepted
(arXiv:2211.17192).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil, inf
from statistics import NormalDist

from rl_megatron.config.activations import offloaded, wants_transformer_engine
from rl_megatron.config.beside import frozen_folders, longest_scored_row, scoring_roles, self_teachers, separate
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection, padded_tokens
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import GB, ConfigError
from rl_megatron.feature import adapter_layouts, features, wanted
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.seats import gpus_on_learner_nodes
from rl_megatron.types import BYTES
from rl_megatron.weights.layouts.learner import Elements, role_shape
from tools.planner.hardware import FITTED, GPUS, Gpu
from tools.planner.memory import server_weights, weights_on_gpu, weights_served
from tools.planner.time import PCIE, LearnerWork, step_terms

READ = 0.6  # share of a GPU's memory rate at which engines read weights and caches; assumed
COMPUTED = 0.5  # share of the peak in prompts' passes and large batches; assumed
TOKEN_SECONDS = 2e-3  # sampling and scheduling of a token; assumed
LAYER_SECONDS, FAR_LAYER_SECONDS = 6.5e-5, 4.6e-4
"""Seconds of a layer's launches for a token and of its messages' latency, in engines inside NVLink's domain and in
larger ones.

The rest of published times of a token without `TOKEN_SECONDS`, reading and sending: DeepSeek-R1 in float8 on 8 H200,
12.8 to 34.6 ms for 8 to 64 rows (SemiAnalysisAI/InferenceX, issue 870: 40 to 69 µs a layer); Qwen3-30B-A3B on an
A100, 9.6 ms (tenstorrent/tt-inference-server, issue 340: 54 µs); DeepSeek-R1 on two nodes of 8 H100, 31.2 ms for one
row (tt-inference-server, issue 356).
"""
SPREAD = 0.6  # standard deviation of the logarithm of lengths; assumed
ACCEPTED = 0.85
"""Probability that a draft layer's proposal is accepted if all before it are: the lowest measured for DeepSeek-V3's one
proposal (arXiv:2412.19437, section 5.4.3)."""
_CLASSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShape:
    """The degrees of a server, its ``cache`` in bytes of a GPU, and the bytes that it reads for each parameter of the
    ``experts`` and of the ``others``. Its draft layer proposes ``drafts`` tokens for each row at a step, and in the
    mean ``accepted`` of them are accepted."""

    tp: int
    dp: int
    cache: float
    experts: float = 2.0
    others: float = 2.0
    drafts: int = 0
    accepted: float = 0.0

    @property
    def ranks(self) -> int:
        """The number of GPUs of a server."""
        return self.tp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEstimate:
    """Seconds of a step's completions: ``lone_seconds`` if all start together and the step waits for the last;
    ``steady`` if other completions fill the slots of those that end; ``longest`` for the longest completion in a full
    engine. ``requests`` in flight fill the servers' slots; ``held_back`` is True if fewer are allowed."""

    lone_seconds: float
    steady: float
    longest: float
    prompts: float
    rows: float  # the number that a server decodes together
    requests: int
    held_back: bool


@lru_cache(maxsize=64)
def length_distribution(mean: float, longest: float) -> tuple[float, ...]:
    """Returns ascending lengths of equally many completions: lognormal, cut off at ``longest``, with that ``mean``."""
    steps = [math.exp(SPREAD * NormalDist().inv_cdf((i + 0.5) / _CLASSES)) for i in range(_CLASSES)]
    low, high = 0.0, 100.0 * longest
    for _ in range(60):
        middle = (low + high) / 2
        if sum(min(longest, middle * step) for step in steps) / _CLASSES < mean:
            low = middle
        else:
            high = middle
    return tuple(min(longest, low * step) for step in steps)


def token_seconds(shape: ModelShape, server: ServerShape, gpu: Gpu, rows: float, context: float) -> float:
    """Returns seconds of one token for each of a server's ``rows``, of ``context`` tokens of prompt and completion."""
    step = TOKEN_SECONDS + _pass_seconds(shape, server, gpu, rows, rows * (1 + server.drafts), context)
    if server.drafts:
        step += server.drafts * _pass_seconds(draft_layer(shape), server, gpu, rows, rows, context)
    return step / (1 + server.accepted)


def _pass_seconds(
    shape: ModelShape, server: ServerShape, gpu: Gpu, rows: float, positions: float, context: float
) -> float:
    """Returns seconds of a pass over ``positions`` of ``rows`` together; each row reads its cache once."""
    sparse, k = len(shape.moe_layers), shape.experts_per_token
    experts = 3.0 * shape.hidden_size * shape.expert_width * sparse
    others = shape.active_parameters - experts * k
    touched = shape.num_experts * (1 - (1 - k / shape.num_experts) ** positions) if shape.num_experts else 0.0
    weights = server.others * others / server.tp + server.experts * experts * touched / server.ranks
    cache = _on_gpu(shape, server, cache_bytes(shape, context), 2 * state_bytes(shape)) * rows / server.dp
    read = (weights + cache) / (READ * gpu.hbm * GB)  # states are written as well
    computed = 2 * shape.active_parameters * positions / server.ranks / (gpu.peak.bfloat16 * 1e12 * COMPUTED)
    layer = LAYER_SECONDS if server.ranks <= gpu.domain else FAR_LAYER_SECONDS
    return max(read, computed) + layer * shape.num_layers + _message_seconds(shape, server, gpu, positions)


def _message_seconds(shape: ModelShape, server: ServerShape, gpu: Gpu, positions: float) -> float:
    """Returns seconds of the bytes of a pass's messages. A tensor-parallel group reduces outputs of attention and dense
    MLPs. With several groups all ranks gather the rows of a layer with experts and scatter the sums, the default of
    vLLM 0.32.0 (``allgather_reducescatter``) and SGLang 0.5.21."""

    def exchanged(rows: float, ranks: int) -> float:
        """Returns seconds to gather and scatter, like an all-reduce; a node's ranks share the bytes that leave it."""
        moved, nodes = 2 * rows * 2.0 * shape.hidden_size, max(1.0, ranks / gpu.domain)
        near, far = moved * (1 - 1 / ranks) / gpu.nvlink, moved * (1 - 1 / nodes) / (gpu.domain * gpu.network)
        return max(near, far) / (GB * FITTED.links)

    spread = len(shape.moe_layers) if server.dp > 1 else 0
    blocks = 2 * shape.num_layers - spread
    return blocks * exchanged(positions / server.dp, server.tp) + spread * exchanged(positions, server.ranks)


@lru_cache(maxsize=8)
def draft_layer(shape: ModelShape) -> ModelShape:
    """Returns one draft layer and the model's output layer as a separate model. It omits the product that joins the two
    hidden states, a hundredth of the bytes that a pass of DeepSeek-V3's layer over 32 rows reads."""
    return replace(
        shape,
        num_layers=1,
        dense_layers=0,
        windows=(),
        delta=None,
        delta_layers=(),
        draft_layers=0,
        num_draft_layers=False,
    )


def tokens_accepted(drafts: int) -> float:
    """Returns the mean number of accepted proposals out of ``drafts``, each by `ACCEPTED`."""
    return sum(ACCEPTED**n for n in range(1, drafts + 1))


def cache_bytes(shape: ModelShape, context: float) -> float:
    """Returns a row's cache bytes of ``context`` tokens, of the whole model; a layer with a window holds the last. An
    indexer's keys have a byte a number and a float32 scale for 128, as in vLLM 0.32.0."""
    if shape.latent is not None:
        m = shape.indexer
        own = 0.0 if m is None else (1 + 4 / 128) * m.head_dim * sum(layer < shape.num_layers for layer in m.layers)
        return (2.0 * shape.num_layers * (shape.latent.kv_rank + shape.latent.rope_dim) + own) * context
    windows = [shape.windows[layer] if shape.windows else 0 for layer in shape.attention_layers]
    held = sum(min(context, window or context) for window in windows)
    return 4.0 * shape.num_kv_heads * shape.head_dim * held


def state_bytes(shape: ModelShape) -> float:
    """Returns bytes of the delta nets of one row of any length, of the whole model. They are the convolution's last
    inputs and a state in float32, as in SGLang 0.5.21 and, for Qwen3.5, in vLLM 0.32.0 (Qwen3-Next: model's dtype)."""
    if (net := shape.delta) is None:
        return 0.0
    state = 4.0 * net.value_heads * net.key_dim * net.value_dim
    return len(shape.delta_layers) * (state + 2.0 * net.mixed * (net.kernel - 1))


def rows_that_fit(shape: ModelShape, server: ServerShape, context: float) -> float:
    """Returns the number of rows of ``context`` tokens that a server's cache holds."""
    cache = cache_bytes(shape, context) + (cache_bytes(draft_layer(shape), context) if server.drafts else 0.0)
    return server.cache * server.dp / _on_gpu(shape, server, cache, state_bytes(shape))


def sampled(
    shape: ModelShape,
    server: ServerShape,
    gpu: Gpu,
    *,
    replicas: int,
    completions: int,
    group: int,
    prompt: float,
    lengths: Sequence[float],
    slots: int,
    concurrency: float = math.inf,
    sharing: float = 1.0,
) -> RolloutEstimate:
    """Estimates the time of ``completions`` in groups of ``group`` that share a prompt. ``slots`` and the cache bound a
    server's rows; ``concurrency`` bounds the groups in flight on all servers, which end with their longest completion.
    With ``sharing`` servers on each GPU all work takes ``sharing`` times as long."""
    mean, each = sum(lengths) / len(lengths), completions / replicas
    flight, held = concurrency * group / replicas, completions > concurrency * group
    ending = _longest_of(group, lengths) / mean  # one of this many completions of a group still decodes on average
    live = flight / ending
    most = max(1.0, min(slots, rows_that_fit(shape, server, prompt + mean)))
    rows = min(each, most, flight) if held else min(each, most)
    busy = max(1.0, min(rows, live)) if held else rows
    full = max(1.0, min(most, live))

    def seconds(active: float, done: float) -> float:
        return sharing * token_seconds(shape, server, gpu, max(1.0, active), prompt + done)

    queued = max(0.0, each - rows) * mean / busy * seconds(busy, mean / 2)
    drained, before = 0.0, 0.0
    for i, length in enumerate(lengths):
        if length > before:
            drained += (length - before) * seconds(rows * (len(lengths) - i) / len(lengths), (before + length) / 2)
            before = length
    flops = sharing * 2 * shape.active_parameters * prompt * completions / group
    prompts = flops / (replicas * server.ranks * gpu.peak.bfloat16 * 1e12 * COMPUTED)
    steady = each * mean / full * seconds(full, mean / 2)
    return RolloutEstimate(
        lone_seconds=prompts + queued + drained,
        steady=prompts + steady,
        longest=max(lengths) * seconds(full, max(lengths) / 2),
        prompts=prompts,
        rows=rows,
        requests=math.ceil(most * replicas * ending / group),
        held_back=full < most,
    )


def _longest_of(group: int, lengths: Sequence[float]) -> float:
    """Returns the mean length of the longest of ``group`` completions; ``lengths`` ascend and are equally likely."""
    count = len(lengths)
    shares = [((i + 1) / count) ** group - (i / count) ** group for i in range(count)]
    return sum(length * share for length, share in zip(lengths, shares, strict=True))


def _on_gpu(shape: ModelShape, server: ServerShape, cache: float, state: float) -> float:
    """Returns a row's bytes on each GPU of a tensor-parallel group. Its ranks share the heads of keys and values and of
    delta nets; latents are whole on each."""
    heads = 1 if shape.latent is not None else min(server.tp, shape.num_kv_heads)
    return cache / heads + (state / min(server.tp, shape.delta.key_heads) if shape.delta is not None else 0.0)


Lengths = Sequence[float]
"""Tokens of equally many completions, ascending."""
MOST_STALENESS = 8
"""The highest staleness of a planned run's data; the user may set more."""
KERNELS = 0.05
"""Share of a GPU that an engine's own kernels and buffers take."""
_USUAL_FRACTION = 0.9  # share of a GPU for a server if memory_fraction is not set
_PAUSE = 2.0  # seconds in which servers stop, verify and resume at a push; assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStep:
    """A step's ``seconds``, its ``parts``, and the terms of ``training``. The seconds hold for ``staleness``;
    ``min_staleness`` is the lowest with which a step takes no longer than ``slower``, the slowest of learner, engines
    and reward models on ranks. Both are 0 if these take turns. ``sampled``, by servers like ``server``, is held back
    only if sampling would take less time with more requests in flight."""

    seconds: float
    parts: Mapping[str, float]
    training: Mapping[str, float]
    sampled: RolloutEstimate
    server: ServerShape
    staleness: int
    min_staleness: int
    slower: float
    tokens: float

    @property
    def tokens_a_second(self) -> float:
        """The tokens of prompts and completions per second, of all GPUs together."""
        return self.tokens / self.seconds


def learner_work(
    config: RunConfig, shape: ModelShape, gpu: Gpu, mean: float, sequences: int | None = None
) -> LearnerWork:
    """Returns one optimizer step on its share of ``sequences`` of ``mean`` tokens, prompts included; None: of the
    sequences that are trained on. Raises ConfigError for ``learner.fp8`` on GPUs without it."""
    learner, d = config.learner, config.learner.dims
    if learner.fp8 is not None:
        given = f"learner.fp8={learner.fp8}: {gpu.cuda_name}"
        if gpu.peak.float8 is None:
            raise ConfigError(f"{given} multiplies nothing in float8; leave it out")
        if learner.fp8 == "mxfp8" and not gpu.peak.mxfp8:
            known = ", ".join(name for name, one in GPUS.items() if one.peak.mxfp8)
            raise ConfigError(f"{given} has no scales of 32 values, which {known} have; set tensorwise or blockwise")
    tokens, micro_batches = filled(config, learner.max_tokens_per_micro_batch, d.dp, mean, sequences)
    if sizes := learner.padding.sizes:
        tokens = padded_tokens(ceil(tokens), 1, sizes)
    again = set[str](learner.recompute.parts)
    if learner.recompute.uniform is not None:
        again = {"full"}
    if learner.head_dtype is not None:
        again |= {"head"}
    if "moe_act" in again and not wants_transformer_engine(learner, shape):
        again |= {"experts"}
    of_features = [one.work(learner, shape, mean) for one in features().values()]
    return LearnerWork(
        shape=shape,
        dims=d,
        gpu=gpu,
        tokens=tokens,
        length=mean,
        micro_batches=micro_batches,
        precision=learner.dtype if learner.fp8 is None else "float8",
        stages=learner.stages or (shape.num_layers // (d.pp * d.vpp),) * (d.pp * d.vpp),
        drafts=shape.draft_layers if shape.num_draft_layers else 0,
        gradient_bytes=2 if learner.gradient_dtype == "bfloat16" else 4,
        dispatcher="alltoall" if learner.dispatcher == "alltoall" else "by_node",
        again=frozenset(again),
        offloaded=learner.offload.optimizer,
        moved=_moved(learner, shape, mean),
        **{name: value for one in of_features for name, value in one.items()},
    )


def _moved(learner: LearnerSection, shape: ModelShape, mean: float) -> tuple[float, float]:
    """Returns bytes per token of a context-parallel rank that leave its GPU: of a layer without experts, and with."""
    sparse = set(shape.moe_layers)
    first = [next((n for n in range(shape.num_layers) if (n in sparse) is kind), None) for kind in (False, True)]
    dense, moe = (0.0 if n is None else sum(offloaded(learner, shape, n, mean)) for n in first)
    return dense, moe


def filled(config: RunConfig, limit: float, dp: int, mean: float, sequences: int | None = None) -> tuple[float, float]:
    """Returns tokens of a micro-batch, and the micro-batches of each of ``dp`` ranks in an optimizer step on its share
    of ``sequences``, as in `learner_work`. At most ``limit`` tokens fit, and half a sequence stays free in the
    mean."""
    share = max(1.0, (sequences or config.trained_per_step) / config.train.minibatches / dp) * mean
    full = max(mean, limit - mean / 2)
    return min(full, share), float(max(1, ceil(share / full)))


def forward_seconds(work: LearnerWork, batches: int) -> float:
    """Returns seconds of a pass without gradients over the data of ``batches`` optimizer steps."""
    scored = replace(
        work, again=work.again & {"head", "norms"}, micro_batches=work.micro_batches * batches, drafts=0, scored=True
    )
    return sum(step_terms(scored).values())


def score_seconds(config: RunConfig, work: LearnerWork) -> float:
    """Returns seconds of the policy's passes without gradients in a step: one over all its rows if the algorithm needs
    it, and those of features. The first has the norms of an optimal baseline."""
    a, batches, seconds = config.algorithm, config.train.minibatches, 0.0
    if a.scores_policy or wanted(config):
        norms = {"norms"} if a.credit == "optimal" else set()
        seconds = forward_seconds(replace(work, again=work.again | norms), batches)
    passes = sum(one.passes(config) for one in features().values())
    return seconds + (passes * forward_seconds(work, batches) if passes else 0.0)


def push_bytes(config: RunConfig, shape: ModelShape) -> tuple[float, float, float]:
    """Returns a push's bytes in closed form: total, sent by the busiest learner rank, received by the busiest server's.

    Each server rank gets its share of the weights once, and learner ranks that hold the same parts share the sending.
    """
    server, world = config.rollout.server, config.learner.dims.world_size
    received = server_weights(config, shape)
    total = received * server.ranks * server.count
    return total, total / world, received


def server_shape(
    config: RunConfig, server: ServerSection, weights: Elements, shape: ModelShape, gpu: Gpu
) -> ServerShape:
    """Returns a server of ``weights``, bytes of `weights_served`, with the cache that its memory_fraction leaves.

    Engines take the fraction of the memory that CUDA reports: 81,559 MiB of an H100 of 80 GB, about as many GiB.
    """
    fraction = (server.memory_fraction or _USUAL_FRACTION) - KERNELS
    cache = fraction * gpu.memory * 2**30 - weights_on_gpu(server, weights)
    experts, others = _held_of(shape)
    if shape.num_draft_layers:  # a draft layer has its own joining product, and the model's output layer
        more, beside = _held_of(draft_layer(shape))
        own = beside - shape.hidden_size * (shape.outputs - 2 * shape.hidden_size)
        experts, others = experts + len(shape.drafted) * more, others + len(shape.drafted) * own
    # A token reads only one row of the embedding.
    looked_up = 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size * BYTES[config.learner.dtype]
    proposed = [one.serving.proposed(server) for one in features().values() if one.serving is not None]
    return ServerShape(
        tp=server.tp,
        dp=server.dp,
        cache=max(0.0, cache),
        experts=weights.experts / experts if shape.num_experts else 0.0,
        others=(weights.dense - looked_up) / others,
        drafts=sum(proposed),
        accepted=sum(map(tokens_accepted, proposed)),
    )


def _held_of(shape: ModelShape) -> tuple[float, float]:
    """Returns the number of parameters of all experts, and of all others without the embedding and draft layers."""
    one = 3.0 * shape.hidden_size * shape.expert_width * len(shape.moe_layers)
    return one * shape.num_experts, shape.active_parameters - one * shape.experts_per_token


def rollout_seconds(
    config: RunConfig,
    shape: ModelShape,
    server: ServerShape,
    gpu: Gpu,
    lengths: Lengths,
    *,
    replicas: int,
    prompt: float,
    concurrency: float,
    sharing: float = 1.0,
) -> RolloutEstimate:
    """Returns seconds of a step's completions on ``replicas`` servers, ``sharing`` of them on each GPU, with
    ``concurrency`` groups in flight."""
    return sampled(
        shape,
        server,
        gpu,
        replicas=replicas,
        completions=config.completions_per_step,
        group=config.rollout.group_size,
        prompt=prompt,
        lengths=lengths,
        slots=config.rollout.slots,
        concurrency=concurrency,
        sharing=sharing,
    )


def rl_step(
    config: RunConfig,
    shape: ModelShape,
    gpu: Gpu,
    lengths: Lengths,
    *,
    prompt: float,
    staleness: int | None = None,
    push: float | None = None,
) -> RlStep:
    """Returns a run's step with completions of ``lengths``; ``staleness`` None takes the lowest that costs no time.

    Learner and servers on the same GPUs take turns with any staleness. ``push`` are seconds of a push without the
    servers' pause; None: by the closed form of `push_bytes`.
    """
    mean = sum(lengths) / len(lengths) + prompt
    work, batches = learner_work(config, shape, gpu, mean), config.train.minibatches
    training = {name: s * batches * config.train.epochs for name, s in step_terms(work).items()}
    parts = {"training": sum(training.values())}
    if scores := score_seconds(config, work):
        parts["log-probs"] = scores
    others = _works(config, shape, gpu, mean, prompt)
    scored = max((forward_seconds(others.pop(role), batches) for role in scoring_roles(config)), default=0.0)
    parts |= _others(config, others, parts)
    section = config.rollout.server
    server = server_shape(config, section, weights_served(config, shape), shape, gpu)
    apart = config.slurm.engines.nodes > 0
    parts["push"] = (_push_seconds(config, shape, gpu) if push is None else push) + _PAUSE
    if section.colocated and config.learner.offload.while_sampling == "optimizer":
        parts["turns"] = 2 * _moved_to_host(config, shape) / (PCIE * GB)
    sample = partial(rollout_seconds, config, shape, server, gpu, lengths, replicas=section.count, prompt=prompt)
    sample = partial(sample, sharing=servers_on_a_gpu(config))
    engines = sample(concurrency=section.max_concurrent_groups)
    learner = sum(parts.values())
    slower = max(learner, engines.steady, scored)
    least = max(1, ceil(engines.longest / slower)) if apart else 0
    k = (min(MOST_STALENESS, least) if staleness is None else staleness) if apart else 0
    rollout = parts["rollout"] = engines.steady if k else engines.lone_seconds
    if engines.held_back:  # not if all of the step's completions fit
        free = sample(concurrency=inf)
        engines = replace(engines, held_back=(free.steady if k else free.lone_seconds) < rollout)
    if scored > rollout:
        parts["reward models"] = scored - rollout
    in_turns = learner + max(engines.lone_seconds, scored)
    seconds = max(slower, min(engines.longest / k, in_turns)) if k else in_turns
    if k and seconds > slower:
        parts["waiting for the longest"] = seconds - slower
    return RlStep(
        seconds=seconds,
        parts=parts,
        training=training,
        sampled=engines,
        server=server,
        staleness=k,
        min_staleness=least,
        slower=slower,
        tokens=config.trained_per_step * mean,
    )


def _works(config: RunConfig, shape: ModelShape, gpu: Gpu, mean: float, prompt: float) -> dict[str, LearnerWork]:
    """Returns the work of all models except the policy, by role. A teacher's own prompt is longer than the policy's
    ``prompt`` by the ratio of their limits. Reward models read all compared sequences."""
    found, judges = {}, scoring_roles(config)
    of_teacher = {"reference"} if config.taught_by_average else set()  # the teacher is the same model
    frozen = [role for role in frozen_folders(config) if role not in of_teacher]
    for role in ("critic", *frozen, *self_teachers(config)):
        theirs = config.for_role(role)
        own = longest_scored_row(config, role)[1] - config.max_sampled
        read = mean + prompt * (own / config.rollout.max_prompt_tokens - 1)
        sequences = config.compared_per_step if role in judges else None
        found[role] = learner_work(theirs, role_shape(config, shape, role), gpu, read, sequences)
    return found


def servers_on_a_gpu(config: RunConfig) -> float:
    """Returns the mean number of servers on a shared GPU that sample for training."""
    servers = gpus_on_learner_nodes(config)[: config.rollout.server.count]
    gpus = {gpu for server in servers for gpu in server}
    return sum(map(len, servers)) / len(gpus) if gpus else 1.0


def _push_seconds(config: RunConfig, shape: ModelShape, gpu: Gpu) -> float:
    _, sent, received = push_bytes(config, shape)
    near = config.slurm.engines.nodes == 0 and config.slurm.nodes == 1
    return max(sent, received) / ((gpu.nvlink if near else gpu.network) * FITTED.links * GB)


def _others(config: RunConfig, works: Mapping[str, LearnerWork], parts: Mapping[str, float]) -> dict[str, float]:
    """Returns seconds of frozen models and a critic by ``works``. On separate ranks they compute along with the policy,
    and the step waits for the slower. Each teacher is counted as if it scored all sampled sequences."""
    out, beside, batches = dict[str, float](), parts.get("log-probs", 0.0), config.train.minibatches
    forward = {role: forward_seconds(one, batches) for role, one in works.items()}
    for role in (role for role in works if role != "critic"):
        out[role] = max(0.0, forward[role] - beside) if role in separate(config) else forward[role]
        beside += out[role]
    if config.algorithm.needs_critic:
        trained = sum(step_terms(works["critic"]).values()) * batches * config.train.epochs
        apart, own = "critic" in separate(config), (forward["critic"], trained)
        waits = max(0.0, own[0] - beside) + max(0.0, own[1] - parts["training"])
        out["critic"] = waits if apart else sum(own)
    return out


def _moved_to_host(config: RunConfig, shape: ModelShape) -> float:
    """Returns bytes of a rank's optimizer state that leave its GPU while servers sample."""
    d = config.learner.dims
    return 12.0 * sum(_held_of(shape)) / d.world_size


def unmodeled_features(config: RunConfig) -> Iterator[str]:
    """Yields assumptions of `rl_step` that this configuration does not meet, as ends of a sentence."""
    for key, one in config.training_environments.items():
        yield f"single completions, and {key}.function={one.function} has several turns"
        break
    if (adapters := adapter_layouts(config.learner)) is not None:
        yield f"training all weights, and {adapters.given} trains adapters"
