"""Which sampling parameters explain an engine's log-probs, and whether what it sampled is what it reported.

A parameter is fitted by the size of the gap that it leaves. Penalties come before the temperature, top-k and top-p
after it, as in vLLM and SGLang. Letters: m tokens with logits, V vocabulary, M pairs of a token's place and a token
that its sequence held before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_megatron.diagnosis.observation import Observation, size

_MOST_VALUES = 2**24  # of logits that a fit looks at
_MOST_TOKENS_OF_TWO, _MOST_VALUES_OF_TWO = 256, 2**22  # that a fit of two parameters at once looks at
_LARGEST_TOP_K = 4096
_ZOOMS = 4
_POINTS = 25
_SURE = 6.0  # standard deviations: less than one in a billion by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How tokens are sampled; the defaults change nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    repetition_penalty: float = 1.0
    sampled_repetition_penalty: float = 1.0  # the same, but on sampled tokens alone: SGLang's
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def differing(self, other: Parameters) -> dict[str, tuple[float, float]]:
        """Both values of each parameter that is another in ``other``."""
        names = self.__dataclass_fields__
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Sampled tokens with the learner's logits, the engine's log-probs and what stood before each; by `collect`."""

    logits: Tensor  # [m, V]
    tokens: Tensor  # [m]
    engine: Tensor  # [m]
    rows: Tensor  # [M] the token's place
    columns: Tensor  # [M] a token id that its sequence held before
    sampled: Tensor  # [M] how often that was sampled before it; prompts do not count


def collect(observation: Observation) -> Evidence:
    """From the detailed tokens, or as many of the first of these as a fit can look at."""
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
    """Of each place the token ids that its sequence held before its target, and how often each was sampled."""
    samples = observation.samples
    starts = samples.cu_seqlens[torch.searchsorted(samples.cu_seqlens, places, right=True) - 1]
    for start, place in zip(starts.tolist(), places.tolist(), strict=True):
        ids, which = samples.input_ids[start : place + 1].unique(return_inverse=True)
        was_sampled = torch.cat([torch.zeros(1), samples.mask[start:place].float()])
        yield ids, torch.zeros(len(ids)).index_add_(0, which, was_sampled)


def predicted(evidence: Evidence, parameters: Parameters) -> Tensor:
    """Log-probs [m] of the tokens as ``parameters`` would have them; -inf where they could not have been sampled."""
    p = parameters
    z = _penalised(evidence, p) / p.temperature
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


def _penalised(evidence: Evidence, p: Parameters) -> Tensor:
    """Logits [m, V] after the penalties: CTRL's (arXiv:1909.05858) on tokens before, OpenAI's on sampled ones."""
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


def residual(evidence: Evidence, parameters: Parameters) -> float:
    """Size of the gap that ``parameters`` leave."""
    return size(evidence.engine - predicted(evidence, parameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The parameters found, and the size of the gap that they leave."""

    parameters: Parameters
    residual: float


RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (math.log(0.05), math.log(8.0)),
    "repetition_penalty": (math.log(0.4), math.log(2.5)),
    "sampled_repetition_penalty": (math.log(0.4), math.log(2.5)),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_LOGARITHMIC = ("temperature", "repetition_penalty", "sampled_repetition_penalty")


def fit(evidence: Evidence, start: Parameters, *, good: float) -> Fit:
    """Parameters beside ``start`` that leave the least gap; ends where it is at most ``good``.

    One at a time, up to three; then a temperature together with top-p or top-k, which one at a time hide each other.
    """
    best = _fit_in_turn(evidence, start, good)
    for cut in (_fit_top_p, _fit_top_k):
        if best.residual > good:
            best = min(best, _fit_with_temperature(evidence, start, cut), key=lambda f: f.residual)
    return best


def _fit_in_turn(evidence: Evidence, start: Parameters, good: float) -> Fit:
    best = Fit(parameters=start, residual=residual(evidence, start))
    names: list[str] = []
    while best.residual > good and len(names) < 3:
        rest = [name for name in (*RANGES, "top_p", "top_k") if name not in names]
        found = {name: _fit_one(evidence, best.parameters, name) for name in rest}
        name = min(found, key=lambda n: found[n].residual)
        if found[name].residual > 0.8 * best.residual:
            break
        best = found[name]
        names.append(name)
        for again in names[:-1]:
            best = min(best, _fit_one(evidence, best.parameters, again), key=lambda f: f.residual)
    return best


def _fit_one(evidence: Evidence, start: Parameters, name: str) -> Fit:
    if name == "top_p":
        return _fit_top_p(evidence, start)
    if name == "top_k":
        return _fit_top_k(evidence, start)
    low, high = RANGES[name]
    value_of: Callable[[float], float] = math.exp if name in _LOGARITHMIC else float
    best = Fit(parameters=start, residual=residual(evidence, start))
    for _ in range(_ZOOMS):
        step = (high - low) / (_POINTS - 1)
        points = [low + i * step for i in range(_POINTS)]
        tried = {x: residual(evidence, _with(start, name, value_of(x))) for x in points}
        x = min(tried, key=lambda point: tried[point])
        if tried[x] < best.residual:
            best = Fit(parameters=_with(start, name, value_of(x)), residual=tried[x])
        low, high = x - step, x + step
    return _rounded(evidence, best, name)


def _with(parameters: Parameters, name: str, value: float) -> Parameters:
    changes: dict[str, Any] = {name: value}
    return replace(parameters, **changes)


def _fit_with_temperature(evidence: Evidence, start: Parameters, cut: Callable[[Evidence, Parameters], Fit]) -> Fit:
    """The temperature whose best ``cut`` leaves the least gap."""
    low, high = RANGES["temperature"]
    every, evidence = evidence, _some(evidence)
    best = Fit(parameters=start, residual=residual(evidence, start))
    for _ in range(_ZOOMS):
        step = (high - low) / (_POINTS - 1)
        tried = [cut(evidence, replace(start, temperature=math.exp(low + i * step))) for i in range(_POINTS)]
        best = min([best, *tried], key=lambda f: f.residual)
        low, high = (math.log(best.parameters.temperature) + sign * step for sign in (-1, 1))
    found = _rounded(evidence, best, "temperature").parameters
    return Fit(parameters=found, residual=residual(every, found))


def _some(evidence: Evidence) -> Evidence:
    """Evenly many of the tokens."""
    count = max(1, min(_MOST_TOKENS_OF_TWO, _MOST_VALUES_OF_TWO // evidence.logits.shape[1]))
    stride = -(-len(evidence.tokens) // count)
    kept = evidence.rows % stride == 0
    return Evidence(
        logits=evidence.logits[::stride],
        tokens=evidence.tokens[::stride],
        engine=evidence.engine[::stride],
        rows=evidence.rows[kept] // stride,
        columns=evidence.columns[kept],
        sampled=evidence.sampled[kept],
    )


def _rounded(evidence: Evidence, found: Fit, name: str) -> Fit:
    """The nearest number of two decimals where it explains as well: what somebody will have written."""
    value = round(getattr(found.parameters, name), 2)
    if value <= 0 and name in _LOGARITHMIC:
        return found
    near = _with(found.parameters, name, value)
    left = residual(evidence, near)
    return Fit(parameters=near, residual=left) if left <= 1.5 * found.residual + 1e-6 else found


def _fit_top_p(evidence: Evidence, start: Parameters) -> Fit:
    """Hundredths, all on one sorting of the vocabulary."""
    z = _penalised(evidence, start) / start.temperature
    probabilities = z.softmax(1)
    own = probabilities.gather(1, evidence.tokens[:, None])
    above = probabilities.masked_fill(probabilities <= own, 0.0).sum(1)
    cumulative = probabilities.sort(dim=1, descending=True).values.cumsum(1)
    shares = torch.arange(2, 100) / 100
    last = torch.searchsorted(cumulative, shares.expand(len(cumulative), -1).contiguous())
    mass = cumulative.gather(1, last.clamp(max=cumulative.shape[1] - 1))
    gaps = (evidence.engine[:, None] - (own / mass).log()).abs().clamp(max=1.0)
    gaps = gaps.masked_fill(above[:, None] >= shares, 1.0)
    found = replace(start, top_p=round(float(shares[gaps.mean(0).argmin()]), 2))
    return Fit(parameters=found, residual=residual(evidence, found))


def _fit_top_k(evidence: Evidence, start: Parameters) -> Fit:
    """All k at once: the mass that k leaves against the mass that the engine's log-prob implies."""
    z = _penalised(evidence, start) / start.temperature
    largest = min(_LARGEST_TOP_K, z.shape[1] - 1)
    mass = z.softmax(1).topk(largest, dim=1).values.cumsum(1).log()
    token = z.gather(1, evidence.tokens[:, None]) - z.logsumexp(1, keepdim=True)
    rank = (z > z.gather(1, evidence.tokens[:, None])).sum(1, keepdim=True)
    gaps = (evidence.engine[:, None] - (token - mass)).abs().clamp(max=1.0)
    gaps = gaps.masked_fill(rank >= torch.arange(1, largest + 1), 1.0)
    k = int(gaps.mean(0).argmin()) + 1
    found = replace(start, top_k=k)
    return Fit(parameters=found, residual=residual(evidence, found))


def sampled_otherwise(evidence: Evidence, reported: Parameters) -> str:
    """How the tokens differ from draws of the distribution that was reported; empty where they do not.

    Under it the mean log-prob of m tokens has a known mean and variance, and no token is likely to be always among the
    most likely ones.
    """
    z = _penalised(evidence, reported) / reported.temperature
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
