"""A run of the tiny model with two servers and staleness, which is killed, and continued, as often as one likes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.processes import Place, Run
from tests.kills.points import After, Point, Witness
from tests.kills.reader import DIGITS, NUM_EVAL, Found, found, went_on

SIZE, STALENESS, NAME = 4, 2, "killed"
KEYS = (
    *("learner.ep=1", "reward.function=my_rewards:slow_for_some", "rollout.server.replicas=2", f"data.digits={DIGITS}"),
    *("warm_start.steps=0", "eval.every=0", "train.lr_decay=none", f"train.max_staleness={STALENESS}"),
    *("checkpoint.every=1", f"log.samples_per_step={SIZE}", "log.samples_per_group=1", f"data.num_eval={NUM_EVAL}"),
    # So that pushes and checkpoints find completions under way:
    *("rollout.max_new_tokens=64", "rollout.ignore_eos=true", "rollout.server.concurrency=1"),
)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One run in ``place``; a start goes on with what an earlier one left."""

    place: Place

    def kill(self, point: Point | After) -> Found | None:
        """Start the run and see it killed. Returns what its files then say; None before its first checkpoint."""
        self._start(100_000, point).killed()
        return found(self.folder) if self._saved() else None

    def finish(self) -> Run:
        """Let the run make two more steps, and end."""
        return self._start(self._saved() + 2, None).finish()

    def finish_after(self, completions: int) -> Run:
        """Let the run go on until so many of this start's completions went on over a push, and stop it."""
        before, run = self._saved(), self._start(100_000, None)
        run.until(lambda: went_on(self.folder, before) >= completions, f"{completions} that went on over a push")
        run.process.send_signal(signal.SIGTERM)
        return run.finish()

    @property
    def folder(self) -> Path:
        return self.place.folder / "runs" / NAME

    def _saved(self) -> int:
        """The step of the newest checkpoint; 0 before the first."""
        return max((int(path.name[-6:]) for path in self.folder.glob("checkpoints/step_*")), default=0)

    def _start(self, steps: int, point: Point | After | None) -> Run:
        witness = Witness(folder=self.place.folder, point=point)
        there = self.folder.exists()
        return self.place.fork(NAME, *KEYS, f"train.steps={steps}", resume=there, before=witness)
