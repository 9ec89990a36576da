"""A run with two servers that die: of one prompt, again and again, and in the middle of a push. 40 seconds."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.servers import supervisor
from rl_megatron.data.problems.prompts import split_sums
from rl_megatron.engines import requests
from rl_megatron.engines.adapter import StartCommand, StartOptions
from rl_megatron.engines.local.adapter import EmbeddedAdapter
from tests.e2e.processes import REWARDS, Place, Run
from tests.kills.reader import lines_of

SIZE, STALENESS, DIGITS, HELD_OUT, NAME = 4, 2, 1, 40, "deadly"
TRAIN, _ = split_sums(digits=DIGITS, num_eval=HELD_OUT, seed=0)
KEYS = (
    *("learner.ep=1", "reward.function=my_rewards:even", "rollout.server.replicas=2", f"data.digits={DIGITS}"),
    *("warm_start.steps=0", "eval.every=0", f"train.max_staleness={STALENESS}", f"data.num_eval={HELD_OUT}"),
    *("train.steps=100000", "checkpoint.every=0", "rollout.max_new_tokens=48", "rollout.ignore_eos=true"),
    *("rollout.server.restarts=5", "rollout.server.max_concurrent_groups=2"),
)


@dataclass(frozen=True)
class Deadly:
    """Before a fork's run begins: its servers are those of deadly.py."""

    folder: Path

    def __call__(self) -> None:
        real, deadly = EmbeddedAdapter.command, str(Path(__file__).with_name("deadly.py"))

        def command(adapter: EmbeddedAdapter, options: StartOptions) -> StartCommand:
            given = real(adapter, options)
            python, _, _, _, *rest = given.arguments  # -P -m MODULE
            environment = {**given.environment, "DEADLY": str(self.folder)}
            return replace(given, arguments=(python, deadly, *rest), environment=environment)

        setattr(EmbeddedAdapter, "command", command)  # noqa: B010  an assignment is none of mypy's
        supervisor._FIRST_WAIT = requests._WAIT = 0.01


def epoch(number: int) -> list[str]:
    """The ids of an epoch's prompts in the order of a run with seed 0, by numpy's generator."""
    order = np.random.default_rng([0, number]).permutation(len(TRAIN)).tolist()
    return ["{:0{d}}+{:0{d}}".format(*TRAIN[i], d=DIGITS) for i in order]


BAD = epoch(0)[9]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Until it has drawn of a third epoch, and both servers serve again."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "prompt").write_text(str(list(f"{BAD}=".encode())))
    place = Place(folder=folder, cache=folder / "models")
    try:
        run = place.fork(NAME, *KEYS, before=Deadly(folder))
        run.until(lambda: any(line["reason"] == "poison" for line in ledger(run)), "the prompt to be dropped")
        (folder / "push").touch()
        run.until(lambda: (folder / "taken").exists(), "a push that a server dies of")
        run.until(lambda: settled(run), "three epochs, and both servers again")
        os.kill(run.process.pid, signal.SIGTERM)
        run.finish()
        yield run
    finally:
        place.clear()


def settled(run: Run) -> bool:
    row = run.rows()[-1]
    there = row["engine/healthy"] == 2 and row["engine/restarts"] == len(deaths(run))
    return bool(there and row["ledger/drawn"] > 3 * len(TRAIN))


def deaths(run: Run) -> list[dict[str, Any]]:
    return lines_of(run.folder.parents[1] / "deaths.jsonl")


def ledger(run: Run) -> list[dict[str, Any]]:
    return lines_of(run.folder / "ledger.jsonl")


def test_the_prompt_is_dropped_by_name_and_no_other(run: Run) -> None:
    assert [(line["ordinal"], line["prompt"]) for line in ledger(run) if line["state"] == "dropped"] == [(9, BAD)]
    log = (run.folder / "log.txt").read_text()
    assert log.count(f"prompt '{BAD}' is dropped: ") == 1


def test_it_ended_few_servers_and_none_in_later_epochs(run: Run) -> None:
    causes = Counter(death["cause"] for death in deaths(run))
    assert causes["push"] == 1
    assert 2 <= causes["prompt"] <= 6
    assert deaths(run)[-1]["cause"] == "push"
    assert deaths(run)[-1]["beside"]  # completions were in flight there
    assert run.rows()[-1]["engine/restarts"] == len(deaths(run))


def test_all_others_are_trained_on_once_in_their_order_by_allowed_versions(run: Run) -> None:
    rows = [row for row in run.rows() if row["phase"] == "rl" and row["step"]]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    lines = {line["ordinal"]: line for line in ledger(run)}
    assert len(lines) == len(ledger(run))
    order = epoch(0) + [prompt for number in range(1, 99) for prompt in epoch(number) if prompt != BAD]
    assert all(line["prompt"] == order[ordinal] for ordinal, line in lines.items())
    missing = set(range(max(lines))) - set(lines)
    assert missing <= set(range(max(lines) - SIZE * (STALENESS + 1), max(lines)))  # under way at the end
    trained = Counter(line["step"] for line in lines.values() if line["state"] == "trained")
    assert Counter(trained.values()) == {SIZE: len(rows) - 1, SIZE - 1: 1}
    for line in lines.values():
        versions = [int(span.split(":")[1]) for span in line["spans"].replace(",", "").split()]
        assert all(line["step"] - 1 - STALENESS <= version < line["step"] for version in versions), line
    assert max(row["staleness/max"] for row in rows) <= STALENESS
