"""The experiments with the engine and the learner. Their outcomes are interpreted in causes.py.

They compare an engine's sampled tokens and log-probs with the learner's log-probs of the same tokens. They test how
often the learner's routers choose other experts and how much of the gap that explains, which sampling parameters
explain the engine's log-probs, and if it sampled from the reported distribution. Penalties come before the
temperature, top-k and top-p after it, as in vLLM and SGLang.

Letters: N positions of all sequences, n of them sampled, m of these with the learner's whole distribution,
V vocabulary, L layers with experts, k experts a token, M pairs of a token's place and an earlier token of its
sequence. Log-probs are nats.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rl_megatron.algorithms.segments import sequence_ids
from rl_megatron.columns import Ragged
from rl_megatron.config.sections.learner import PaddingSection
from rl_megatron.data.packing import Packer, unpack
from rl_megatron.data.samples import dense_column, drop_layer_columns, picked, select, single_turns, to_samples
from rl_megatron.errors import DataError, EngineError
from rl_megatron.interfaces import RolloutEngine, Scorer
from rl_megatron.types import Completion, GenerationRequest, ParallelDims, Prompt, Samples, SamplingParams, Span

MOST = 1.0  # nats, the most that a token counts for: a few tokens must not hide the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Sequences with the engine's log-probs as ``rollout_logprobs``, and the learner's of the same tokens.

    ``temperature`` is the learner's: ``learner`` has its log-probs at it, ``logits`` come before it.
    """

    samples: Samples
    learner: Tensor  # [N] float32
    detailed: Tensor  # [N] bool, part of the samples' mask
    logits: Tensor  # [m, V] float32, in the order of the detailed positions
    temperature: float
    learner_routes: Tensor | None = None  # [N, L, k], like the samples' routes, which are the engine's
    replayed: Tensor | None = None  # [N] float32, like ``learner``, with the engine's routes

    @property
    def engine(self) -> Tensor:
        """The engine's log-probs, [N] float32."""
        return self.samples.rollout_logprobs

    @property
    def gaps(self) -> Tensor:
        """The engine's log-probs minus the learner's, [n] double."""
        return (self.engine.double() - self.learner.double())[self.samples.mask]

    @property
    def owners(self) -> Tensor:
        """The index of each sampled token's sequence, [n]."""
        return sequence_ids(self.samples.cu_seqlens)[self.samples.mask]


def size(gaps: Tensor) -> float:
    """Returns the mean of |gap| with each token at most 1 nat; NaN counts as 1; 0 if there are no gaps."""
    if not len(gaps):
        return 0.0
    return float(torch.nan_to_num(gaps.abs().double(), nan=MOST).clamp(max=MOST).mean())


def shown(gaps: Tensor) -> str:
    """Returns gaps in words."""
    absolute = gaps.abs()
    mean, median, largest = float(absolute.mean()), float(absolute.median()), float(absolute.max())
    return f"mean |d| {mean:.2g}, median {median:.2g}, max {largest:.2g} nats"


def shifted(observation: Observation, by: int) -> float:
    """Returns the size of the gaps if the engine's log-prob of token t is compared with the learner's of t - ``by``.

    Tokens without such a neighbor in their sequence are left out.
    """
    engine, learner = (x[observation.samples.mask] for x in (observation.engine, observation.learner))
    owners = observation.owners
    one, other = (slice(by, None), slice(None, -by)) if by > 0 else (slice(None, by), slice(-by, None))
    same = owners[one] == owners[other]
    return size((engine[one] - learner[other])[same])


_LEAST_TOKENS = 8
_CONSPICUOUS = 4.0  # times the mean gap of the other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingGap:
    """Gaps of tokens with and without a different choice of experts at them or before them in their sequence."""

    share: float  # share of positions at which some router chose other experts
    without: Tensor  # gaps of tokens before any different choice
    with_: Tensor
    replayed: Tensor  # gaps of all tokens if the learner takes the engine's experts

    @property
    def shown(self) -> str:
        """The result in words."""
        text = f"{100 * self.share:.2g} % of positions have other experts"
        if len(self.without):
            text += f"; before any such: {shown(self.without)}"
        if len(self.with_):
            text += f"; from one on: {shown(self.with_)}; with the engine's experts: {shown(self.replayed)}"
        return text


def routing_gap(observation: Observation) -> RoutingGap | None:
    """Returns gaps by routing; None if the routes of one side are not known."""
    engine, learner, replayed = _routes_of(observation.samples), observation.learner_routes, observation.replayed
    if engine is None or learner is None or replayed is None:
        return None
    other = (engine.sort(-1).values != learner.to(engine.dtype).sort(-1).values).flatten(1).any(1)
    bounds, mask = observation.samples.cu_seqlens, observation.samples.mask
    counted = torch.cat([torch.zeros(1, dtype=torch.int64), other.long().cumsum(0)])
    before = counted[bounds[:-1]].repeat_interleave(bounds.diff())
    touched = (counted[1:] > before)[mask]
    gaps = observation.gaps
    return RoutingGap(
        share=float(other.double().mean()),
        without=gaps[~touched],
        with_=gaps[touched],
        replayed=(observation.engine.double() - replayed.double())[mask],
    )


_MOST_ROUTED = 65_536  # tokens for which routes are counted


def expert_means(absolute: Tensor, routes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean of ``absolute`` [n] over the tokens that chose each expert, and their number, [L, E] each.

    ``routes`` [n, L, k] integers; E - 1 is the greatest. The mean is NaN for an expert without tokens. More than
    65,536 tokens are sampled at an even spacing.
    """
    num_experts = int(routes.max()) + 1 if routes.numel() else 1
    stride = -(-len(absolute) // _MOST_ROUTED) if len(absolute) else 1
    absolute, routes = absolute[::stride].double(), routes[::stride]
    num_layers, per_token = routes.shape[1:]
    cells = routes.long() + num_experts * torch.arange(num_layers)[:, None]
    weights = absolute.repeat_interleave(num_layers * per_token)
    counts = torch.bincount(cells.view(-1), minlength=num_experts * num_layers)
    sums = torch.bincount(cells.view(-1), weights=weights, minlength=num_experts * num_layers)
    return (sums / counts).view(num_layers, num_experts), counts.view(num_layers, num_experts)


def suspected_expert(gaps: Tensor, routes: Tensor | None) -> str:
    """Describes the expert with tokens that differ far more than all others; empty if there is none.

    ``gaps`` [n] of tokens after one-token prompts: in longer ones attention carries a fault to all tokens after it.
    """
    if routes is None:
        return ""
    absolute = gaps.abs()
    means, counts = expert_means(absolute, routes)
    means = means.masked_fill(counts < _LEAST_TOKENS, -1.0)
    layer, expert = divmod(int(means.argmax()), means.shape[1])
    through = (routes[:, layer] == expert).any(1)
    rest = float(absolute[~through].mean()) if bool((~through).any()) else 0.0
    if means[layer, expert] < _CONSPICUOUS * rest:
        return ""
    return (
        f"behind one token, those through expert {expert} of MoE layer {layer} differ by "
        f"{float(means[layer, expert]):.2g} nats on average, all others by {rest:.2g}"
    )


MOST_LOGITS = 2**26  # values of logits that are fetched
_GREEDY_PROMPTS = 8
_GREEDY_TOKENS = 16
_SINGLE_TOKENS = 64
_PREFIX_SEQUENCES = 16

PromptChange = Callable[[tuple[int, ...]], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A learner and an engine that should be one policy, and how a run samples."""

    learner: Scorer
    engine: RolloutEngine
    dims: ParallelDims
    max_tokens: int  # the most tokens of a micro-batch
    padding: PaddingSection = field(default_factory=PaddingSection)
    vocab_size: int
    temperature: float
    top_p: float
    top_k: int = 0
    max_prompt_tokens: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    special_token_ids: Mapping[str, int] = field(default_factory=dict)  # name (bos_token) -> id
    columns: tuple[str, ...] = ()  # columns that can be requested from the engine
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """All measurements. Gaps are in nats, [n] double; each is rounding noise if nothing is wrong."""

    observation: Observation
    single: Tensor  # engine minus learner, at the token sampled after one-token prompts
    single_routes: Tensor | None  # [n, L, k] of these
    stretch: float  # difference of two such tokens after the same one for the learner, divided by the engine's
    batched: Tensor  # engine's greedy tokens in a batch minus alone
    prefilled: Tensor  # engine's greedy tokens when decoded minus the same after a longer prompt
    packed: Tensor  # learner's log-probs in a batch minus alone
    prompts: Mapping[str, float]  # change of the prompts -> size of the gap if the learner sees them changed


async def run_experiments(bench: Bench, prompts: Sequence[Prompt], *, completions: int, worth: float) -> Outcomes:
    """Runs all experiments. Changed prompts are tried if the gap's size is above ``worth``."""
    observation = await observe(bench, prompts, completions)
    gap = size(observation.gaps)
    batched, prefilled = await _greedy(bench, prompts)
    single, single_routes, stretch = await _compare_one_token_prompts(bench)
    return Outcomes(
        observation=observation,
        single=single,
        single_routes=single_routes,
        stretch=stretch,
        batched=batched,
        prefilled=prefilled,
        packed=await _compare_packing(bench, observation),
        prompts=await _changed_prompts(bench, observation) if gap > worth else {},
    )


async def observe(bench: Bench, prompts: Sequence[Prompt], completions: int) -> Observation:
    """Samples like a run, scores the same tokens, and fetches logits for as many tokens as fit in memory."""
    requests = [_request(bench, p.id, p.token_ids, num=completions, seed=bench.seed + i) for i, p in enumerate(prompts)]
    requests = [replace(r, columns=bench.columns) for r in requests]
    answers = await asyncio.gather(*(bench.engine.generate(r) for r in requests))
    samples = _samples(prompts, answers)
    free = drop_layer_columns(samples)  # tokens that sampling kept are no gap's cause: the learner has them, too
    detailed = _first_sampled(samples, MOST_LOGITS // bench.vocab_size)
    logits = _left(await _logits(bench, replace(free, mask=detailed)), samples, detailed)
    if _routes_of(samples) is None:
        learner, routes, replayed = await _score(bench, free), None, None
    else:
        batch = Packer(dims=bench.dims, max_tokens=bench.max_tokens, padding=bench.padding).pack(free)
        said = await bench.learner.score(batch, frozenset({"logprobs", "routes"}))
        learner, routes = (unpack(batch, said[what], free) for what in ("logprobs", "routes"))
        replayed = await _score(bench, samples)
    return Observation(
        samples=samples,
        learner=learner,
        learner_routes=routes,
        replayed=replayed,
        detailed=detailed,
        logits=logits,
        temperature=bench.temperature,
    )


async def _greedy(bench: Bench, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Compares the engine with itself: in a batch of different lengths and alone, decoded and prefilled."""
    chosen = random.Random(bench.seed)
    pool = [token for prompt in prompts for token in prompt.token_ids]
    longest = bench.max_prompt_tokens
    lengths = sorted({1, 2, 3, *(max(1, longest * i // 5) for i in range(1, 6))})[:_GREEDY_PROMPTS]
    ids = [tuple(chosen.choice(pool) for _ in range(length)) for length in lengths]
    new = min(bench.max_new_tokens, _GREEDY_TOKENS)
    asked = [_request(bench, f"greedy {i}", x, new=new, greedy=True) for i, x in enumerate(ids)]
    batch = [answer[0] for answer in await asyncio.gather(*(bench.engine.generate(r) for r in asked))]
    alone = [(await bench.engine.generate(r))[0] for r in asked]
    together = [_compared(a, b) for a, b in zip(batch, alone, strict=True)]
    prefilled = []
    for prompt, completion in zip(ids, alone, strict=True):
        half = min(len(completion.token_ids) // 2, longest - len(prompt))
        if half > 0:
            longer = (*prompt, *completion.token_ids[:half].tolist())
            again = await bench.engine.generate(_request(bench, "greedy again", longer, new=new - half, greedy=True))
            tokens, logprobs = completion.token_ids[half:], completion.logprobs[half:]
            rest = replace(completion, token_ids=tokens, logprobs=logprobs, columns={})
            prefilled.append(_compared(rest, again[0]))
    return torch.cat(together), torch.cat(prefilled) if prefilled else torch.zeros(0)


def _compared(one: Completion, other: Completion) -> Tensor:
    """Returns gaps up to and with the first differing token; there the gap is between the likeliest token of each."""
    shorter = min(len(one.token_ids), len(other.token_ids))
    unlike = np.flatnonzero(one.token_ids[:shorter] != other.token_ids[:shorter])
    stop = int(unlike[0]) + 1 if len(unlike) else shorter
    return torch.from_numpy(np.subtract(one.logprobs[:stop], other.logprobs[:stop], dtype=np.float64))


async def _compare_one_token_prompts(bench: Bench) -> tuple[Tensor, Tensor | None, float]:
    """Compares tokens after one-token prompts: they attend only to one token, so positions and caches do not matter."""
    chosen = random.Random(bench.seed)
    ids = chosen.sample(range(bench.vocab_size), min(_SINGLE_TOKENS, bench.vocab_size))
    asked = [replace(_request(bench, f"token {i}", (i,), num=2, new=1), columns=bench.columns) for i in ids]
    answers = await asyncio.gather(*(bench.engine.generate(r) for r in asked))
    prompts = [_prompt(r.id, r.token_ids) for r in asked]
    samples = _samples(prompts, answers)
    scores = await _score(bench, drop_layer_columns(samples))
    said, own = samples.rollout_logprobs.double(), scores.double()
    engine, learner = (float((x[::2] - x[1::2]).abs().sum()) for x in (said, own))
    return said - own, _routes_of(samples), learner / engine if engine else math.nan


async def _compare_packing(bench: Bench, observation: Observation) -> Tensor:
    """Compares the learner with itself: sequences of different lengths in one batch, and each alone."""
    samples = drop_layer_columns(observation.samples)
    lengths = samples.cu_seqlens.diff()
    order = lengths.argsort().tolist()
    picked = sorted({order[i * (len(order) - 1) // 7] for i in range(8)})
    gaps = []
    for number in picked:
        alone = select(samples, torch.tensor([number]))
        start, stop = samples.cu_seqlens[number : number + 2].tolist()
        gap = observation.learner[start:stop].double() - (await _score(bench, alone)).double()
        gaps.append(gap[alone.mask])
    return torch.cat(gaps)


async def _changed_prompts(bench: Bench, observation: Observation) -> dict[str, float]:
    """Returns sizes of the gap if the engine saw other prompts than were sent, by the change of the prompts."""
    special = bench.special_token_ids.items()
    changes: dict[str, PromptChange] = {
        **{f"{name} ({token}) put before it": partial(_put_before, token) for name, token in special},
        **{f"{name} ({token}) put behind it": partial(_append, token) for name, token in special},
        "its first token left out": _drop_first,
        "its last token left out": _drop_last,
    }
    found = _prompts_of(observation.samples)[:_PREFIX_SEQUENCES]
    out = {}
    for name, change in changes.items():
        samples = to_samples([single_turns(_prompt(str(i), change(x)), [c]) for i, (x, c) in enumerate(found)])
        gaps = samples.rollout_logprobs.double() - (await _score(bench, samples)).double()
        out[name] = size(gaps[samples.mask])
    return out


def _put_before(token: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    return (token, *ids)


def _append(token: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    return (*ids, token)


def _drop_first(ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids[1:] or ids


def _drop_last(ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids[:-1] or ids


def _prompts_of(samples: Samples) -> list[tuple[tuple[int, ...], Completion]]:
    """Returns the prompt and the completion of each sequence."""
    out = []
    for number in range(samples.num_sequences):
        one = select(samples, torch.tensor([number]))
        first = int(one.mask.int().argmax())
        sampled = {name: column[first:] for name, column in one.extra.items() if isinstance(column, Ragged)}
        completion = Completion(
            token_ids=one.targets[first:].int().numpy(),
            logprobs=one.rollout_logprobs[first:].numpy(),
            finish_reason="length",
            spans=(Span(0, 0),),
            columns={name: Ragged(part.values.numpy(), part.counts.numpy()) for name, part in sampled.items()},
        )
        out.append((tuple(one.input_ids[: first + 1].tolist()), completion))
    return out


def _first_sampled(samples: Samples, limit: int) -> Tensor:
    """Returns a mask of the first sampled positions of every sequence, ``limit`` in total, [N] bool."""
    each = max(1, limit // samples.num_sequences)
    out = torch.zeros_like(samples.mask)
    for start, stop in zip(samples.cu_seqlens[:-1].tolist(), samples.cu_seqlens[1:].tolist(), strict=True):
        places = samples.mask[start:stop].nonzero().squeeze(1)[:each]
        out[start + places] = True
    return out


async def _score(bench: Bench, samples: Samples) -> Tensor:
    batch = Packer(dims=bench.dims, max_tokens=bench.max_tokens, padding=bench.padding).pack(samples)
    return unpack(batch, (await bench.learner.score(batch, frozenset({"logprobs"})))["logprobs"], samples)


async def _logits(bench: Bench, samples: Samples) -> Tensor:
    """Returns logits [m, V] in the order of the masked-in positions."""
    batch = Packer(dims=bench.dims, max_tokens=bench.max_tokens, padding=bench.padding).pack(samples)
    answers = (await bench.learner.score(batch, frozenset({"logits"})))["logits"]
    count = 0
    numbers = []
    for row in batch.micro_batches:
        of_row = []
        for micro_batch in row:
            places = torch.zeros(len(micro_batch.mask), dtype=torch.int64)
            found = int(micro_batch.mask.sum())
            places[micro_batch.mask] = torch.arange(count, count + found)
            count += found
            of_row.append(places)
        numbers.append(of_row)
    order = unpack(batch, numbers, samples)[samples.mask]
    return torch.cat([logits for row in answers for logits in row])[order]


def _left(logits: Tensor, samples: Samples, detailed: Tensor) -> Tensor:
    """Returns logits [m, V] without the tokens that sampling did not keep, if the engine has said which it kept."""
    kept = samples.extra.get("kept")
    if not isinstance(kept, Ragged):
        return logits
    own = picked(kept, detailed.nonzero().squeeze(1))
    assert isinstance(own, Ragged)
    out = (own.counts > 0)[:, None].repeat(1, logits.shape[1])
    out[torch.arange(len(own)).repeat_interleave(own.counts), own.values.long()] = False
    return logits.masked_fill(out, _LEFT_OUT)


def _request(
    bench: Bench,
    name: str,
    ids: tuple[int, ...],
    *,
    num: int = 1,
    new: int | None = None,
    seed: int = 0,
    greedy: bool = False,
) -> GenerationRequest:
    params = SamplingParams(
        temperature=0.0 if greedy else bench.temperature,
        top_p=1.0 if greedy else bench.top_p,
        top_k=0 if greedy else bench.top_k,
        max_new_tokens=new or bench.max_new_tokens,
        stop_token_ids=() if greedy or new else bench.stop_token_ids,
        seed=seed,
    )
    return GenerationRequest(id=f"doctor: {name}", token_ids=ids, num_completions=num, params=params)


def _samples(prompts: Sequence[Prompt], answers: Sequence[Sequence[Completion]]) -> Samples:
    """Returns the samples, with columns if they fit: an engine that saw other prompts than were sent has others."""
    try:
        return to_samples([single_turns(*pair) for pair in zip(prompts, answers, strict=True)])
    except (DataError, EngineError):
        without = [[replace(completion, columns={}) for completion in answer] for answer in answers]
        return to_samples([single_turns(*pair) for pair in zip(prompts, without, strict=True)])


def _routes_of(samples: Samples) -> Tensor | None:
    return dense_column(samples.extra, "routes")


def _prompt(name: str, ids: tuple[int, ...]) -> Prompt:
    return Prompt(id=name, text="", token_ids=ids, answer="")


_MOST_VALUES = 2**24  # the most values of logits that are examined
_LEFT_OUT = -1e15  # a logit of probability 0; its square is finite
_SURE = 6.0  # standard deviations: less than one in a billion by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of sampling; the defaults change nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    repetition_penalty: float = 1.0
    sampled_repetition_penalty: float = 1.0  # the same, but only on sampled tokens: SGLang's
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def differing(self, other: Parameters) -> dict[str, tuple[float, float]]:
        """Returns both values of each parameter that differs in ``other``."""
        names = self.__dataclass_fields__
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Sampled tokens with the learner's logits, the engine's log-probs and earlier tokens of each; by `collect`."""

    logits: Tensor  # [m, V]
    tokens: Tensor  # [m]
    engine: Tensor  # [m]
    rows: Tensor  # [M] the token's row
    columns: Tensor  # [M] an earlier token id of its sequence
    sampled: Tensor  # [M] how often that id was sampled before the token; prompts do not count


def collect(observation: Observation) -> Evidence:
    """Collects the evidence of the detailed tokens, or of as many of them as can be examined."""
    detailed = observation.detailed.nonzero().squeeze(1)
    kept = max(1, min(len(detailed), _MOST_VALUES // observation.logits.shape[1]))
    stride = -(-len(detailed) // kept)
    places = detailed[::stride]
    samples = observation.samples
    pairs = list(_before(observation, places))
    rows = [torch.full((len(ids),), row) for row, (ids, _) in enumerate(pairs)]
    return Evidence(
        logits=observation.logits[::stride].float(),
        tokens=samples.targets[places],
        engine=observation.engine[places],
        rows=torch.cat(rows),
        columns=torch.cat([ids for ids, _ in pairs]),
        sampled=torch.cat([counts for _, counts in pairs]),
    )


def _before(observation: Observation, places: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields for each place the token ids of its sequence before its target, and how often each was sampled."""
    samples = observation.samples
    starts = samples.cu_seqlens[torch.searchsorted(samples.cu_seqlens, places, right=True) - 1]
    for start, place in zip(starts.tolist(), places.tolist(), strict=True):
        ids, which = samples.input_ids[start : place + 1].unique(return_inverse=True)
        was_sampled = torch.cat([torch.zeros(1), samples.mask[start:place].float()])
        yield ids, torch.zeros(len(ids)).index_add_(0, which, was_sampled)


def predicted(evidence: Evidence, parameters: Parameters) -> Tensor:
    """Returns log-probs [m] of the tokens under ``parameters``; -inf if a token could not have been sampled."""
    p = parameters
    z = _penalized(evidence, p) / p.temperature
    token_logits = z.gather(1, evidence.tokens[:, None])[:, 0]
    logprobs = token_logits - z.logsumexp(1)
    if p.top_k or p.top_p < 1:
        ordered = z.softmax(1).sort(dim=1, descending=True).values
        if p.top_k:
            ordered[:, p.top_k :] = 0
        cumulative = ordered.cumsum(1)
        kept = cumulative[:, -1:]
        if p.top_p < 1:
            last = (cumulative < p.top_p * kept).sum(1, keepdim=True).clamp(max=z.shape[1] - 1)
            kept = cumulative.gather(1, last)
        least = ordered.masked_fill(cumulative > kept, 1.0).amin(1) if p.top_p < 1 else ordered[:, p.top_k - 1]
        logprobs = logprobs.masked_fill(logprobs < least.log() - 1e-4, -torch.inf) - kept[:, 0].log()
    return logprobs


def _penalized(evidence: Evidence, p: Parameters) -> Tensor:
    """Returns logits [m, V] with penalties: CTRL's (arXiv:1909.05858) on earlier tokens, OpenAI's on sampled ones."""
    scales = (p.repetition_penalty, p.sampled_repetition_penalty)
    if scales == (1, 1) and not p.presence_penalty and not p.frequency_penalty:
        return evidence.logits
    z = evidence.logits.clone()
    values = z[evidence.rows, evidence.columns]
    scale = torch.where(evidence.sampled > 0, scales[0] * scales[1], scales[0])
    values = torch.where(values > 0, values / scale, values * scale)
    values = values - p.presence_penalty * (evidence.sampled > 0) - p.frequency_penalty * evidence.sampled
    z[evidence.rows, evidence.columns] = values
    return z


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Sampling parameters, and the size of the gap that they leave."""

    parameters: Parameters
    residual: float


def find_parameters(evidence: Evidence, learner: Parameters, stretch: float, *, good: float) -> Explanation | None:
    """Returns parameters other than the learner's that leave a gap of at most ``good``, or None.

    One changed parameter is tried, with and without another temperature. An engine's temperature follows from
    ``stretch``, the learner's difference between two tokens after the same ones over the engine's, whatever is cut off.
    Top-k and top-p follow from the mass of the remaining tokens; penalties are tried by hundredths.
    """
    found = learner.temperature * stretch
    rounded = [round(found, 2)] if 0.01 <= found < 100 else []  # NaN fails this comparison
    for candidates in (_implied_limits, _penalties):
        for temperature in dict.fromkeys((learner.temperature, *rounded)):
            tried = [
                Explanation(parameters=one, residual=size(evidence.engine - predicted(evidence, one)))
                for one in candidates(evidence, replace(learner, temperature=temperature))
            ]
            best = min(tried, key=lambda explanation: explanation.residual)
            if best.residual <= good and best.parameters != learner:
                return best
    return None


def _implied_limits(evidence: Evidence, start: Parameters) -> list[Parameters]:
    """Returns the parameters unchanged, and with the top-k or top-p that the mass of remaining tokens implies."""
    z = evidence.logits / start.temperature
    token = z.gather(1, evidence.tokens[:, None])[:, 0] - z.logsumexp(1)
    left = (token - evidence.engine).exp().clamp(max=1.0)[:, None]
    cumulative = z.softmax(1).sort(dim=1, descending=True).values.cumsum(1)
    k = int((cumulative < left * (1 - 1e-4)).sum(1).median()) + 1
    p = int(100 * float(left.min()) + 1e-3)  # hundredths: the mass is at least top-p at every token
    cut = [replace(start, top_k=k)] if k < z.shape[1] else []
    return [start, *cut, *(replace(start, top_p=at / 100) for at in (p - 1, p, p + 1) if 0 < at < 100)]


def _penalties(_: Evidence, start: Parameters) -> Iterator[Parameters]:
    for hundredths in range(50, 201):
        yield replace(start, repetition_penalty=hundredths / 100)
        yield replace(start, sampled_repetition_penalty=hundredths / 100)
    for hundredths in range(-200, 201, 5):
        yield replace(start, presence_penalty=hundredths / 100)
        yield replace(start, frequency_penalty=hundredths / 100)


def sampled_otherwise(evidence: Evidence, reported: Parameters) -> str:
    """Describes how the tokens differ from draws of the reported distribution; empty if they do not.

    Under it the mean log-prob of m tokens has a known mean and variance, and tokens are unlikely to be always among the
    most likely ones.
    """
    z = _penalized(evidence, reported) / reported.temperature
    logprobs = z.log_softmax(1)
    probabilities = logprobs.exp()
    own = logprobs.gather(1, evidence.tokens[:, None])[:, 0].double()
    expected = (probabilities * logprobs).sum(1).double()
    variance = ((probabilities * logprobs.square()).sum(1).double() - expected.square()).clamp(min=0).sum()
    deviation = float((own - expected).sum() / variance.sqrt().clamp(min=1e-9))
    if abs(deviation) <= _SURE:
        return ""
    likely = [math.exp(math.log(0.1) + i * math.log(100.0) / 200) for i in range(201)]
    scores = [float((z / t).log_softmax(1).gather(1, evidence.tokens[:, None]).sum()) for t in likely]
    most_likely = likely[max(range(len(likely)), key=scores.__getitem__)] * reported.temperature
    more_likely = (probabilities * (logprobs > own.float()[:, None])).sum(1)
    ranks = (logprobs > own.float()[:, None]).sum(1)
    return (
        f"the tokens were not drawn from the distribution reported: their mean log-prob is {deviation:+.0f} standard "
        f"deviations off; a temperature of {most_likely:.2g} would make them most likely, the tokens above a sampled "
        f"one hold {float(more_likely.max()):.2f} of the mass at most, and are {int(ranks.max())} at most"
    )
