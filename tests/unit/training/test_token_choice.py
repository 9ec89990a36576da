"""Tokens of a minibatch chosen by entropy or covariance: numpy, minibatches, ranks; the KL's value and gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.corrections import second_moment_mask
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import TokensSection
from rl_megatron.data.packing import Packer, with_own_columns
from rl_megatron.errors import ConfigError
from rl_megatron.training.measures import Measured
from rl_megatron.training.update import covariances, drawn_between, greatest, token_choice, top_entropy
from rl_megatron.types import LossOutput, ParallelDims, Samples
from tests.property.test_losses_metrics import batch
from tests.rows import policy_loss
from tests.samples import sequences_of

ONE_STEP = ["train.minibatches=1", "train.epochs=1"]
LENGTHS = [5, 9, 1, 3, 7, 4]


def samples_of(seed: int, lengths: list[int] = LENGTHS * 4) -> tuple[Samples, Tensor, Tensor]:
    """With log-probs and entropies of the policy; a quarter of the tokens is context."""
    g = torch.Generator().manual_seed(seed)
    num = sum(lengths)
    logprobs = -3 * torch.rand(num, generator=g)
    samples = sequences_of(
        lengths,
        input_ids=torch.arange(num),
        targets=torch.arange(num),
        mask=torch.rand(num, generator=g) < 0.75,
        advantages=torch.randn(num, generator=g),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
    )
    return samples, logprobs, 4 * torch.rand(num, generator=g)


def minibatches(section: TokensSection, dp: int, most: int = 3) -> list[dict[int, tuple[float, float]]]:
    """Of each minibatch the advantage and the KL's weight of its trained tokens, by their ids."""
    samples, logprobs, entropy = samples_of(5)
    choice = token_choice(section, Measured(samples, logprobs, entropy, None, None), seed=3)
    assert choice is not None
    packer = Packer(dims=ParallelDims(dp=dp), max_tokens=16, attention_cost=0.0)
    out = []
    for made in packer.minibatches(samples, most=most, seeds=[1]):
        made = with_own_columns(made, choice)
        tokens = {}
        for micro in (micro for row in made.micro_batches for micro in row):
            held = torch.zeros_like(micro.advantages) if micro.old_kl_weights is None else micro.old_kl_weights
            every = zip(micro.input_ids.tolist(), micro.advantages.tolist(), held.tolist(), micro.mask, strict=True)
            tokens |= {i: (a, w) for i, a, w, trained in every if trained}
        out.append(tokens)
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.01, 0.2, 0.55, 1.0])
def test_the_choices_are_those_of_numpy(share: float, seed: int) -> None:
    samples, logprobs, entropy = samples_of(seed)
    lp, a, h = (x.double().numpy() for x in (logprobs, samples.advantages, entropy))
    cov = (lp - lp.mean()) * (a - a.mean())
    np.testing.assert_allclose(covariances(logprobs, samples.advantages).numpy(), cov, rtol=1e-12)
    assert cov.mean() == pytest.approx(np.cov(lp, a, bias=True)[0, 1])
    num = len(h)
    kept = top_entropy(entropy, share).numpy()
    assert kept.sum() == np.ceil(share * num)
    assert h[kept].min() >= max(h[~kept], default=-1.0)
    held = greatest(torch.from_numpy(cov), share).numpy()
    assert held.sum() == max(int(share * num), 1)
    assert cov[held].min() >= max(cov[~held], default=-99.0)
    drawn = drawn_between(torch.from_numpy(cov), share, 0.1, 1.0, torch.Generator().manual_seed(seed)).numpy()
    inside = (cov >= 0.1) & (cov <= 1.0)
    assert drawn.sum() == min(max(int(share * num), 1), inside.sum())
    assert not (drawn & ~inside).any()


def test_equal_values() -> None:
    """Entropies of the threshold are all kept, as in the paper's equation; of equal covariances no more than the share
    are held, and of equal ratios, as of a group's first tokens, the first are trained on."""
    assert top_entropy(torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0]), 0.4).tolist() == [False, True, True, True, True]
    assert torch.where(greatest(torch.zeros(1000), 0.004))[0].tolist() == [0, 1, 2, 3]
    kept = second_moment_mask(torch.arange(60) % 2, threshold=0.25)
    assert torch.where(kept)[0].tolist() == [*range(20), *range(20, 60, 2)]


def test_of_fewer_tokens_than_the_share_needs_one_is_chosen() -> None:
    values = torch.tensor([0.0, 2.0, 1.0])
    drawn = drawn_between(values, 1e-3, 1.5, 9.0, torch.Generator())
    for chosen in (top_entropy(values, 1e-3), greatest(values, 1e-3), drawn):
        assert chosen.tolist() == [False, True, False]


def test_the_drawn_are_uniform_among_the_candidates() -> None:
    """1,000 draws of 5 of 20 candidates: each is drawn 250 times, give or take 5 standard deviations of 13.7."""
    values, generator = torch.arange(40.0), torch.Generator().manual_seed(0)
    counts = sum(drawn_between(values, 0.125, 10, 29, generator).long() for _ in range(1000))
    assert counts[:10].sum() == counts[30:].sum() == 0  # type: ignore[index,union-attr]
    assert ((counts[10:30] - 250).abs() < 69).all()  # type: ignore[index,operator]


@pytest.mark.parametrize(
    "section",
    [
        TokensSection(choose="top_entropy", share=0.3),
        TokensSection(choose="clip_cov", share=0.1, low=0.1, high=3.0),
        TokensSection(choose="kl_cov", share=0.1, kl_coefficient=0.7),
    ],
    ids=lambda section: section.choose,
)
def test_the_share_is_each_minibatchs_whatever_ranks_and_micro_batches(section: TokensSection) -> None:
    """The same tokens over one, two and four data-parallel ranks, chosen among those of the minibatch alone."""
    samples, logprobs, entropy = samples_of(5)
    found = minibatches(section, dp=1)
    assert minibatches(section, dp=2) == minibatches(section, dp=4) == found
    assert len(found) == 3
    assert {i for tokens in found for i in tokens} == set(torch.where(samples.mask)[0].tolist())
    for tokens in found:
        ids = torch.tensor(sorted(tokens))
        given, kept = samples.advantages[ids], torch.tensor([tokens[i][0] for i in ids.tolist()])
        held = torch.tensor([tokens[i][1] for i in ids.tolist()])
        cov = covariances(logprobs[ids], given)
        if section.choose == "kl_cov":
            assert torch.equal(kept, given)
            assert torch.equal(held, 0.7 * greatest(cov, 0.1))
            continue
        assert not held.any()
        assert torch.equal(kept[kept != 0], given[kept != 0])
        if section.choose == "top_entropy":
            assert torch.equal(kept != 0, top_entropy(entropy[ids], 0.3))
        else:
            assert int((kept == 0).sum()) == int(0.1 * len(ids))
            assert ((cov[kept == 0] >= 0.1) & (cov[kept == 0] <= 3.0)).all()


def test_the_row_has_the_mean_share_and_a_minibatch_without_a_token_none() -> None:
    samples, logprobs, entropy = samples_of(5, [4, 4, 4])
    samples = replace(samples, mask=torch.tensor([True] * 8 + [False] * 4))
    measured = Measured(samples, logprobs, entropy, None, None)
    choice = token_choice(TokensSection(choose="top_entropy", share=0.5), measured, seed=0)
    assert choice is not None
    assert choice(samples, np.array([2])) is samples
    for part in ([0], [0, 1]):
        choice(samples, np.array(part))
    assert choice.row() == {"tokens/chosen_fraction": 0.5}
    assert token_choice(TokensSection(), measured, seed=0) is None


def test_the_kl_to_the_old_policy_is_the_papers_equation() -> None:
    """-rho A + beta KL on the held tokens: value and gradient by hand, in any split into micro-batches."""
    inputs = batch(LENGTHS, 3, scale=0.6, kept=0.75)
    held = 0.7 * (torch.arange(len(inputs.mask)) % 3 == 0)
    inputs = replace(inputs, old_kl_weights=torch.where(inputs.mask, held, torch.nan))
    loss = policy_loss(objective="importance", tokens={"choose": "kl_cov"})

    def evaluate(mask: Tensor) -> tuple[LossOutput, Tensor]:
        given = inputs.logprobs.detach().clone().requires_grad_()
        output = loss(replace(inputs, logprobs=given, mask=mask))
        return output, torch.autograd.grad(output.loss, given)[0]

    output, gradient = evaluate(inputs.mask)
    value, slopes, num = 0.0, np.zeros(len(held)), int(inputs.mask.sum())
    for t in torch.where(inputs.mask)[0].tolist():
        d = (inputs.logprobs[t] - inputs.old_logprobs[t]).item()
        kl, slope = abs(d), np.sign(d)
        value += (-np.exp(d) * float(inputs.advantages[t]) + float(held[t]) * kl) / num
        slopes[t] = (-np.exp(d) * float(inputs.advantages[t]) + float(held[t]) * slope) / num
    assert output.loss.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-10, atol=1e-15)
    halves = [evaluate(inputs.mask & side) for side in (inputs.segment_ids < 3, inputs.segment_ids >= 3)]
    assert sum(half.loss.item() for half, _ in halves) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(halves[0][1] + halves[1][1], gradient, rtol=1e-12, atol=0)


def test_k3_has_the_gradient_of_the_kl_of_the_old_policy() -> None:
    """Over all five outcomes, each weighted by the old policy: grad KL(old‖pi) = pi - old."""
    g = torch.Generator().manual_seed(0)
    old = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0)
    logits = torch.randn(5, generator=g, dtype=torch.float64).requires_grad_()
    d = logits.log_softmax(0) - old
    (found,) = torch.autograd.grad((old.exp() * (d.exp() - 1 - d)).sum(), logits)
    torch.testing.assert_close(found, (logits.softmax(0) - old.exp()).detach())


def test_the_rows_have_the_shares_of_their_papers() -> None:
    rows = {
        name: load_config("tiny_cpu", [f"algorithm={name}"]) for name in ("clip_cov", "kl_cov", "top_entropy", "m2po")
    }
    tokens = {name: config.algorithm.tokens for name, config in rows.items()}
    assert {name: (t.choose, t.share) for name, t in tokens.items()} == {
        "clip_cov": ("clip_cov", 2e-4),
        "kl_cov": ("kl_cov", 2e-3),
        "top_entropy": ("top_entropy", 0.2),
        "m2po": ("second_moment", 0.2),
    }
    assert (tokens["m2po"].limit, rows["m2po"].algorithm.old_logprobs) == (0.04, "rollout")
    assert (tokens["clip_cov"].low, tokens["clip_cov"].high, tokens["kl_cov"].kl_coefficient) == (1.0, 5.0, 1.0)
    assert rows["top_entropy"].algorithm.clip_high == 0.28


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            ["algorithm=grpo", "algorithm.tokens.share=0.5"],
            "tokens.share=0.5 does nothing.*tokens.choose=top_entropy or",
        ),
        (["algorithm=kl_cov", "algorithm.tokens.low=0.5"], "tokens.low=0.5 does nothing.*tokens.choose=clip_cov does"),
        (["algorithm=clip_cov", "algorithm.tokens.low=9"], "tokens.low=9.0 is above algorithm.tokens.high=5.0; swap"),
        (["algorithm=dpo", "algorithm.tokens.choose=kl_cov"], "trains on pairs without it"),
        (["algorithm=m2po", "algorithm.tokens.share=0.5"], "tokens.share=0.5 does nothing"),
        (
            ["algorithm=m2po", "algorithm.second_moment_limit=0.1"],
            r"second_moment_limit.*algorithm\.tokens\.limit, with tokens\.choose=second_moment",
        ),
        (["algorithm=kl_cov", "algorithm.tokens.share=0"], r"tokens.share=0\b.* greater than 0"),
        (
            ["algorithm=kl_cov", *ONE_STEP],
            r"tokens\.choose=kl_cov does nothing: with train\.epochs=1 and .*, where abs has no gradient",
        ),
    ],
)
def test_what_it_cannot_use_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)


@pytest.mark.parametrize(
    "keys",
    [
        [*ONE_STEP, "algorithm.old_logprobs=rollout"],
        ["train.minibatches=1", "train.epochs=2"],
        ["train.minibatches=2", "train.epochs=1"],
    ],
)
def test_kl_cov_is_taken_where_the_kl_has_a_gradient(keys: list[str]) -> None:
    load_config("tiny_cpu", ["algorithm=kl_cov", *keys])


def test_the_section_is_off_by_default() -> None:
    assert RunConfig().algorithm.tokens.choose == "all"
