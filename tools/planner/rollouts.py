"""Seconds that engines take to sample a step's completions: a decode roofline with the tail of lengths. No torch.

A token of all rows that decode costs the larger of what is read (weights, of experts those that some row chose, and the
rows' cache, with the states of delta nets) and what is computed, and a fixed time for launches and messages. Once no
prompt waits, rows end one after the other and the longest decodes nearly alone.

A server whose draft layer proposes tokens makes a pass of the model over them and the one before for each row, and a
pass of the draft layer for each proposal, and has so one token more than were accepted (arXiv:2211.17192).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from rl_megatron.errors import GB
from rl_megatron.models.shape import ModelShape
from tools.planner.constants import FITTED
from tools.planner.hardware import Gpu

READ = 0.6  # share of a GPU's memory rate at which engines read weights and caches; assumed
COMPUTED = 0.5  # share of the peak in prompts' passes and large batches; assumed
TOKEN_SECONDS = 2e-3  # sampling and scheduling of a token; assumed
LAYER_SECONDS, FAR_LAYER_SECONDS = 6.5e-5, 4.6e-4
"""Launches of a layer of a token and what its messages take beside their bytes, in engines inside NVLink's domain and
in larger ones.

What is left of published tokens beside `TOKEN_SECONDS`, what they read and what they send: DeepSeek-R1 in float8 on 8
H200, 12.8 to 34.6 ms for 8 to 64 rows (SemiAnalysisAI/InferenceX, issue 870: 40 to 69 µs a layer); Qwen3-30B-A3B on an
A100, 9.6 ms (tenstorrent/tt-inference-server, issue 340: 54 µs); DeepSeek-R1 on two nodes of 8 H100, 31.2 ms for one
row (tt-inference-server, issue 356).
"""
SPREAD = 0.6  # standard deviation of the logarithm of lengths; assumed
ACCEPTED = 0.85
"""Share of a draft layer's proposals that are accepted if all before them are: the least that DeepSeek-V3 was measured
to have of its one (arXiv:2412.19437, section 5.4.3)."""
_CLASSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShape:
    """The degrees of a server, what of a GPU's memory its cache has, in bytes, and bytes that it reads for each
    parameter of the ``experts`` and of the ``others``. Its draft layer proposes ``drafts`` tokens at a step for each
    row, of which ``accepted`` are in the mean."""

    tp: int
    dp: int
    cache: float
    experts: float = 2.0
    others: float = 2.0
    drafts: int = 0
    accepted: float = 0.0

    @property
    def ranks(self) -> int:
        """GPUs of a server."""
        return self.tp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Seconds of a step's completions: ``alone`` if all start together and the step waits for the last; ``steady`` if
    others fill the places of those that end; and of the ``longest`` completion in a full engine. ``requests`` in
    flight fill the servers' places; ``held_back``: whether fewer are allowed."""

    alone: float
    steady: float
    longest: float
    prompts: float
    rows: float  # that a server decodes at once
    waves: float
    requests: int
    held_back: bool


@lru_cache(maxsize=64)
def lengths_of(mean: float, most: float) -> tuple[float, ...]:
    """Lengths of equally many completions, ascending: lognormal, cut off at ``most``, with that ``mean``."""
    steps = [math.exp(SPREAD * NormalDist().inv_cdf((i + 0.5) / _CLASSES)) for i in range(_CLASSES)]
    low, high = 0.0, 100.0 * most
    for _ in range(60):
        middle = (low + high) / 2
        if sum(min(most, middle * step) for step in steps) / _CLASSES < mean:
            low = middle
        else:
            high = middle
    return tuple(min(most, low * step) for step in steps)


def token_seconds(shape: ModelShape, server: ServerShape, gpu: Gpu, rows: float, context: float) -> float:
    """Of one token for each of a server's ``rows``, whose prompts and tokens so far are ``context``."""
    step = TOKEN_SECONDS + _pass_seconds(shape, server, gpu, rows, rows * (1 + server.drafts), context)
    if server.drafts:
        step += server.drafts * _pass_seconds(draft_layer(shape), server, gpu, rows, rows, context)
    return step / (1 + server.accepted)


def _pass_seconds(
    shape: ModelShape, server: ServerShape, gpu: Gpu, rows: float, positions: float, context: float
) -> float:
    """Of a pass over ``positions`` of ``rows`` together, each of which reads its cache once."""
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
    """Of the bytes of a pass's messages: a tensor-parallel group reduces what attention and a dense MLP give, and with
    several groups all ranks gather the rows of a layer with experts, and scatter the sums, which is the default of
    vLLM 0.32.0 (``allgather_reducescatter``) and SGLang 0.5.21."""

    def exchanged(rows: float, ranks: int) -> float:
        """Gathered and scattered, as an all-reduce does both; a node's ranks send together what leaves it."""
        moved, nodes = 2 * rows * 2.0 * shape.hidden_size, max(1.0, ranks / gpu.domain)
        near, far = moved * (1 - 1 / ranks) / gpu.nvlink, moved * (1 - 1 / nodes) / (gpu.domain * gpu.network)
        return max(near, far) / (GB * FITTED.links)

    spread = len(shape.moe_layers) if server.dp > 1 else 0
    blocks = 2 * shape.num_layers - spread
    return blocks * exchanged(positions / server.dp, server.tp) + spread * exchanged(positions, server.ranks)


@lru_cache(maxsize=8)
def draft_layer(shape: ModelShape) -> ModelShape:
    """One draft layer and the model's output layer as a model of their own; the product that joins the two hidden
    states is left out, a hundredth of what a pass of DeepSeek-V3's layer over 32 rows reads."""
    return replace(
        shape, num_layers=1, dense_layers=0, windows=(), delta=None, delta_layers=(), draft_layers=0, drafts=False
    )


def tokens_accepted(drafts: int, share: float | None = None) -> float:
    """Of ``drafts`` proposals those that are accepted in the mean: the ``share``, or with None each by `ACCEPTED`."""
    return sum(ACCEPTED**n for n in range(1, drafts + 1)) if share is None else drafts * share


def cache_bytes(shape: ModelShape, context: float) -> float:
    """Of one row of ``context`` tokens, of the whole model; a layer with a window holds the last tokens of it."""
    if shape.latent is not None:
        return 2.0 * shape.num_layers * (shape.latent.kv_rank + shape.latent.rope_dim) * context
    windows = [shape.windows[layer] if shape.windows else 0 for layer in shape.attention_layers]
    held = sum(min(context, window or context) for window in windows)
    return 4.0 * shape.num_kv_heads * shape.head_dim * held


def state_bytes(shape: ModelShape) -> float:
    """Of the delta nets of one row, however long it is, of the whole model: a state in float32, as SGLang 0.5.21 has it
    and vLLM 0.32.0 that of Qwen3.5 (Qwen3-Next's in the model's dtype), and the convolution's last inputs."""
    if (net := shape.delta) is None:
        return 0.0
    state = 4.0 * net.value_heads * net.key_dim * net.value_dim
    return len(shape.delta_layers) * (state + 2.0 * net.mixed * (net.kernel - 1))


def rows_that_fit(shape: ModelShape, server: ServerShape, context: float) -> float:
    """Rows of ``context`` tokens that a server's cache holds at once."""
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
) -> Sampled:
    """The time of ``completions`` in groups of ``group``, which share a prompt; ``slots`` and its cache bound a
    server's rows, and ``concurrency`` the groups in flight on all servers, which end with their longest completion.
    With ``sharing`` servers on each GPU all that they do takes so many times as long."""
    mean, each = sum(lengths) / len(lengths), completions / replicas
    flight, held = concurrency * group / replicas, completions > concurrency * group
    ending = _longest_of(group, lengths) / mean  # of a group's completions on average one of so many still decodes
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
    return Sampled(
        alone=prompts + queued + drained,
        steady=prompts + steady,
        longest=max(lengths) * seconds(full, max(lengths) / 2),
        prompts=prompts,
        rows=rows,
        waves=each / full,
        requests=math.ceil(most * replicas * ending / group),
        held_back=full < most,
    )


def _longest_of(group: int, lengths: Sequence[float]) -> float:
    """Mean length of the longest of ``group`` completions; ``lengths`` are ascending, and equally likely."""
    count = len(lengths)
    shares = [((i + 1) / count) ** group - (i / count) ** group for i in range(count)]
    return sum(length * share for length, share in zip(lengths, shares, strict=True))


def _on_gpu(shape: ModelShape, server: ServerShape, cache: float, state: float) -> float:
    """Of a row's bytes those on each GPU of a tensor-parallel group, whose ranks share out the heads of keys and values
    and of delta nets; latents are whole on each."""
    heads = 1 if shape.latent is not None else min(server.tp, shape.num_kv_heads)
    return cache / heads + (state / min(server.tp, shape.delta.key_heads) if shape.delta is not None else 0.0)
