"""The sentences that a report says about a run: on rows with known numbers, and on recorded runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.observability.verdicts import MIN_STEPS, READS, State, Verdict, read_run

Row = dict[str, object]
RECORDS = Path(__file__).parents[2] / "verdicts"
WANTED: dict[str, tuple[str, State, str]] = {
    "collapsed": ("learning", "bad", "fell"),
    "stalled": ("groups", "bad", "Use"),
    "overfitted": ("learning", "bad", "Overfitting"),
    "mismatched": ("mismatch", "bad", "doctor mismatch"),
}
"""The verdict that each recorded run of a kind must get: topic, state, and a part of the sentence."""
STEPS = 50


def rows(change: Callable[[int], Row] = lambda k: {}, steps: int = STEPS) -> list[Row]:
    """A run whose reward rises from 0 to 0.98, with `change` in each row."""
    healthy = {"groups/zero_advantage_fraction": 0.5, "groups/all_correct": 0.25, "groups/none_correct": 0.25}
    return [
        {"phase": "rl", "step": k + 1, "reward/mean": k / steps, "entropy": 1.0 - k / (2 * steps), "seconds/step": 2.0}
        | {"seconds/rollout": 1.0, "seconds/train": 0.5, "mismatch/logprob_abs_mean": 1e-6, "groups/trained": 8}
        | healthy
        | change(k)
        for k in range(steps)
    ]


def test_a_run_that_learns() -> None:
    found = read_run(rows())
    assert [(one.topic, one.state) for one in found] == [
        *(("learning", "good"), ("groups", "good"), ("entropy", "good"), ("mismatch", "good"), ("time", "good")),
    ]
    assert {name for one in found for name in one.charts} <= set(READS)
    learned = read_run(rows(lambda k: {"eval/accuracy": k / STEPS}))[0].sentence
    assert "held-out accuracy rose by 96 points to 96 %" in learned
    assert "rose by 0.8 " in found[0].sentence  # the mean of the last ten steps, less that of the first ten
    assert found[1].sentence.startswith("50 % of the groups have a gradient")
    assert found[4].sentence == "A step takes 2 s: sampling 50 %, training 25 %."


@pytest.mark.parametrize(
    ("topic", "state", "text", "change"),
    [
        ("learning", "bad", "Reward fell", lambda k: {"reward/mean": (STEPS - k) / STEPS}),
        ("learning", "watch", "Not learning yet", lambda k: {"reward/mean": 0.5 + 0.01 * (k % 2)}),
        ("learning", "bad", "Overfitting", lambda k: {"eval/accuracy": 1 - k / STEPS}),
        ("groups", "bad", "Use harder data", lambda k: {"groups/zero_advantage_fraction": 1.0, "reward/mean": 1.0}
         | {"groups/all_correct": 1.0, "groups/none_correct": 0.0}),
        ("groups", "bad", "Use easier data", lambda k: {"groups/zero_advantage_fraction": 1.0, "reward/mean": 0.0}
         | {"groups/all_correct": 0.0, "groups/none_correct": 1.0}),
        ("groups", "good", "has solved its data", lambda k: {"groups/zero_advantage_fraction": 1.0}
         | {"groups/all_correct": k / STEPS, "groups/none_correct": 0.0}),
        ("groups", "good", "10 % of", lambda k: {"groups/zero_advantage_fraction": 0.2, "groups/filtered": 56}),
        ("groups", "bad", "has lost what", lambda k: {"groups/zero_advantage_fraction": 1.0, "groups/none_correct": 1.0}
         | {"reward/mean": float(k < 20), "groups/all_correct": 0.0}),
        ("entropy", "bad", "collapsed", lambda k: {"entropy": 0.8**k}),
        ("entropy", "good", "healthy", lambda k: {"entropy": 0.8**k, "groups/all_correct": 0.9}),
        ("mismatch", "bad", "doctor mismatch", lambda k: {"mismatch/logprob_abs_mean": 0.06}),
        ("mismatch", "watch", "Updates are large", lambda k: {"kl/old_policy": 0.5}),
        ("completions", "watch", "Completions grew from 19 to 99 tokens", lambda k: {"response/length_mean": 10 + 2 * k}
         | {"reward/mean": 0.5 + 0.01 * (k % 2)}),
        ("completions", "watch", "are cut", lambda k: {"response/truncated_fraction": 0.9}),
        ("time", "watch", "0.5 s planned, 1 s measured", lambda k: {}),
    ],
)  # fmt: skip
def test_each_verdict(topic: str, state: State, text: str, change: Callable[[int], Row]) -> None:
    found = {one.topic: one for one in read_run(rows(change), plan={"seconds/rollout": 0.5}, dtype="bfloat16")}
    assert (found[topic].state, text in found[topic].sentence) == (state, True), found[topic]


def test_what_the_verdicts_depend_on() -> None:
    assert read_run(rows(steps=MIN_STEPS - 1)) == []

    def bfloat16(k: int) -> Row:
        return {"mismatch/logprob_abs_mean": 0.01, "groups/zero_advantage_fraction": 1.0}

    def states(found: list[Verdict]) -> dict[str, State]:
        return {one.topic: one.state for one in found}

    assert states(read_run(rows(bfloat16)))["mismatch"] == "bad"
    assert states(read_run(rows(bfloat16), dtype="bfloat16"))["mismatch"] == "good"
    assert "groups" not in states(read_run(rows(bfloat16), needs_differences=False))
    assert "completions" not in states(read_run(rows(lambda k: {"response/length_mean": 10 + 2 * k})))  # reward rises
    losses = [{"step": k, "eval/loss": value, "grad_norm": 1.0} for k, value in enumerate([2.0, 1.0, 1.5, 2.5] * 5)]
    assert [(one.topic, one.state) for one in read_run(losses)] == [("learning", "bad")]


def recorded(kind: str, parity: int | None = None) -> list[dict[str, Any]]:
    """The recorded runs of a kind, of one half of the seeds: 0 for even ones, on which thresholds were chosen."""
    runs = json.loads(gzip.decompress((RECORDS / f"{kind}.json.gz").read_bytes()))["runs"]
    return [run for run in runs if parity is None or run["seed"] % 2 == parity]


def read(run: dict[str, Any]) -> list[Verdict]:
    columns = run["columns"]
    return read_run([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])


@pytest.mark.parametrize("kind", WANTED)
def test_bad_runs_of_odd_seeds_get_their_verdict(kind: str) -> None:
    topic, state, text = WANTED[kind]
    runs = recorded(kind, 1)
    assert len(runs) == len(recorded(kind)) / 2 >= 2
    for run in runs:
        found = {one.topic: one for one in read(run)}
        assert (found[topic].state, text in found[topic].sentence) == (state, True), (run["command"], found)


def test_no_verdict_on_a_healthy_run_is_a_warning() -> None:
    runs = recorded("healthy")
    assert len(runs) >= 10
    for run in runs:
        found = read(run)
        assert [one for one in found if one.state != "good"] == [], run["command"]
        assert [one.topic for one in found] == ["learning", "groups", "entropy", "mismatch", "time"]
