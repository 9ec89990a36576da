"""A policy, a critic and a reference of one table each, in this process: real losses, gradients and steps, no model.

``step`` is plain gradient descent at the given rate, so what an update does is seen in the table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.data.samples import dense_column
from rl_megatron.types import (
    Batch,
    Completion,
    GenerationRequest,
    Loss,
    LossInputs,
    Metric,
    Prompt,
    Samples,
    Scores,
    StepResult,
    Want,
    WeightUpdate,
)
from tests.completions import completion

VOCABULARY, NAMED = 12, 5
NOT_OF_A_LOSS = ("input_ids", "targets", "turn_of")


def table(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def looked_up(weights: Tensor, samples: Samples) -> Tensor:
    """[N, ...]: logits or a value depend on the input token alone, and are twice as large by expert 1."""
    found, routes = weights[samples.input_ids], dense_column(samples.extra, "routes")
    if routes is None:
        return found
    return found * (1 + routes[:, 0, 0].float()).view(-1, *[1] * (found.dim() - 1))


def turn_sum(ids: Tensor, samples: Samples) -> Callable[[Tensor], Tensor] | None:
    """Over the positions of one sequence and turn; ``ids`` [N] are the sequences'."""
    if samples.turn_of is None:
        return None
    turns = (1000 * ids + samples.turn_of).unique(return_inverse=True)[1]
    return lambda values: segment_sum(values, turns)[turns]


@dataclass
class Toy:
    """One of the three models; ``heard`` records every call, in order."""

    weights: Tensor  # [V, V] logits of a policy, or [V] values of a critic
    heard: list[object] = field(default_factory=list)
    gradient: Tensor | None = None  # since the last step

    @property
    def is_critic(self) -> bool:
        return self.weights.dim() == 1

    def _of(self, samples: Samples, weights: Tensor) -> Tensor:
        found = looked_up(weights, samples)
        return found if self.is_critic else found.log_softmax(-1).gather(1, samples.targets[:, None]).squeeze(1)

    def _scores(self, batch: Batch, what: str) -> Scores:
        self.heard.append((what, columns_of(batch)))
        return [[self._of(m, self.weights) for m in row] for row in batch.micro_batches]

    def _logit_norms(self, samples: Samples) -> Tensor:
        """By the gradient itself."""
        logits = looked_up(self.weights, samples).double().requires_grad_()
        said = logits.log_softmax(-1).gather(1, samples.targets[:, None]).sum()
        return torch.autograd.grad(said, logits)[0].square().sum(-1).float()

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        """Its routers choose expert 1 for odd tokens."""
        mine: Want = "values" if self.is_critic else "logprobs"
        if "entropy" in want:
            found = await self.score(batch, want - {"entropy"})
            tables = [[looked_up(self.weights, m).log_softmax(-1) for m in row] for row in batch.micro_batches]
            return {**found, "entropy": [[-(x.exp() * x).sum(-1) for x in row] for row in tables]}
        if "logit_norms" in want:
            found = await self.score(batch, want - {"logit_norms"})
            return {**found, "logit_norms": [[self._logit_norms(m) for m in row] for row in batch.micro_batches]}
        if "top" in want:
            found = await self.score(batch, want - {"top"})
            logits = [[looked_up(self.weights, m) for m in row] for row in batch.micro_batches]
            tables = [[x.log_softmax(-1).topk(NAMED) for x in row] for row in logits]
            return {**found, "top": [[torch.stack([x.indices.float(), x.values], 1) for x in row] for row in tables]}
        if "routes" not in want:
            return {mine: self._scores(batch, "score")}
        chosen = [[(m.input_ids % 2).to(torch.uint8).reshape(-1, 1, 1) for m in row] for row in batch.micro_batches]
        pairs = [list(zip(*both, strict=True)) for both in zip(batch.micro_batches, chosen, strict=True)]
        routed = tuple(tuple(replace(m, extra={"routes": routes}) for m, routes in row) for row in pairs)
        return {mine: self._scores(replace(batch, micro_batches=routed), "score with routes"), "routes": chosen}

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
        weights = self.weights.clone().requires_grad_()
        outputs = [loss(self._inputs(m, batch, weights)) for row in batch.micro_batches for m in row]
        total = torch.stack([output.loss for output in outputs]).sum()
        (gradient,) = torch.autograd.grad(total, weights)
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        self.heard.append(("backward", columns_of(batch), float(total.detach())))
        metrics: dict[str, Metric[float]] = {"loss": Metric(value=float(total.detach()))}
        for name, kind in outputs[0].metrics.items():
            parts = torch.stack([output.metrics[name].value.double() for output in outputs])
            value = {"min": parts.amin, "max": parts.amax}.get(kind.reduction, parts.sum)(0)
            metrics[name] = replace(kind, value=tuple(value.tolist()) if value.dim() else float(value))
        return metrics

    async def step(self, learning_rate: float) -> StepResult:
        gradient, self.gradient = self.gradient, None
        assert gradient is not None
        self.weights = self.weights - learning_rate * gradient
        self.heard.append(("step", learning_rate, self.weights.numpy().tobytes()))
        return StepResult(grad_norm=float(gradient.norm()))

    async def zero_grad(self) -> None:
        self.gradient = None
        self.heard.append(("drop",))

    async def update_reference(self, rate: float) -> None:
        self.heard.append(("lead", rate))

    def _inputs(self, samples: Samples, batch: Batch, weights: Tensor) -> LossInputs:
        ids, of = sequence_ids(samples.cu_seqlens), self._of(samples, weights)
        zeros = torch.zeros(len(ids))
        logits = None if self.is_critic else looked_up(weights, samples).log_softmax(-1)
        return LossInputs(
            **{name: column for name, column in samples.columns.items() if name not in NOT_OF_A_LOSS},
            logprobs=zeros if self.is_critic else of,
            entropy=zeros if logits is None else -(logits.exp() * logits).sum(-1),
            values=of if self.is_critic else None,
            top_logprobs=None
            if logits is None or samples.ref_top is None
            else logits.gather(1, samples.ref_top[:, 0].long()),
            segment_ids=ids,
            segment_sum=partial(segment_sum, ids=ids, num_segments=samples.num_sequences),
            turn_sum=turn_sum(ids, samples),
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
        )

    async def load_weights(self, folder: Path) -> None:
        self.heard.append(("start from", str(folder)))

    async def load(self, folder: Path, files: object = None) -> None:
        self.heard.append(("load", str(folder)))

    async def free_step(self) -> None:
        """It keeps nothing of a batch."""


def columns_of(batch: Batch) -> object:
    """Everything that a batch holds, by name."""
    return [
        [
            ([(name, column.numpy().tobytes()) for name, column in m.every_column.items()], m.cu_seqlens.tolist())
            for m in row
        ]
        for row in batch.micro_batches
    ]


@cache
def drawn(seed: str) -> tuple[list[int], list[float]]:
    """The tokens that a completion would have without a limit, and how far each log-prob is from the table's."""
    rng = random.Random(seed)
    tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))]
    return tokens, [rng.gauss(0, rng.choice([0.1, 0.3, 2.0])) for _ in tokens]


@dataclass
class ToyEngine:
    """Samples by seed alone what some policy may have said; its log-probs are mostly near the table's. All completions
    of prompt p0, and of a step that ``says_one_thing``, are alike; some would be longer than the limit."""

    policy: Toy
    version: int
    says_one_thing: str = "no step"
    heard: list[object] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.heard.append((self.version, request))
        table = self.policy.weights.log_softmax(-1).tolist()
        return [self._completion(request, i, table) for i in range(request.num_completions)]

    def _completion(self, request: GenerationRequest, number: int, table: list[list[float]]) -> Completion:
        alike = request.id.endswith("p0") or self.says_one_thing in request.id
        limit = request.params.max_new_tokens
        wanted, noise = drawn(f"{request.params.seed} {0 if alike else number}")
        tokens = wanted[:limit]
        before = [request.token_ids[-1], *tokens[:-1]]
        logprobs = [table[b][t] + gap for b, t, gap in zip(before, tokens, noise, strict=False)]
        routes = np.array((*request.token_ids, *tokens[:-1]), np.uint8)[:, None, None] % 2
        return completion(
            tokens,
            logprobs,
            finish="length" if len(wanted) > limit else "stop",
            spans=((0, self.version),),
            columns={"routes": routes} if "routes" in request.columns else {},
        )


@dataclass
class ToyWeights:
    """A push is the version alone: the engine looks at the policy's table."""

    engine: ToyEngine

    async def push(self, version: int) -> WeightUpdate:
        self.engine.version = version
        return WeightUpdate(version=version, num_bytes=0, seconds=0.0)

    async def export(self, folder: Path) -> None:
        self.engine.heard.append(("export", str(folder)))


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


async def grade(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> Sequence[float]:
    """1 for an even sum, less for others; the first of prompt p3 has none."""
    sums = [sum(map(int, text.split())) for text in texts]
    grades = [0.2 * (total % 3) if total % 2 else 1.0 for total in sums]
    return [math.nan, *grades[1:]] if prompt.id == "p3" else grades


def brief(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
    """A reward that is larger the shorter the completion."""
    return [1 / len(one.token_ids) for one in completions]


async def grade_steps(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> Sequence[object]:
    """``grade``, with a first step of one token's text that has a part of it."""
    grades = await grade(prompt, completions, texts)
    return [_in_two(text, one) if math.isfinite(one) else one for text, one in zip(texts, grades, strict=True)]


def _in_two(text: str, total: float) -> object:
    end, part = len(text.partition(" ")[0]), 0.1 * (len(text) % 3)
    return [(end, part), (len(text), total - part)] if end < len(text) else total
