"""PolicyLoss against per-sequence float64 references written with Python loops and hand-derived gradients."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy, PolicyLoss
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.types import LossInputs, LossOutput
from tests.losses import local_sum, loss_inputs
from tests.reduction import joined, values
from tests.rows import changed, policy_loss

GARBAGE = [math.nan, math.inf, -math.inf, 1e30]
GSPO = policy_loss(
    ratio_level="sequence", objective="clip", aggregation="seq_mean_token_mean", clip_low=0.05, clip_high=0.1
)
GRPO = policy_loss(
    ratio_level="token", objective="clip", aggregation="seq_mean_token_mean", clip_low=0.2, clip_high=0.28
)
PPO = policy_loss(ratio_level="token", objective="clip", aggregation="token_mean")
SUMS = policy_loss(ratio_level="token", objective="clip", aggregation="seq_mean_token_sum")
CISPO = policy_loss(ratio_level="token", objective="cispo", aggregation="token_mean", cap_low=0.5, cap_high=2.0)
REINFORCE = policy_loss(objective="reinforce", aggregation="token_mean")
DUAL = policy_loss(aggregation="seq_mean_token_sum_norm", max_new_tokens=7, dual_clip=3.0)
UNCLIPPED = policy_loss(objective="importance", aggregation="token_mean")
SAPO = policy_loss(objective="sapo", aggregation="seq_mean_token_mean", tau_negative=1.5)
TOPR = policy_loss(objective="topr", ratio_level="sequence_sum", aggregation="seq_mean_token_sum", cap_high=1.0)
VESPO = policy_loss(objective="vespo", ratio_level="sequence_sum", shape_negative=2.5, rate_positive=1.5)
CISPO_BY_SEQUENCE = policy_loss(objective="cispo", ratio_level="sequence", aggregation="token_mean", cap_high=1.1)
ROWS = [DUAL, UNCLIPPED, SAPO, TOPR, VESPO, CISPO_BY_SEQUENCE, GSPO, GRPO, PPO, SUMS, CISPO, REINFORCE]
CORRECTED = changed(
    GSPO, correction={"level": "sequence", "mode": "mask", "high": 1.0, "veto": 0.98, "off_policy_delta": 0.5}
)
pytestmark = pytest.mark.filterwarnings("error")


@dataclass(frozen=True)
class Token:
    logprob: float
    old: float
    rollout: float
    entropy: float
    advantage: float
    kept: bool


Sequences = list[list[Token]]


def draw(seed: int, lengths: Sequence[int], scale: float) -> Sequences:
    """Random sequences, a quarter of the tokens masked out and full of garbage; advantages are one per sequence."""
    rng = random.Random(seed)
    out: Sequences = []
    for length in lengths:
        advantage = rng.choice([0.0, 1.0, -1.0, rng.gauss(0, 1)])
        tokens = []
        for _ in range(length):
            old = -rng.expovariate(1.0)
            if rng.random() < 0.25:
                bad = [rng.choice(GARBAGE) for _ in range(5)]
                tokens.append(Token(bad[0], bad[1], bad[2], bad[3], bad[4], kept=False))
            else:
                token = Token(
                    old + scale * rng.gauss(0, 1), old, old + 0.01 * rng.gauss(0, 1), rng.random(), advantage, True
                )
                tokens.append(token)
        out.append(tokens)
    return out


def tensors(sequences: Sequences, *, num_tokens: int | None = None, num_sequences: int | None = None) -> LossInputs:
    flat = [token for tokens in sequences for token in tokens]

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(token, name) for token in flat], dtype=torch.float64)

    return loss_inputs(
        [len(tokens) for tokens in sequences],
        [token.kept for token in flat],
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        logprobs=column("logprob").requires_grad_(),
        entropy=column("entropy"),
        old_logprobs=column("old"),
        rollout_logprobs=column("rollout"),
        advantages=column("advantage"),
    )


def evaluate(loss: Callable[[LossInputs], LossOutput], inputs: LossInputs) -> tuple[LossOutput, Tensor]:
    output = loss(inputs)
    output.loss.backward()
    assert inputs.logprobs.grad is not None
    return output, inputs.logprobs.grad


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def token_term(row: AlgorithmSection, logprob: float, delta: float, advantage: float) -> tuple[float, float, bool]:
    """Loss of one token (or, for a sequence ratio, of the sequence), its derivative, and whether a limit acted."""
    ratio = math.exp(clamp(delta, -20, 20))
    if row.objective == "reinforce":
        return -advantage * logprob, -advantage, False
    slope = ratio if abs(delta) <= 20 else 0.0
    if row.objective == "importance":
        return -ratio * advantage, -slope * advantage, False
    if row.objective == "sapo":
        tau = row.tau_positive if advantage > 0 else row.tau_negative
        gate = (1 + math.tanh(tau * (ratio - 1) / 2)) / 2  # the logistic function
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * slope * advantage, False
    if row.objective == "vespo":
        good = advantage > 0
        shape, rate = (row.shape_positive, row.rate_positive) if good else (row.shape_negative, row.rate_negative)
        weight = ratio**shape * math.exp(rate * (1 - ratio))
        return -weight * advantage * logprob, -weight * advantage, False
    if row.objective == "topr" and advantage >= 0:
        return -advantage * logprob, -advantage, False
    if row.objective in ("cispo", "topr"):
        capped = clamp(ratio, row.cap_low, row.cap_high)
        return -capped * advantage * logprob, -capped * advantage, capped != ratio and advantage != 0
    clipped = clamp(ratio, 1 - row.clip_low, 1 + row.clip_high)
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, 0.0, True
    if advantage < 0 and row.dual_clip is not None and -ratio * advantage > -row.dual_clip * advantage:
        return -row.dual_clip * advantage, 0.0, True
    return -ratio * advantage, -slope * advantage, False


def reference(row: AlgorithmSection, sequences: Sequences) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient of every position (0 where masked out), clip fraction and mean ratio, one sequence at a time."""
    num_tokens = max(sum(token.kept for tokens in sequences for token in tokens), 1)
    loss, clipped, ratio_sum = 0.0, 0.0, 0.0
    gradient: list[float] = []
    for tokens in sequences:
        kept = [token for token in tokens if token.kept]
        total = sum(token.logprob - token.old for token in kept)
        delta = {"token": math.nan, "sequence": total / max(len(kept), 1), "sequence_sum": total}[row.ratio_level]
        of_ratio = 1 / num_tokens if row.ratio_level == "token" else 1 / max(len(kept), 1) / len(sequences)
        if row is GSPO.row:  # its paper's form: one term a sequence, whose derivative each token shares
            value, slope, limited = token_term(row, math.nan, delta, kept[0].advantage) if kept else (0.0, 0.0, False)
            loss += value / len(sequences)
            gradient += [slope / len(kept) / len(sequences) if token.kept else 0.0 for token in tokens]
            clipped += limited / len(sequences)
            ratio_sum += bool(kept) * math.exp(clamp(delta, -20, 20)) / len(sequences)
            continue
        weight = {
            "token_mean": 1 / num_tokens,
            "seq_mean_token_mean": 1 / max(len(kept), 1) / len(sequences),
            "seq_mean_token_sum": 1 / len(sequences),
            "seq_mean_token_sum_norm": 1 / len(sequences) / 7,
        }[row.aggregation]
        for token in tokens:
            if not token.kept:
                gradient.append(0.0)
                continue
            own = token.logprob - token.old if row.ratio_level == "token" else delta
            value, slope, limited = token_term(row, token.logprob, own, token.advantage)
            loss += weight * value
            clipped += limited * of_ratio
            ratio_sum += math.exp(clamp(own, -20, 20)) * of_ratio
            gradient.append(weight * slope)
    return loss, gradient, {"clip_fraction": clipped, "ratio/mean": ratio_sum}


def close(actual: Tensor, expected: object, *, tolerance: float = 1e-9) -> None:
    wanted = expected.detach() if isinstance(expected, Tensor) else torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach(), wanted, rtol=tolerance, atol=tolerance)


seeds = st.integers(0, 2**32)
ragged = st.lists(st.integers(0, 7), min_size=1, max_size=6)
scales = st.sampled_from([0.0, 0.05, 1.0, 1e4])
every_row = pytest.mark.parametrize(
    "loss", ROWS, ids=lambda loss: f"{loss.row.ratio_level}-{loss.row.objective}-{loss.row.aggregation}"
)
every_row_and_a_correction = pytest.mark.parametrize("loss", [*ROWS, CORRECTED])
quick = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@every_row
@quick
@given(seed=seeds, lengths=ragged, scale=scales)
def test_value_gradient_and_fractions_equal_the_written_out_reference(
    loss: PolicyLoss, seed: int, lengths: list[int], scale: float
) -> None:
    sequences = draw(seed, lengths, scale)
    output, gradient = evaluate(loss, tensors(sequences))
    value, expected, means = reference(loss.row, sequences)
    close(output.loss, value)
    close(gradient, expected)
    assert torch.isfinite(gradient).all()
    for name, mean in means.items():
        close(output.metrics[name].value, mean)


@every_row
@quick
@given(seed=seeds, lengths=ragged, scale=scales)
def test_metrics_equal_plain_means_and_extremes(loss: PolicyLoss, seed: int, lengths: list[int], scale: float) -> None:
    sequences = draw(seed, lengths, scale)
    kept = [token for tokens in sequences for token in tokens if token.kept]
    output = loss(tensors(sequences))
    num = max(len(kept), 1)
    close(output.metrics["entropy"].value, sum(t.entropy for t in kept) / num)
    deltas = [clamp(t.logprob - t.old, -20, 20) for t in kept]
    close(output.metrics["kl/old_policy"].value, sum(math.exp(d) - d - 1 for d in deltas) / num)
    if loss.row.ratio_level == "token":
        close(output.metrics["ratio/min"].value, min((math.exp(d) for d in deltas), default=math.inf))
        close(output.metrics["ratio/max"].value, max((math.exp(d) for d in deltas), default=-math.inf))
        close(output.metrics["ratio/clamped_fraction"].value, sum(abs(t.logprob - t.old) > 20 for t in kept) / num)
    assert not any(value.requires_grad for value in values(output).values())


@every_row_and_a_correction
@quick
@given(seed=seeds, lengths=ragged, scale=scales)
def test_order_of_sequences_does_not_matter(loss: PolicyLoss, seed: int, lengths: list[int], scale: float) -> None:
    sequences = draw(seed, lengths, scale)
    order = list(range(len(sequences)))
    random.Random(seed).shuffle(order)
    whole, gradient = evaluate(loss, tensors(sequences))
    shuffled, moved = evaluate(loss, tensors([sequences[s] for s in order]))
    close(shuffled.loss, whole.loss)
    parts = gradient.split([len(tokens) for tokens in sequences])
    close(moved, torch.cat([parts[s] for s in order]))


@every_row_and_a_correction
@quick
@given(seed=seeds, lengths=ragged, scale=scales, cuts=st.integers(2, 4))
def test_shares_of_micro_batches_add_up(
    loss: PolicyLoss, seed: int, lengths: list[int], scale: float, cuts: int
) -> None:
    """The same holds for data-parallel ranks: a share knows only the global denominators."""
    sequences = draw(seed, lengths, scale)
    whole, gradient = evaluate(loss, tensors(sequences))
    num_tokens = sum(token.kept for tokens in sequences for token in tokens)
    owners = [random.Random(seed + s).randrange(cuts) for s in range(len(sequences))]
    shares, pieces = [], {}
    for owner in range(cuts):
        mine = [s for s in range(len(sequences)) if owners[s] == owner]
        inputs = tensors([sequences[s] for s in mine], num_tokens=num_tokens, num_sequences=len(sequences))
        output, piece = evaluate(loss, inputs)
        shares.append(output)
        pieces.update(zip(mine, piece.split([len(sequences[s]) for s in mine]), strict=True))
    close(sum((share.loss for share in shares), torch.zeros(())), whole.loss)
    close(torch.cat([pieces[s] for s in range(len(sequences))]), gradient)
    for name, value in joined(shares).items():
        close(value, values(whole)[name])


class TwoRanks:
    """An all-reduce of two threads that stand for two context-parallel ranks; a missing call breaks the barrier."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.slots: list[Tensor] = [torch.zeros(()), torch.zeros(())]

    def all_reduced(self, rank: int, local: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def segment_sum(values: Tensor) -> Tensor:
            self.slots[rank] = local(values)
            self.barrier.wait()
            total = self.slots[0] + self.slots[1]
            self.barrier.wait()
            return total

        return segment_sum


@every_row_and_a_correction
@settings(parent=quick, max_examples=10)
@given(seed=seeds, lengths=ragged, scale=scales)
def test_a_context_parallel_split_changes_only_segment_sum(
    loss: PolicyLoss, seed: int, lengths: list[int], scale: float
) -> None:
    whole_inputs = tensors(draw(seed, lengths, scale))
    whole, gradient = evaluate(loss, whole_inputs)
    ranks, halves = TwoRanks(), [slice(0, None, 2), slice(1, None, 2)]
    results: list[tuple[LossOutput, Tensor] | None] = [None, None]

    def run(rank: int) -> None:
        half = halves[rank]
        ids = whole_inputs.segment_ids[half]
        inputs = replace(
            whole_inputs,
            logprobs=whole_inputs.logprobs.detach()[half].clone().requires_grad_(),
            entropy=whole_inputs.entropy[half],
            old_logprobs=whole_inputs.old_logprobs[half],
            rollout_logprobs=whole_inputs.rollout_logprobs[half],
            advantages=whole_inputs.advantages[half],
            mask=whole_inputs.mask[half],
            segment_ids=ids,
            segment_sum=ranks.all_reduced(rank, local_sum(ids, len(lengths))),
        )
        results[rank] = evaluate(loss, inputs)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = results
    assert first is not None
    assert second is not None
    close(first[0].loss + second[0].loss, whole.loss)
    both = torch.empty_like(gradient)
    both[halves[0]], both[halves[1]] = first[1], second[1]
    close(both, gradient)
    for name, value in joined([first[0], second[0]]).items():
        close(value, values(whole)[name])


@pytest.mark.parametrize("loss", [*ROWS, CrossEntropy()])
@quick
@given(seed=seeds, lengths=ragged)
def test_garbage_outside_the_mask_changes_nothing(
    loss: Callable[[LossInputs], LossOutput], seed: int, lengths: list[int]
) -> None:
    dirty = draw(seed, lengths, 0.1)
    clean = [[t if t.kept else Token(-1.0, -1.0, -1.0, 0.5, 0.3, False) for t in tokens] for tokens in dirty]
    (a, gradient_a), (b, gradient_b) = evaluate(loss, tensors(dirty)), evaluate(loss, tensors(clean))
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(gradient_a, gradient_b)
    assert all(torch.equal(value, values(b)[name]) for name, value in values(a).items())


@settings(parent=quick, max_examples=50)
@given(seeds, ragged)
def test_float32_stays_finite_at_extreme_ratios(seed: int, lengths: list[int]) -> None:
    exact = tensors(draw(seed, lengths, 1e4))
    floats = {
        name: getattr(exact, name).detach().float()
        for name in ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "advantages")
    }
    for loss in ROWS:
        inputs = replace(exact, **{**floats, "logprobs": floats["logprobs"].clone().requires_grad_()})
        output, gradient = evaluate(loss, inputs)
        assert output.loss.dtype == torch.float32
        assert torch.isfinite(output.loss)
        assert torch.isfinite(gradient).all()
        assert all(torch.isfinite(value) for value in values(output, "mean").values())
