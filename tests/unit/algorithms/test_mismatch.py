"""Metrics of the train-rollout mismatch, against a loop over tokens."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from rl_megatron.algorithms.mismatch import POSITIONS, expert_means, expert_metrics, gap_metrics, mismatch_metrics

BUCKETS = {"t0": (0, 1), "t1_7": (1, 8), "t8_63": (8, 64), "t64_511": (64, 512)}


def test_every_metric_is_that_of_a_loop_over_tokens() -> None:
    chosen = torch.Generator().manual_seed(0)
    lengths = torch.tensor([90, 1, 3, 200, 1, 40])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    size = int(bounds[-1])
    learner, engine = torch.randn(2, size, generator=chosen)
    mask = torch.rand(size, generator=chosen) < 0.7
    mask[bounds[1] : bounds[2]] = False  # a sequence without a sampled token
    mask[bounds[4] : bounds[5]] = True  # one of a single sampled token
    by_bucket = defaultdict(list)
    differences = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        place = 0
        for at in range(start, stop):
            if not mask[at]:
                continue
            d = float(learner[at]) - float(engine[at])
            differences.append(d)
            (name,) = (name for name, (a, b) in BUCKETS.items() if a <= place < b)
            by_bucket[name].append(abs(d))
            place += 1
    row = mismatch_metrics(learner, engine, mask, bounds)
    sizes = sorted(abs(d) for d in differences)
    expected = {"mismatch/k1": -sum(differences) / len(differences)}
    expected["kl/rollout"] = sum(math.exp(d) - 1 - d for d in differences) / len(differences)
    expected |= {"mismatch/logprob_abs_mean": sum(sizes) / len(sizes), "mismatch/logprob_abs_max": sizes[-1]}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        expected[f"mismatch/logprob_abs_{name}"] = sizes[round(share * (len(sizes) - 1))]
    expected |= {f"mismatch/position/{name}": sum(v) / len(v) for name, v in by_bucket.items()}
    assert len(by_bucket) == 4
    assert row == pytest.approx(expected, abs=1e-6)


def test_buckets_cover_every_length() -> None:
    size = 5000
    ones, places = torch.ones(size), torch.arange(size, dtype=torch.float64)
    row = mismatch_metrics(places, ones * 0, torch.ones(size, dtype=torch.bool), torch.tensor([0, size]))
    found = {name.rpartition("/")[2]: mean for name, mean in row.items() if "position" in name}
    middles = {"t0": 0, "t1_7": 4, "t8_63": 35.5, "t64_511": 287.5, "t512_4095": 2303.5, "t4096_up": (4096 + 4999) / 2}
    assert found == pytest.approx(middles)
    assert list(found) == list(POSITIONS)
    assert mismatch_metrics(ones, ones, torch.zeros(size, dtype=torch.bool), torch.tensor([0, size])) == {}


def test_gaps_of_versions_are_those_of_a_loop_and_a_ratio_of_exact_samples_has_mean_one() -> None:
    """Of each gap every token comes exactly as often as the engine's distribution says: sums are expectations."""
    shares = {
        0: ([1, 2, 5], [2, 2, 4]),
        3: ([4, 3, 1], [4, 3, 1]),
        1: ([6, 1, 1], [2, 3, 3]),
    }  # eighths: engine, learner
    tokens = [(gap, e, q) for gap, pair in shares.items() for e, q in zip(*pair, strict=True) for _ in range(e)]
    engine, learner, mask = [], [], []
    for _, e, q in tokens:  # what is not sampled lies between
        engine += [9.0, math.log(e / 8)]
        learner += [-9.0, math.log(q / 8)]
        mask += [False, True]
    gaps = torch.tensor([[5, 0], [3, 0], [8, 3], [0, 7], [8, 1], [0, 2]])
    row = gap_metrics(torch.tensor(learner), torch.tensor(engine), torch.tensor(mask), gaps)
    k1 = {gap: sum(e / 8 * math.log(e / q) for e, q in zip(*pair, strict=True)) for gap, pair in shares.items()}
    expected = {f"mismatch/k1/v{gap}": kl for gap, kl in k1.items()} | {f"mismatch/ratio/v{gap}": 1.0 for gap in k1}
    assert row == pytest.approx(expected, abs=1e-6)
    assert (
        gap_metrics(torch.tensor(learner)[:2], torch.tensor(engine)[:2], torch.tensor([False, False]), gaps[3:4]) == {}
    )


def test_quantiles_of_five_are_the_middle_and_the_greatest() -> None:
    d = torch.tensor([0.1, -0.5, 0.2, -0.3, 0.4])
    row = mismatch_metrics(d, torch.zeros(5), torch.ones(5, dtype=torch.bool), torch.tensor([0, 5]))
    found = [row[f"mismatch/logprob_abs_{name}"] for name in ("p50", "p90", "p99")]
    assert found == pytest.approx([0.3, 0.5, 0.5])


def test_a_token_counts_for_every_expert_it_takes_in_every_layer() -> None:
    routes = torch.tensor([[[0, 3], [1, 0]], [[3, 1], [0, 1]], [[0, 1], [0, 1]]])  # 2 and, in layer 1, 3 are unused
    means, counts = expert_means(torch.tensor([0.1, 0.2, 0.6]), routes)
    assert counts.tolist() == [[2, 2, 0, 2], [3, 3, 0, 0]]
    expected = [[0.35, 0.4, math.nan, 0.15], [0.3, 0.3, math.nan, math.nan]]
    torch.testing.assert_close(means, torch.tensor(expected, dtype=torch.float64), equal_nan=True, rtol=1e-6, atol=0)
    means, counts = expert_means(torch.zeros(0), routes[:0])
    assert (means.shape, counts.tolist()) == ((2, 1), [[0], [0]])


def test_an_expert_of_thirty_two_tokens_is_judged_and_none_of_fewer() -> None:
    def worst(tokens_of_expert_1: int) -> float:
        routes = (torch.arange(100) < tokens_of_expert_1).long()[:, None, None]
        d = torch.where(routes[:, 0, 0] == 1, 3.0, 1.0)
        return expert_metrics(d, torch.zeros(100), torch.ones(100, dtype=torch.bool), routes)["mismatch/expert_number"]

    assert (worst(31), worst(32)) == (0, 1)


def test_the_expert_whose_tokens_differ_is_named() -> None:
    chosen = torch.Generator().manual_seed(1)
    size, layers, per_token = 4000, 3, 2
    routes = torch.rand(size, layers, 8, generator=chosen).topk(per_token).indices.to(torch.uint8)
    learner = 0.01 * torch.randn(size, generator=chosen)
    wrong = (routes[:, 1] == 5).any(1)
    learner[wrong] += 0.5
    mask = torch.rand(size, generator=chosen) < 0.5
    row = expert_metrics(learner, torch.zeros(size), mask, routes)
    assert (row["mismatch/expert_layer"], row["mismatch/expert_number"]) == (1, 5)
    inside, every = learner.abs()[mask & wrong].mean(), learner.abs()[mask].mean()
    assert row["mismatch/expert_worst"] == pytest.approx(float(inside / every), rel=1e-5)
    means, counts = expert_means(learner.abs()[mask], routes[mask])
    assert int(counts.sum()) == int(mask.sum()) * layers * per_token
    assert float(means[1, 5]) == pytest.approx(float(inside), rel=1e-5)
    assert expert_metrics(learner[:20], torch.zeros(20), torch.ones(20, dtype=torch.bool), routes[:20]) == {}


def test_places_are_counted_on_from_one_part_of_a_large_batch_to_the_next() -> None:
    """Parts are of half a million positions; every sequence has the same |d| at the same place."""
    length, number = 5000, 250
    of_places = torch.arange(length).float()
    mask = torch.ones(number, length, dtype=torch.bool)
    mask[::2, :100] = False  # prompts
    learner = torch.cat([of_places[: int(row.sum())].new_zeros(length).masked_scatter(row, of_places) for row in mask])
    bounds = torch.arange(0, number * length + 1, length)
    row = mismatch_metrics(-learner, torch.zeros(number * length), mask.view(-1), bounds)
    last = [*range(4096, 5000)] * (number // 2) + [*range(4096, 4900)] * (number // 2)
    middles = {"t0": 0, "t1_7": 4, "t8_63": 35.5, "t64_511": 287.5, "t512_4095": 2303.5}
    expected = {f"mismatch/position/{name}": mean for name, mean in middles.items()}
    expected["mismatch/position/t4096_up"] = sum(last) / len(last)
    every = sorted([*range(5000)] * (number // 2) + [*range(4900)] * (number // 2))
    expected["mismatch/k1"] = expected["mismatch/logprob_abs_mean"] = sum(every) / len(every)
    expected["mismatch/logprob_abs_max"] = every[-1]
    expected["kl/rollout"] = math.fsum(math.expm1(-min(d, 20)) + min(d, 20) for d in every) / len(every)
    expected |= {f"mismatch/logprob_abs_p{p}": every[round(p / 100 * (len(every) - 1))] for p in (50, 90, 99)}
    assert row == pytest.approx(expected, rel=1e-12)


def calls(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, that it makes."""
    made: list[str] = []
    sys.setprofile(lambda frame, event, what: made.append(event) if event in ("call", "c_call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(made)


def test_a_batch_takes_few_operations_however_large_it_is() -> None:
    length = 2**10
    size = 2**5 * length
    learner, engine = torch.randn(2, size)
    routes = torch.randint(0, 128, (size, 48, 8), dtype=torch.uint8)
    mask = torch.ones(size, dtype=torch.bool)
    bounds = torch.arange(0, size + 1, length)
    assert calls(lambda: mismatch_metrics(learner, engine, mask, bounds)) < 200
    assert calls(lambda: expert_metrics(learner, engine, mask, routes)) < 100
