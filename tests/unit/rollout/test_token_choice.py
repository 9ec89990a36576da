"""Token choice against closed-form distributions."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rl_megatron.rollout.local.sampling import RowSampling, choose_tokens, stream_keys, uniforms

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -3.0, 1.9, -math.inf, 0.0])
DRAWS = 40_000


def splitmix64(state: int) -> int:
    """The published generator's output function (Steele, Lea and Flood, 2014), in Python's exact integers."""
    z = state & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def rows(
    num: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    greedy: bool = False,
    top_k: float = math.inf,
    min_p: float = 0.0,
) -> RowSampling:
    return RowSampling(
        inverse_temperature=torch.full((num, 1), 1 / temperature),
        top_p=torch.full((num, 1), top_p),
        top_k=torch.full((num, 1), top_k),
        min_p=torch.full((num, 1), min_p),
        greedy=torch.full((num, 1), greedy),
        any_greedy=greedy,
        any_limit=top_p < 1 or top_k < math.inf or min_p > 0,
    )


def test_uniforms_are_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15
    seeds, completions, counters = [0, 1, -5, 2**63 - 1], [0, 3, 1, 7], [0, 1, 100, 2**31]
    got = uniforms(stream_keys(torch.tensor(seeds), torch.tensor(completions)), torch.tensor(counters))
    keys = [splitmix64(splitmix64(s * golden) + c * golden) for s, c in zip(seeds, completions, strict=True)]
    expected = [(splitmix64(k + (n + 1) * golden) >> 40) / 2**24 for k, n in zip(keys, counters, strict=True)]
    assert got.tolist() == expected


def test_streams_are_uniform_and_unrelated() -> None:
    keys = stream_keys(torch.arange(50).repeat_interleave(50), torch.arange(50).repeat(50))
    draws = torch.stack([uniforms(keys, torch.full_like(keys, step)) for step in range(32)]).double()
    assert len(set(keys.tolist())) == 2500
    counts = torch.histc(draws, bins=64, min=0, max=1)
    assert float(((counts - 1250) ** 2 / 1250).sum()) < 63 + 4 * math.sqrt(2 * 63)
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 5 / math.sqrt(2500)
    assert torch.corrcoef(draws.T.reshape(50, -1)).fill_diagonal_(0).abs().max() < 5 / math.sqrt(1600)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.7), (1.5, 0.9), (1.0, 1e-6)]
)
def test_frequencies_and_logprobs_follow_the_closed_form(temperature: float, top_p: float) -> None:
    exact = (LOGITS.double() / temperature).softmax(-1)
    kept, mass = torch.zeros(8, dtype=torch.bool), 0.0
    for token in exact.argsort(descending=True).tolist():
        if mass < top_p and exact[token] > 0:
            kept[token] = True
            mass += float(exact[token])
    exact = torch.where(kept, exact, 0.0) / mass

    keys = stream_keys(torch.full((DRAWS,), 17), torch.arange(DRAWS))
    uniform = uniforms(keys, torch.zeros_like(keys))
    tokens, logprobs = choose_tokens(LOGITS.repeat(DRAWS, 1), uniform, rows(DRAWS, temperature, top_p))
    torch.testing.assert_close(logprobs.double(), exact.log()[tokens], rtol=0, atol=1e-5)
    counts, expected = tokens.bincount(minlength=8)[kept], exact[kept] * DRAWS
    assert counts.sum() == DRAWS
    degrees = int(kept.sum()) - 1
    assert float(((counts - expected) ** 2 / expected).sum()) <= degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [(1.0, 1.0, 3, 0.0), (1.5, 1.0, math.inf, 0.2), (0.7, 0.8, 4, 0.0), (2.0, 0.9, 5, 0.3), (1.0, 0.8, 3, 0.0)],
)
def test_top_k_and_min_p_are_those_of_transformers(
    temperature: float, top_p: float, top_k: float, min_p: float
) -> None:
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    warpers += [TopKLogitsWarper(int(top_k))] if top_k < math.inf else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    left = LOGITS.double()[None]
    for warper in warpers:
        left = warper(None, left)
    exact = left[0].softmax(-1)
    uniform = (torch.arange(DRAWS) + 0.5) / DRAWS  # each token as often as its probability says, to one draw
    tokens, logprobs = choose_tokens(
        LOGITS.repeat(DRAWS, 1), uniform, rows(DRAWS, temperature, top_p, top_k=top_k, min_p=min_p)
    )
    torch.testing.assert_close(logprobs.double(), exact.log()[tokens], rtol=0, atol=1e-5)
    assert (tokens.bincount(minlength=8) - exact * DRAWS).abs().max() <= 1


def test_limits_of_one_row_change_no_bit_of_another() -> None:
    uniform = torch.linspace(0.0, 0.999, 64)
    mixed = rows(64, 1.3, 0.9)
    alone = choose_tokens(LOGITS.repeat(64, 1), uniform, mixed)
    mixed.top_k[::2] = 2.0
    beside = choose_tokens(LOGITS.repeat(64, 1), uniform, mixed)
    assert [one[1::2].tolist() for one in beside] == [one[1::2].tolist() for one in alone]


def test_greedy_takes_the_first_best_and_reports_the_models_logprob() -> None:
    tokens, logprobs = choose_tokens(LOGITS.repeat(4, 1), torch.tensor([0.0, 0.3, 0.7, 0.999]), rows(4, greedy=True))
    assert tokens.tolist() == [2] * 4
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[2].expand(4))


def test_the_ends_of_the_unit_interval_never_hit_an_impossible_token() -> None:
    logits = torch.tensor([-math.inf, 3.0, -math.inf, 1.0, -math.inf]).repeat(2, 1)
    for top_p in (1.0, 0.999):
        tokens, _ = choose_tokens(logits.clone(), torch.tensor([0.0, 1 - 2.0**-24]), rows(2, top_p=top_p))
        assert tokens.tolist() == [1, 3]


def test_rows_keep_their_own_parameters() -> None:
    mixed = RowSampling(
        inverse_temperature=torch.tensor([[1.0], [1.0], [4.0], [1.0]]),
        top_p=torch.tensor([[1.0], [1.0], [1.0], [0.3]]),
        greedy=torch.tensor([[True], [False], [False], [False]]),
        any_greedy=True,
        top_k=torch.full((4, 1), math.inf),
        min_p=torch.zeros(4, 1),
        any_limit=True,
    )
    uniform = torch.full((4,), 0.99)
    together = choose_tokens(LOGITS.repeat(4, 1), uniform, mixed)
    singles = [(1.0, 1.0, True), (1.0, 1.0, False), (0.25, 1.0, False), (1.0, 0.3, False)]
    for row, (temperature, top_p, greedy) in enumerate(singles):
        alone = choose_tokens(LOGITS.repeat(1, 1), uniform[:1], rows(1, temperature, top_p, greedy))
        assert (together[0][row], together[1][row]) == (alone[0][0], alone[1][0])
