"""Which sampling parameters explain an engine's log-probs, and whether what it sampled is what it reported.

Penalties come before the temperature, top-k and top-p after it, as in vLLM and SGLang. Letters: m tokens with logits,
V vocabulary, M pairs of a token's place and a token that its sequence held before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.lab.mismatch.experiments import Observation, size

_MOST_VALUES = 2**24  # of logits that are looked at
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
    """From the detailed tokens, or as many of these as can be looked at."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Sampling parameters, and the size of the gap that they leave."""

    parameters: Parameters
    residual: float


def find_parameters(evidence: Evidence, learner: Parameters, stretch: float, *, good: float) -> Explanation | None:
    """Returns the parameters beside the learner's that leave a gap of at most ``good``; None if there are none.

    One parameter is tried, and one beside another temperature. An engine's temperature follows from ``stretch``, the
    learner's difference between two tokens behind the same ones over the engine's, whatever is cut off; top-k and top-p
    from the mass that the tokens left have; penalties are tried by hundredths.
    """
    found = learner.temperature * stretch
    rounded = [round(found, 2)] if 0.01 <= found < 100 else []  # which no NaN is
    for candidates in (_without_penalties, _penalties):
        for temperature in dict.fromkeys((learner.temperature, *rounded)):
            tried = [
                Explanation(parameters=one, residual=size(evidence.engine - predicted(evidence, one)))
                for one in candidates(evidence, replace(learner, temperature=temperature))
            ]
            best = min(tried, key=lambda explanation: explanation.residual)
            if best.residual <= good and best.parameters != learner:
                return best
    return None


def _without_penalties(evidence: Evidence, start: Parameters) -> list[Parameters]:
    """The parameters as they are, and those with the top-k and the top-p that the mass of the tokens left tells."""
    z = evidence.logits / start.temperature
    token = z.gather(1, evidence.tokens[:, None])[:, 0] - z.logsumexp(1)
    left = (token - evidence.engine).exp().clamp(max=1.0)[:, None]
    cumulative = z.softmax(1).sort(dim=1, descending=True).values.cumsum(1)
    k = int((cumulative < left * (1 - 1e-4)).sum(1).median()) + 1
    p = int(100 * float(left.min()) + 1e-3)  # hundredths: the mass is at least top-p in every place
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
