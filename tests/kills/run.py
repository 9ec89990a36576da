"""``python -m tests.kills.run``: is any prompt lost, or trained on twice, in a run that is killed at a hundred points?

One run of the tiny model with two servers and train.max_staleness=2 is killed and continued again and again: at calls
that a fixed seed draws, and at moments. A command that was ended goes on where it was. It ends with 1 where the run's
files, read by json alone, lack a prompt or have one twice, or where none has tokens as old as allowed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from tests.e2e.processes import REWARDS, Place
from tests.kills.points import After, Point
from tests.kills.reader import Found, found, lines_of, trained_by_the_learner
from tests.kills.series import STALENESS, Series

DONE = "done.jsonl"
EACH_STEP = {
    "rl_megatron.rollout.stream:Stream": ("take", "settled", "pushed", "interrupt", "state"),
    "rl_megatron.rollout.batch:Ledger": ("end", "write", "check", "state"),
    "rl_megatron.engines.weights:ReplicaWeights": ("load", "commit"),
    "rl_megatron.training.checkpoints:CheckpointStore": ("save", "_make_room", "_publish"),
    "rl_megatron.training.checkpoints": ("publish_folder", "digest_of"),
    "rl_megatron.training.update:Update": ("__call__",),
    "rl_megatron.observability.recorder:Recorder": ("write", "write_samples"),
}
OFTEN = {
    "rl_megatron.engines.local.adapter:EmbeddedAdapter": ("pause", "load", "resume", "relabel", "generate"),
    "rl_megatron.rollout.stream:Stream": ("_draw", "_answer", "_sample"),
    "rl_megatron.observability.files:JsonlFile": ("append",),
}
RESUMES = ("rl_megatron.rollout.stream:Stream.restore", "rl_megatron.rollout.batch:Ledger.restore")
RESUMES += ("rl_megatron.training.jobs.rl:Reinforcement.restore", "rl_megatron.observability.files:write_atomically")
FIRST = Point(name="training, once there is a checkpoint", call="rl_megatron.training.update:Update.__call__", nth=4)


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
    run = series.finish()
    there = found(run.folder)
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
