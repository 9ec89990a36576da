"""A run whose evaluations have servers of their own: figures, a server that dies, and a resume."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from typing import Any

import psutil

from rl_megatron.observability.metrics.table import deterministic
from rl_megatron.rollout.servers.adapter import Command, StartOptions
from rl_megatron.rollout.servers.embedded.adapter import EmbeddedAdapter
from tests.e2e.processes import PORTABLE, Place, Run
from tests.exposure import check_server, family

KEYS = (
    *("learner.ep=1", "reward.function=my_rewards:even", "rollout.server.replicas=1", "warm_start.steps=0"),
    *("eval.every=2", "data.num_eval=24", "checkpoint.every=2", "checkpoint.keep=9", "train.steps=3"),
    *("eval.sets.all.samples=2", "eval.sets.all.temperature=1.0"),
)
PINNED = ("eval.mode=pinned", "eval.replicas=1")


def evaluated(run: Run, phase: str) -> dict[int, dict[str, Any]]:
    found = [row for row in run.rows() if row["phase"] == phase and "eval/accuracy" in row]
    assert len({row["step"] for row in found}) == len(found)
    names = [name for name in deterministic(found[0]) if name.startswith("eval/all") or name == "eval/accuracy"]
    return {row["step"]: {name: row[name] for name in names} for row in found}


def first_starts_end() -> None:
    """Before a fork's run begins: the first two servers that it starts end at once."""
    real, left = EmbeddedAdapter.command, iter(range(2))

    def command(adapter: EmbeddedAdapter, options: StartOptions) -> Command:
        given = real(adapter, options)
        ends = (given.arguments[0], "-c", "raise SystemExit(3)")
        return given if next(left, None) is None else replace(given, arguments=ends)

    setattr(EmbeddedAdapter, "command", command)  # noqa: B010  an assignment is none of mypy's


def test_figures_are_those_of_an_evaluation_that_training_waits_for_and_a_resume_has_each_once(place: Place) -> None:
    place.environment = PORTABLE
    blocking, pinned = place.fork("blocking", *KEYS), place.fork("pinned", *KEYS, *PINNED)
    blocking.finish()
    pinned.finish()
    there, ours = evaluated(blocking, "rl"), evaluated(pinned, "eval")
    assert set(there) == {0, 2, 3}
    assert ours == {2: there[2]}
    assert evaluated(pinned, "rl") == {step: there[step] for step in (0, 3)}  # training has nothing to do meanwhile
    assert {row["eval/own_version_fraction"] for row in pinned.rows() if row["phase"] == "eval"} == {1.0}
    assert (pinned.folder / "eval_0.log").is_file()
    shutil.rmtree(pinned.folder / "checkpoints" / "step_000003")
    pinned = place.fork("pinned", *KEYS, *PINNED, resume=True, before=first_starts_end).finish()
    assert evaluated(pinned, "eval") == ours
    log = (pinned.folder / "log.txt").read_text()
    both = log.count("ended with status 3; "), log.count("replica 0: restart 1 of 3 in 0.5 s\n")
    assert both == (2, 2)  # one of each kind
    assert [row for row in pinned.rows() if row["phase"] == "rl"][-1]["engine/restarts"] == 1


def listening(run: Run) -> int:
    """Check the sockets of the server that evaluates alone, which no process of a forked run began, and count them."""
    log, found = str((run.folder / "eval_0.log").resolve()), 0
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/1") == log:
                found += check_server(process)
    return found


def server(run: Run) -> psutil.Process:
    """The one that evaluates alone: the last of the processes that write its log, below its guard."""
    there = [one for one in family(run.process.pid) if os.readlink(f"/proc/{one.pid}/fd/1").endswith("/eval_0.log")]
    parents = {one.ppid() for one in there}
    (found,) = (one for one in there if one.pid not in parents)
    return found


def test_the_death_of_its_server_ends_no_run(place: Place) -> None:
    """The server is killed before the evaluation of step 2; another starts, for that of step 4 or later."""
    run = place.fork("dies", *KEYS, *PINNED, "train.steps=9", "rollout.server.backoff_seconds=0.1")
    run.until(lambda: len(run.rows()) > 1, "the first step")
    assert listening(run) == 1
    server(run).kill()
    run.finish()
    assert [row["step"] for row in run.rows() if row["phase"] == "rl"] == list(range(10))
    assert "ended with status -9" in (run.folder / "log.txt").read_text()
    made = [row for row in run.rows() if row["phase"] == "eval"]
    assert {row["eval/own_version_fraction"] for row in made} <= {1.0}
    assert not made or made[0]["step"] == 2 * (1 + made[0]["eval/skipped"])
