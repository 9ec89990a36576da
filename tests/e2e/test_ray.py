"""Ranks as Ray actors on this machine: the same run to the bit, and the same words when one dies."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.processes import Place, Run, alive, eventually

pytest.importorskip("ray")

KEYS = ("learner.ep=2", "reward.function=my_rewards:even")


def ranks(run: Run) -> list[psutil.Process]:
    """Its actors' processes, which Ray names so; in no order."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "RankActor" in " ".join(child.cmdline())]


def test_actors_train_as_processes_do_and_a_dead_one_ends_the_run_by_name(place: Place) -> None:
    local = place.start("local", *KEYS)
    local.finish()
    run = place.start("actors", *KEYS, "run.launcher=ray")
    run.finish()
    assert run.record() == local.record()

    run = place.start("actors", *KEYS, "run.launcher=ray", "train.steps=100000", resume=True)
    run.until_row(step=7)
    started = psutil.Process(run.process.pid).children(recursive=True)
    victim = ranks(run)[0]
    victim.kill()
    assert run.end() == 1
    assert f"(pid {victim.pid} on " in run.text()
    assert "hung up: it was killed, crashed or lost its node; rank-" in run.text()
    assert "Ray: The actor died unexpectedly before finishing this task. The actor is dead because" in run.text()
    assert "Traceback" not in run.text()
    eventually(lambda: not any(map(alive, started)), "Ray's processes to end", 60)
