"""Reads what a killed run left on disk, by json and numpy, and counts what was lost and what was made twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_megatron.data.problems.prompts import split_sums

DIGITS, NUM_EVAL = 1, 16


def lines_of(path: Path) -> list[dict[str, Any]]:
    """All but a last line that a kill tore."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def drawn(count: int) -> list[str]:
    """The ids of the first prompts of a run with seed 0: each epoch is a permutation by numpy's generator."""
    train, _ = split_sums(digits=DIGITS, num_eval=NUM_EVAL, seed=0)
    epochs = -(-count // len(train))
    order = [i for epoch in range(epochs) for i in np.random.default_rng([0, epoch]).permutation(len(train)).tolist()]
    return ["{:0{d}}+{:0{d}}".format(*train[i], d=DIGITS) for i in order[:count]]


def went_on(run: Path, version: int) -> int:
    """How many completions have tokens of several versions, all newer than this. A span is <first token>:<version>."""
    spans = [one.split() for line in lines_of(run / "ledger.jsonl") for one in line["spans"].split(", ")]
    return sum(len(one) > 1 and all(int(span.split(":")[1]) > version for span in one) for one in spans)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A run as its files tell it."""

    step: int  # of the newest checkpoint
    drawn: int
    lost: list[int]  # ordinals that no step trained on, nobody dropped and nothing holds
    twice: list[int]
    trained: dict[int, list[str]]  # prompts by step
    ages: list[int]  # of the oldest token of each completion, in pushes


def found(run: Path) -> Found:
    """Compare the ledger up to the newest checkpoint with what that holds."""
    state = json.loads((max((run / "checkpoints").glob("step_*")) / "trainer.json").read_text())
    stream, step = state["stream"], state["step"]
    places = [place["drawn"] for place in (*stream["places"], *stream["left_out"])]
    waiting = [place["ordinal"] for place in places]
    lines = [line for line in lines_of(run / "ledger.jsonl") if line["step"] <= step]
    times = Counter([*(line["ordinal"] for line in lines), *waiting])
    count = stream["drawn"]
    assert times.keys() <= set(range(count)), "a prompt that was never drawn"
    order, trained = drawn(count), dict[int, list[str]]()
    assert all(place["prompt"]["id"] == order[place["ordinal"]] for place in places), "other prompts wait"
    for line in lines:
        assert line["prompt"] == order[line["ordinal"]], line
        if line["state"] == "trained":
            trained.setdefault(line["step"], []).append(line["prompt"])
    return Found(
        step=step,
        drawn=count,
        lost=sorted(set(range(count)) - times.keys()),
        twice=sorted(ordinal for ordinal, n in times.items() if n > 1),
        trained=trained,
        ages=[
            line["step"] - 1 - min(int(span.split(":")[1]) for span in line["spans"].replace(",", "").split())
            for line in lines
            if line["state"] == "trained"
        ],
    )


def trained_by_the_learner(folder: Path) -> dict[int, list[str]]:
    """The prompts of each step as the learner was given them last: a resume makes the steps after it again."""
    return {line["step"]: line["prompts"] for line in lines_of(folder / "trained.jsonl")}
