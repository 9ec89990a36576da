"""Losses against float64 references in Python loops with hand-derived gradients: objectives, terms, critic, pairs."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_megatron.algorithms.auxiliary import ValueLoss
from rl_megatron.algorithms.losses import CrossEntropy, PolicyLoss
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.types import Loss, LossInputs, LossOutput
from tests.rows import changed, pair_loss, policy_loss
from tests.samples import joined, local_sum, loss_inputs, values

GARBAGE = [math.nan, math.inf, -math.inf, 1e30]
ESTIMATORS = ["k1", "k2", "k3", "abs"]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
LENGTH_NORM = 7
LEARNED = ("logprobs", "entropy", "values")
EVERY_TERM = policy_loss(
    aggregation="seq_mean_token_mean",
    kl_coefficient=0.3,
    entropy_coefficient=0.2,
    correction={"mode": "truncate", "level": "sequence", "high": 1.1},
)
SEQUENCES = {"ratio_level": "sequence", "aggregation": "seq_mean_token_mean", "clip_low": 0.05}
GSPO = policy_loss(**SEQUENCES, kl_coefficient=0.3, kl={"estimator": "k2", "importance_weighted": False})
ORPO = pair_loss(0.3, loss="orpo", per_token=True, reference_free=True, nll=1.0, label_smoothing=0.1)
SEQUENCE_CLIP = policy_loss(**SEQUENCES, clip_high=0.1)
CLIP = policy_loss(aggregation="seq_mean_token_mean", clip_low=0.2, clip_high=0.28)
PPO = policy_loss(ratio_level="token", objective="clip", aggregation="token_mean")
SUMS = policy_loss(ratio_level="token", objective="clip", aggregation="seq_mean_token_sum")
CISPO = policy_loss(ratio_level="token", objective="cispo", aggregation="token_mean", cap_low=0.5, cap_high=2.0)
REINFORCE = policy_loss(objective="reinforce", aggregation="token_mean")
DUAL = policy_loss(aggregation="seq_mean_token_sum_norm", max_new_tokens=7, dual_clip=3.0)
UNCLIPPED = policy_loss(objective="importance", aggregation="token_mean")
SAPO = policy_loss(objective="sapo", aggregation="seq_mean_token_mean", parameters={"tau_negative": 1.5})
TOPR = policy_loss(objective="topr", ratio_level="sequence_sum", aggregation="seq_mean_token_sum", cap_high=1.0)
VESPO = policy_loss(
    objective="vespo", ratio_level="sequence_sum", parameters={"shape_negative": 2.5, "rate_positive": 1.5}
)
CISPO_BY_SEQUENCE = policy_loss(objective="cispo", ratio_level="sequence", aggregation="token_mean", cap_high=1.1)
ROWS = [DUAL, UNCLIPPED, SAPO, TOPR, VESPO, CISPO_BY_SEQUENCE, SEQUENCE_CLIP, CLIP, PPO, SUMS, CISPO, REINFORCE]
CORRECTED = changed(
    SEQUENCE_CLIP, correction={"level": "sequence", "mode": "mask", "high": 1.0, "veto": 0.85, "off_policy_delta": 0.5}
)
MORE = [policy_loss(objective=f"dppo_{kind}", clip_low=0.12, clip_high=0.2, cap_high=1.6) for kind in ("tv", "kl")]
MORE.append(policy_loss(objective="gmpo", aggregation="seq_mean_token_mean", clip_low=0.3, clip_high=0.5))
LOSSES: list[Loss] = [EVERY_TERM, GSPO, ValueLoss(clip=0.2), pair_loss(0.7), ORPO, CrossEntropy()]
pytestmark = pytest.mark.filterwarnings("error")


@dataclass(frozen=True)
class Token:
    logprobs: float
    entropy: float
    old_logprobs: float
    rollout_logprobs: float
    ref_logprobs: float
    advantages: float
    values: float
    old_values: float
    returns: float
    proximal_share: float
    nll_weights: float
    mask: bool


Sequences = list[list[Token]]
COLUMNS = [f.name for f in fields(Token) if f.name != "mask"]


def draw(seed: int, lengths: Sequence[int], scale: float) -> Sequences:
    """A quarter of the tokens is masked out and holds garbage in every column."""
    rng = random.Random(seed)
    out: Sequences = []
    for length in lengths:
        advantage, marked = rng.choice([0.0, 1.0, -1.0, rng.gauss(0, 1)]), rng.random() < 0.5
        tokens = []
        for _ in range(length):
            old, value = -rng.expovariate(1.0), rng.gauss(0, 1)
            kept = Token(
                logprobs=old + scale * rng.gauss(0, 1),
                entropy=rng.random(),
                old_logprobs=old,
                rollout_logprobs=old + 0.1 * rng.gauss(0, 1),
                ref_logprobs=old + scale * rng.gauss(0, 1),
                advantages=advantage,
                values=value,
                old_values=value + rng.gauss(0, 0.3),
                returns=rng.gauss(0, 1),
                proximal_share=rng.choice([0.0, 1.0, rng.random()]),
                nll_weights=0.1 * marked,
                mask=True,
            )
            bad = {name: rng.choice(GARBAGE) for name in COLUMNS}
            tokens.append(kept if rng.random() < 0.75 else Token(**bad, mask=False))
        out.append(tokens)
    return out


def inputs_of(
    sequences: Sequences, *, num_tokens: int | None = None, num_sequences: int | None = None, proximal: bool = False
) -> LossInputs:
    flat = [token for tokens in sequences for token in tokens]
    columns = {
        name: torch.tensor([getattr(token, name) for token in flat], dtype=torch.float64).requires_grad_(
            name in LEARNED
        )
        for name in COLUMNS
        if proximal or name != "proximal_share"
    }
    return loss_inputs(
        [len(tokens) for tokens in sequences],
        [token.mask for token in flat],
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        **columns,
    )


def plain_inputs(sequences: Sequences) -> LossInputs:
    """Without the NLL's weights, which no objective reads."""
    return replace(inputs_of(sequences), nll_weights=None)


def gradients(loss: Loss, inputs: LossInputs) -> tuple[LossOutput, dict[str, Tensor]]:
    """The output and the gradient of each learned column, zeros where it has none."""
    output, learned = loss(inputs), [getattr(inputs, name) for name in LEARNED]
    found = torch.autograd.grad(output.loss, learned, allow_unused=True)
    return output, {
        name: torch.zeros_like(x) if grad is None else grad
        for name, x, grad in zip(LEARNED, learned, found, strict=True)
    }


def close(actual: Tensor, expected: object) -> None:
    wanted = expected.detach() if isinstance(expected, Tensor) else torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach(), wanted, rtol=1e-9, atol=1e-9)


def clamp(value: float, bound: float = 20.0) -> float:
    return min(max(value, -bound), bound)


def weight_of(aggregation: str, kept: int, num_tokens: int, num_sequences: int) -> float:
    return {
        "token_mean": 1 / max(num_tokens, 1),
        "seq_mean_token_mean": 1 / max(kept, 1) / num_sequences,
        "seq_mean_token_sum": 1 / num_sequences,
        "seq_mean_token_sum_norm": 1 / num_sequences / LENGTH_NORM,
    }[aggregation]


def estimate(name: str, d: float) -> tuple[float, float]:
    """Of KL(pi‖ref) at a token with d = log ref - log pi: value, and slope in log pi."""
    bounded = clamp(d)
    return {
        "k1": (-d, 1.0),
        "k2": (d * d / 2, -d),
        "k3": (math.exp(bounded) - bounded - 1, (1 - math.exp(bounded)) * (abs(d) <= 20)),
        "abs": (abs(d), -math.copysign(1.0, d) if d else 0.0),
    }[name]


def token_term(row: AlgorithmSection, logprob: float, delta: float, advantage: float) -> tuple[float, float, bool]:
    """Loss of one token (or, for a sequence ratio, of the sequence), its derivative, and whether a limit acted."""
    ratio = math.exp(clamp(delta))
    if row.objective == "reinforce":
        return -advantage * logprob, -advantage, False
    slope = ratio if abs(delta) <= 20 else 0.0
    if row.objective == "importance":
        return -ratio * advantage, -slope * advantage, False
    if row.objective == "sapo":
        tau = row.parameters["tau_positive" if advantage > 0 else "tau_negative"]
        gate = (1 + math.tanh(tau * (ratio - 1) / 2)) / 2  # the logistic function
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * slope * advantage, False
    if row.objective == "vespo":
        good, numbers = advantage > 0, row.parameters
        shape = numbers["shape_positive" if good else "shape_negative"]
        weight = ratio**shape * math.exp(numbers["rate_positive" if good else "rate_negative"] * (1 - ratio))
        return -weight * advantage * logprob, -weight * advantage, False
    if row.objective == "topr" and advantage >= 0:
        return -advantage * logprob, -advantage, False
    if row.objective in ("cispo", "topr"):
        capped = min(max(ratio, row.cap_low), row.cap_high)
        return -capped * advantage * logprob, -capped * advantage, capped != ratio and advantage != 0
    clipped = min(max(ratio, 1 - row.clip_low), 1 + row.clip_high)
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, 0.0, True
    if advantage < 0 and row.dual_clip is not None and -ratio * advantage > -row.dual_clip * advantage:
        return -row.dual_clip * advantage, 0.0, True
    return -ratio * advantage, -slope * advantage, False


def reference(row: AlgorithmSection, sequences: Sequences) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient of every position (0 where masked out), clip fraction and mean ratio, one sequence at a time."""
    num_tokens = max(sum(token.mask for tokens in sequences for token in tokens), 1)
    loss, clipped, ratio_sum = 0.0, 0.0, 0.0
    gradient: list[float] = []
    for tokens in sequences:
        kept = [token for token in tokens if token.mask]
        total = sum(token.logprobs - token.old_logprobs for token in kept)
        delta = {"token": math.nan, "sequence": total / max(len(kept), 1), "sequence_sum": total}[row.ratio_level]
        of_ratio = 1 / num_tokens if row.ratio_level == "token" else 1 / max(len(kept), 1) / len(sequences)
        if row is SEQUENCE_CLIP.row:  # its paper's form: one term a sequence, whose derivative each token shares
            value, slope, limited = token_term(row, math.nan, delta, kept[0].advantages) if kept else (0.0, 0.0, False)
            loss += value / len(sequences)
            gradient += [slope / len(kept) / len(sequences) if token.mask else 0.0 for token in tokens]
            clipped += limited / len(sequences)
            ratio_sum += bool(kept) * math.exp(clamp(delta)) / len(sequences)
            continue
        weight = weight_of(row.aggregation, len(kept), num_tokens, len(sequences))
        for token in tokens:
            if not token.mask:
                gradient.append(0.0)
                continue
            own = token.logprobs - token.old_logprobs if row.ratio_level == "token" else delta
            value, slope, limited = token_term(row, token.logprobs, own, token.advantages)
            loss += weight * value
            clipped += limited * of_ratio
            ratio_sum += math.exp(clamp(own)) * of_ratio
            gradient.append(weight * slope)
    return loss, gradient, {"clip_fraction": clipped, "ratio/mean": ratio_sum}


seeds = st.integers(0, 2**32)
ragged = st.lists(st.integers(0, 6), min_size=1, max_size=5)
scales = st.sampled_from([0.0, 0.05, 1.0, 1e4])
quick = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
every_row = pytest.mark.parametrize(
    "loss", ROWS, ids=lambda loss: f"{loss.row.ratio_level}-{loss.row.objective}-{loss.row.aggregation}"
)


@every_row
@quick
@given(seed=seeds, lengths=ragged, scale=scales)
def test_objectives_equal_written_out_references(loss: PolicyLoss, seed: int, lengths: list[int], scale: float) -> None:
    sequences = draw(seed, lengths, scale)
    output, grads = gradients(loss, plain_inputs(sequences))
    value, expected, means = reference(loss.row, sequences)
    close(output.loss, value)
    close(grads["logprobs"], expected)
    assert torch.isfinite(grads["logprobs"]).all()
    for name, mean in means.items():
        close(output.metrics[name].value, mean)


@every_row
@quick
@given(seed=seeds, lengths=ragged, scale=scales)
def test_metrics_equal_plain_means_and_extremes(loss: PolicyLoss, seed: int, lengths: list[int], scale: float) -> None:
    sequences = draw(seed, lengths, scale)
    kept = [token for tokens in sequences for token in tokens if token.mask]
    output, num = loss(plain_inputs(sequences)), max(len(kept), 1)
    close(output.metrics["entropy"].value, sum(t.entropy for t in kept) / num)
    deltas = [clamp(t.logprobs - t.old_logprobs) for t in kept]
    close(output.metrics["kl/old_policy"].value, sum(math.exp(d) - d - 1 for d in deltas) / num)
    if loss.row.ratio_level == "token":
        close(output.metrics["ratio/max"].value, max((math.exp(d) for d in deltas), default=-math.inf))
    assert not any(value.requires_grad for value in values(output).values())


@settings(parent=quick, max_examples=50)
@given(seeds, ragged)
def test_float32_stays_finite_at_extreme_ratios(seed: int, lengths: list[int]) -> None:
    exact = plain_inputs(draw(seed, lengths, 1e4))
    floats = {name: getattr(exact, name).detach().float() for name in COLUMNS if getattr(exact, name) is not None}
    for loss in ROWS:
        learned = {name: floats[name].clone().requires_grad_() for name in LEARNED}
        output, grads = gradients(loss, replace(exact, **{**floats, **learned}))
        assert output.loss.dtype == torch.float32
        assert torch.isfinite(output.loss)
        assert torch.isfinite(grads["logprobs"]).all()
        assert all(torch.isfinite(value) for value in values(output, "mean").values())


@pytest.mark.parametrize("loss", MORE[:2], ids=["tv", "kl"])
def test_dppo_leaves_a_token_alone_beyond_its_limit_in_the_direction_of_its_advantage(loss: PolicyLoss) -> None:
    """Also at an advantage of 0, which no limit acts on, at a certain token and at one that was impossible."""
    zero, far = 0.0, math.log(0.1)
    rows = [(far, -0.1, 1.0), (-0.1, far, 1.0), (far, -0.1, -1.0), (-0.1, far, -1.0), (far, -0.1, 0.0)]
    rows += [(-0.1, far, 0.0), (zero, zero, 1.0), (zero, -60.0, -1.0), (-60.0, zero, 1.0), (-60.0, -60.0, 0.0)]
    old, new, advantages = torch.tensor(rows, dtype=torch.float64).T
    base = plain_inputs([[Token(**dict.fromkeys(COLUMNS, 0.25), mask=True)] * len(rows)])
    columns = {"old_logprobs": old, "logprobs": new.clone().requires_grad_(), "advantages": advantages}
    output, grads = gradients(loss, replace(base, **columns))
    assert (grads["logprobs"] != 0).tolist() == [False, True, True, False, False, False, True, False, False, False]
    assert torch.isfinite(output.loss)
    close(output.metrics["clip_fraction"].value, 5 / len(rows))


@pytest.mark.parametrize(("estimator", "aggregation"), list(product(ESTIMATORS, AGGREGATIONS)))
@quick
@given(seed=seeds, lengths=ragged, scale=scales, weighted=st.booleans())
def test_kl_entropy_and_nll_stand_beside_the_objective(
    estimator: str, aggregation: str, seed: int, lengths: list[int], scale: float, weighted: bool
) -> None:
    beta, bonus = 0.3, 0.2
    loss = policy_loss(
        objective="reinforce",
        aggregation=aggregation,
        max_new_tokens=LENGTH_NORM,
        kl_coefficient=beta,
        kl={"estimator": estimator, "importance_weighted": weighted},
        entropy_coefficient=bonus,
    )
    sequences = draw(seed, lengths, scale)
    num_tokens = sum(token.mask for tokens in sequences for token in tokens)
    total = kl_part = nll_part = 0.0
    by_logprob, by_entropy = [], []
    for tokens in sequences:
        weight = weight_of(aggregation, sum(t.mask for t in tokens), num_tokens, len(sequences))
        for t in tokens:
            if not t.mask:
                by_logprob.append(0.0)
                by_entropy.append(0.0)
                continue
            value, slope = estimate(estimator, t.ref_logprobs - t.logprobs)
            if weighted:
                log_ratio = t.logprobs - t.rollout_logprobs
                ratio, own = math.exp(clamp(log_ratio)), estimator != "k2" and abs(log_ratio) <= 20
                value, slope = value * ratio, slope * ratio + value * ratio * own
            kl_part += beta * weight * value
            nll_part -= t.nll_weights * t.logprobs
            total -= weight * (t.advantages * t.logprobs + bonus * t.entropy)
            by_logprob.append(weight * (beta * slope - t.advantages) - t.nll_weights)
            by_entropy.append(-bonus * weight)
    output, grads = gradients(loss, inputs_of(sequences))
    close(output.loss, total + kl_part + nll_part)
    close(grads["logprobs"], by_logprob)
    close(grads["entropy"], by_entropy)
    close(output.metrics["loss/kl"].value, kl_part)
    close(output.metrics["loss/nll"].value, nll_part)


@quick
@given(seed=seeds, lengths=ragged, scale=st.sampled_from([0.05, 1.0]))
def test_a_proximal_share_puts_the_old_policy_between_two_others(seed: int, lengths: list[int], scale: float) -> None:
    """Ratio (pi/pi_rollout)^(1 - share), clipped, times the behavior weight (pi/pi_rollout)^share, at most 5."""
    sequences = draw(seed, lengths, scale)
    num_tokens = max(sum(token.mask for tokens in sequences for token in tokens), 1)
    total, slopes = 0.0, []
    for t in (token for tokens in sequences for token in tokens):
        if not t.mask:
            slopes.append(0.0)
            continue
        gap = t.logprobs - t.rollout_logprobs
        ratio, behavior = math.exp((1 - t.proximal_share) * gap), min(math.exp(t.proximal_share * gap), 5.0)
        clipped = min(max(ratio, 0.8), 1.2)
        free = ratio * t.advantages <= clipped * t.advantages
        total -= behavior * min(ratio * t.advantages, clipped * t.advantages) / num_tokens
        slopes.append(-behavior * ratio * t.advantages / num_tokens if free else 0.0)
    x = replace(inputs_of(sequences, proximal=True), nll_weights=None)
    output, grads = gradients(policy_loss(correction={"mode": "truncate", "high": 5.0}), x)
    close(output.loss, total)
    close(grads["logprobs"], slopes)


@quick
@given(seed=seeds, lengths=ragged, clip=st.sampled_from([0.05, 0.3, math.inf]))
def test_the_critics_loss(seed: int, lengths: list[int], clip: float) -> None:
    sequences = draw(seed, lengths, 0.1)
    num_tokens = max(sum(token.mask for tokens in sequences for token in tokens), 1)
    total = clipped_share = mean = 0.0
    slopes = []
    for t in (token for tokens in sequences for token in tokens):
        if not t.mask:
            slopes.append(0.0)
            continue
        bounded = min(max(t.values, t.old_values - clip), t.old_values + clip)
        free, limited = (t.values - t.returns) ** 2, (bounded - t.returns) ** 2
        total += max(free, limited) / 2 / num_tokens
        clipped_share += (limited > free) / num_tokens
        mean += t.values / num_tokens
        slopes.append(0.0 if limited > free else (t.values - t.returns) / num_tokens)
    output, grads = gradients(ValueLoss(clip=clip), inputs_of(sequences))
    close(output.loss, total)
    close(grads["values"], slopes)
    close(output.metrics["critic/clip_fraction"].value, clipped_share)
    close(output.metrics["critic/value_mean"].value, mean)


@quick
@given(seed=seeds, lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7), scale=st.sampled_from([0.0, 0.3, 30.0]))
def test_dpo(seed: int, lengths: list[int], scale: float) -> None:
    """A pair with an empty side, and an odd sequence at the end, are padding."""
    beta, sequences = 0.7, draw(seed, lengths, scale)
    slopes = [0.0] * sum(lengths)
    starts = [sum(lengths[:s]) for s in range(len(lengths))]
    num_pairs = max(len(lengths) // 2, 1)
    total = right = 0.0
    for s in range(0, len(lengths) - 1, 2):
        sides = [[t.logprobs - t.ref_logprobs for t in tokens if t.mask] for tokens in sequences[s : s + 2]]
        if not all(sides):
            continue
        margin = beta * (sum(sides[0]) - sum(sides[1]))
        total += (math.log1p(math.exp(-abs(margin))) + max(-margin, 0.0)) / num_pairs
        right += (margin > 0) / num_pairs
        slope = beta / (1 + math.exp(min(margin, 700.0))) / num_pairs
        for which, sign in ((s, -1), (s + 1, 1)):
            for i, t in enumerate(sequences[which]):
                slopes[starts[which] + i] = sign * slope * t.mask
    output, grads = gradients(pair_loss(beta), inputs_of(sequences, num_sequences=2 * num_pairs))
    close(output.loss, total)
    close(grads["logprobs"], slopes)
    close(output.metrics["preference/accuracy"].value, right)


CASES = [*product(LOSSES, (False, True)), *((loss, False) for loss in [*ROWS, CORRECTED, *MORE])]
every_loss = pytest.mark.parametrize(("loss", "proximal"), CASES)
pairs = st.lists(st.integers(0, 6), min_size=2, max_size=6).map(lambda lengths: lengths[: len(lengths) // 2 * 2])


def assert_adds_up(shares: Sequence[LossOutput], whole: LossOutput) -> None:
    close(torch.stack([share.loss for share in shares]).sum(), whole.loss)
    torch.testing.assert_close(joined(shares), values(whole), rtol=1e-9, atol=1e-9)


@every_loss
@quick
@given(seed=seeds, lengths=pairs, scale=scales, cuts=st.integers(2, 3))
def test_cuts_add_up(loss: Loss, proximal: bool, seed: int, lengths: list[int], scale: float, cuts: int) -> None:
    """Pairs move together. A share knows the global denominators alone, as a data-parallel rank does."""
    sequences = draw(seed, lengths, scale)
    x = inputs_of(sequences, proximal=proximal)
    whole, grads = gradients(loss, x)
    rng, order = random.Random(seed), list(range(len(lengths) // 2))
    rng.shuffle(order)
    owners = [[p for p in order if p % cuts == owner] for owner in range(cuts)]
    shares, pieces = [], dict[str, dict[int, Tensor]]({name: {} for name in LEARNED})
    for mine in owners:
        chosen = [s for p in mine for s in (2 * p, 2 * p + 1)]
        part = inputs_of(
            [sequences[s] for s in chosen], num_tokens=x.num_tokens, num_sequences=x.num_sequences, proximal=proximal
        )
        output, piece = gradients(loss, part)
        shares.append(output)
        for name in LEARNED:
            pieces[name].update(zip(chosen, piece[name].split([lengths[s] for s in chosen]), strict=True))
    assert_adds_up(shares, whole)
    for name in LEARNED:
        close(torch.cat([pieces[name][s] for s in range(len(lengths))]), grads[name])


@every_loss
@settings(parent=quick, max_examples=8)
@given(seed=seeds, lengths=pairs, scale=scales)
def test_context_parallel_ranks_add_up(loss: Loss, proximal: bool, seed: int, lengths: list[int], scale: float) -> None:
    """Two threads stand for two ranks that hold every other token; a missing call breaks the barrier."""
    x = inputs_of(draw(seed, lengths, scale), proximal=proximal)
    whole, grads = gradients(loss, x)
    barrier, slots = threading.Barrier(2, timeout=20), [torch.zeros(()), torch.zeros(())]
    results: dict[int, tuple[LossOutput, dict[str, Tensor]]] = {}

    def run(rank: int) -> None:
        half = slice(rank, None, 2)
        ids = x.segment_ids[half]
        local = local_sum(ids, len(lengths))

        def segment_sum(values: Tensor) -> Tensor:
            slots[rank] = local(values)
            barrier.wait()
            both = slots[0] + slots[1]
            barrier.wait()
            return both

        columns = {
            name: column.detach()[half].clone().requires_grad_(name in LEARNED)
            for name in COLUMNS
            if (column := getattr(x, name)) is not None
        }
        part = replace(x, **columns, mask=x.mask[half], segment_ids=ids, segment_sum=segment_sum)
        results[rank] = gradients(loss, part)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_adds_up([results[rank][0] for rank in range(2)], whole)
    for name, grad in grads.items():
        joined = torch.empty_like(grad)
        joined[::2], joined[1::2] = results[0][1][name], results[1][1][name]
        close(joined, grad)


@every_loss
@quick
@given(seed=seeds, lengths=pairs)
def test_garbage_outside_the_mask_changes_nothing(loss: Loss, proximal: bool, seed: int, lengths: list[int]) -> None:
    dirty = draw(seed, lengths, 0.1)
    blank = Token(**dict.fromkeys(COLUMNS, 0.25), mask=False)
    clean = [[t if t.mask else blank for t in tokens] for tokens in dirty]
    (a, grads_a), (b, grads_b) = [gradients(loss, inputs_of(s, proximal=proximal)) for s in (dirty, clean)]
    assert torch.equal(a.loss, b.loss)
    assert torch.isfinite(a.loss)
    for name in LEARNED:
        assert torch.equal(grads_a[name], grads_b[name])
        assert torch.isfinite(grads_a[name]).all()
    assert all(torch.equal(value, values(b)[name]) for name, value in values(a).items())
