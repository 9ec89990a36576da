"""``python -m tests.kills.run``: is any prompt lost, or trained on twice, in a run that is killed at a hundred points?

One run of the tiny model with two servers and train.max_staleness=2 is killed and continued again and again: at calls
that a fixed seed draws, and at moments. A command that was ended goes on where it was. It ends with 1 where the run's
files, read by json alone, lack a prompt or have one twice, or where none has tokens as old as allowed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.processes import REWARDS, Place, Run
from tests.kills.points import After, Point, Witness
from tests.kills.reader import DIGITS, NUM_EVAL, Found, found, lines_of, trained_by_the_learner, went_on

# A run of the tiny model with two servers and staleness, which is killed, and continued, as often as one likes.
SIZE, STALENESS, NAME = 4, 2, "killed"
KEYS = (
    *("learner.ep=1", "reward.function=my_rewards:slow_for_some", "rollout.server.replicas=2", f"data.digits={DIGITS}"),
    *("warm_start.steps=0", "eval.every=0", "train.lr_decay=none", f"train.max_staleness={STALENESS}"),
    *("checkpoint.every=1", f"log.samples_per_step={SIZE}", f"data.num_eval={NUM_EVAL}"),
    # So that pushes and checkpoints find completions under way:
    *("rollout.max_new_tokens=64", "rollout.ignore_eos=true", "rollout.server.max_concurrent_groups=1"),
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
        return self.place.fork(NAME, *KEYS, f"train.steps={steps}", resume=self.folder.exists(), before=witness)


DONE = "done.jsonl"
EACH_STEP = {
    "rl_megatron.rollout.stream:RolloutStream": ("take", "wait_until_pushable", "on_push", "collect_partials", "state"),
    "rl_megatron.rollout.stream:Ledger": ("end", "write", "check", "state"),
    "rl_megatron.engines.weights:ReplicaWeights": ("load", "commit"),
    "rl_megatron.training.checkpoints:CheckpointStore": ("save", "_make_room", "_publish"),
    "rl_megatron.training.checkpoints": ("publish_folder", "digest_bytes"),
    "rl_megatron.training.update:PolicyUpdate": ("__call__",),
    "rl_megatron.observability.recorder:Recorder": ("write", "write_samples"),
}
OFTEN = {
    "rl_megatron.engines.local.adapter:EmbeddedAdapter": ("pause", "load", "resume", "relabel", "generate"),
    "rl_megatron.rollout.stream:RolloutStream": ("_draw", "_answer", "_sample"),
    "rl_megatron.observability.files:JsonlFile": ("append",),
}
RESUMES = ("rl_megatron.rollout.stream:RolloutStream.restore", "rl_megatron.rollout.stream:Ledger.restore")
RESUMES += ("rl_megatron.training.jobs.rl:RLJob.restore", "rl_megatron.observability.files:write_atomically")
FIRST = Point(
    name="training, once there is a checkpoint", call="rl_megatron.training.update:PolicyUpdate.__call__", nth=4
)


def points(seed: int, count: int) -> list[Point | After]:
    """The first lets the run have a checkpoint, so that those of a resume are met."""
    draw, found = random.Random(seed), list[Point | After]([FIRST])
    while len(found) < count:
        kind, after = draw.random(), draw.random() < 0.5
        if kind < 0.25:
            found.append(After(name=f"{(seconds := draw.uniform(0, 8)):.2f} s", seconds=seconds))
            continue
        if kind < 0.35:
            call, nth = draw.choice(RESUMES), 1
        else:
            table, most = (EACH_STEP, 4) if kind < 0.7 else (OFTEN, 12)
            call = draw.choice([f"{one}{'.' if ':' in one else ':'}{name}" for one in table for name in table[one]])
            nth = draw.randint(1, most)
        torn = call.endswith("Ledger.write") and after and draw.random() < 0.5
        name = f"{'after' if after else 'before'} call {nth} of {call.partition(':')[2]}{', torn' * torn}"
        found.append(Point(name=name, call=call, nth=nth, after=after, torn=torn))
    return found


def main() -> int:
    """Kills the run at what is left of the points, lets it end, and reads its files."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills.run", description=__doc__)
    parser.add_argument("--points", type=int, default=100, help="how often to kill the run")
    parser.add_argument("--seed", type=int, default=18, help="which points")
    parser.add_argument("--folder", type=Path, default=Path("build/kills"), help="the run; remove it to begin again")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_rewards.py").write_text(REWARDS)
    place = Place(folder=folder, cache=folder / "models")
    try:
        return kill_all(Series(place=place), points(options.seed, options.points), folder / DONE)
    finally:
        place.clear()


def kill_all(series: Series, wanted: list[Point | After], done: Path) -> int:
    """Print each kill as it comes, and what the run has come to."""
    before, start, wrong = len(lines_of(done)), time.monotonic(), 0
    if before:
        print(f"going on after {before} kills of {series.folder}", flush=True)
    for number, point in enumerate(wanted[before:], before + 1):
        there = series.kill(point)
        wrong += there is not None and not right(there)
        left = (time.monotonic() - start) / (number - before) * (len(wanted) - number) / 60
        said = "no checkpoint yet" if there is None else told(there)
        print(f"{number} of {len(wanted)}, {left:.0f} min left: {point.name}: {said}", flush=True)
        with done.open("a") as file:
            file.write(json.dumps({"point": point.name, "found": said}) + "\n")
        for output in series.place.folder.glob("output-*.txt"):
            output.unlink()
    there = found(series.finish().folder)
    equal = trained_by_the_learner(series.place.folder) == there.trained
    print(f"{len(wanted)} kills: {told(there)}")
    print(f"the learner trained on {'what' if equal else 'OTHER prompts than'} the ledger says")
    aged = max(there.ages, default=0) == STALENESS
    print(f"tokens as old as allowed were {'' if aged else 'NEVER '}trained on")
    return int(wrong > 0 or not equal or not right(there) or not aged)


def told(there: Found) -> str:
    """In words."""
    return (
        f"step {there.step}, {there.drawn} prompts drawn, lost {len(there.lost)}, twice {len(there.twice)}, "
        f"oldest token {max(there.ages, default=0)} pushes"
    )


def right(there: Found) -> bool:
    """Whether nothing is lost, made twice or too old."""
    return not there.lost and not there.twice and max(there.ages, default=0) <= STALENESS


if __name__ == "__main__":
    sys.exit(main())
