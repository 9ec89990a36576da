"""``python -m tests.learns.run``: do the recipes calculator, sft_tiny, dpo_tiny, reward_tiny and distill_tiny learn,
with each of three seeds, within their bars? The teacher of distill_tiny is what sft_tiny trained.

Each run is ``rl-megatron train --config RECIPE`` in a process of its own, one after the other. The command ends with 1
where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rl_megatron.evaluation.results import read_results
from tests.e2e.processes import Place, Run

MOST_BEFORE, LEAST_AFTER, LIMIT_SECONDS = 0.35, 0.95, 300.0
LEAST_FINE_TUNED = 0.9  # of held-out sums, sampled greedily
LEAST_PREFERRED = 0.78  # of held-out pairs, in the right order
LEAST_DISTILLED = 0.8  # of held-out sums, of a student that begins at a tenth


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Held-out accuracy of greedy trajectories before the first step of reinforcement learning, and the best behind it;
    ``step`` has that. ``seconds`` of the whole run, its start and warm start included."""

    seed: int
    before: float
    after: float
    step: int
    seconds: float

    least: float = LEAST_AFTER

    @property
    def within_bars(self) -> bool:
        """Whether it learned enough, from little enough, soon enough."""
        return self.before <= MOST_BEFORE and self.after >= self.least and self.seconds <= LIMIT_SECONDS

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.before:.3f} before, {self.after:.3f} after step {self.step}, "
            f"{self.seconds:.0f} s (load {os.getloadavg()[0]:.1f}){'' if self.within_bars else ': MISSED'}"
        )


def learned(call: Callable[..., Run], place: Place, *more: str, seed: int, steps: int) -> Learned:
    """Train the recipe for ``steps`` steps in ``place``, with ``more`` keys; ``call`` is its command line. Fails where
    that does."""
    return _reinforced(call, place, "calculator", f"seed-{seed}", seed, LEAST_AFTER, f"train.steps={steps}", *more)


def distilled(call: Callable[..., Run], place: Place, *, seed: int) -> Learned:
    """Train the recipe distill_tiny in ``place`` by the teacher that `fine_tuned` left."""
    (teacher,) = (place.folder / "runs" / f"sft-{seed}").glob("hf_step_*")
    keys = (f"distill-{seed}", seed, LEAST_DISTILLED, f"algorithm.kl.reference={teacher}")
    return _reinforced(call, place, "distill_tiny", *keys)


def _reinforced(
    call: Callable[..., Run], place: Place, recipe: str, name: str, seed: int, least: float, *more: str
) -> Learned:
    run, took = _trained(call, place, recipe, name, seed, *more)
    held_out = {
        row["step"]: row["eval/accuracy"] for row in run.rows() if row["phase"] == "rl" and "eval/accuracy" in row
    }
    before, step = held_out.pop(0), max(held_out, key=lambda one: held_out[one])
    return Learned(seed=seed, before=before, after=held_out[step], step=step, seconds=took, least=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRows:
    """Of a recipe on written rows: held-out loss before the first step and after the last (nats of a token or a pair),
    the share of sums or of the order of pairs that is right then, and seconds."""

    recipe: str
    seed: int
    before: float
    after: float
    accuracy: float
    seconds: float
    least: float

    @property
    def within_bars(self) -> bool:
        """Whether it learned enough, soon enough."""
        return self.accuracy >= self.least and self.seconds <= LIMIT_SECONDS

    def __str__(self) -> str:
        return (
            f"{self.recipe}, seed {self.seed}: loss {self.before:.3f} before, {self.after:.3f} after, "
            f"{self.accuracy:.3f} right, {self.seconds:.0f} s{'' if self.within_bars else ': MISSED'}"
        )


def fine_tuned(call: Callable[..., Run], place: Place, *, seed: int) -> OnRows:
    """Train the recipe sft_tiny in ``place``, and measure it by ``rl-megatron eval``."""
    run, took = _trained(call, place, "sft_tiny", f"sft-{seed}", seed)
    losses = [row["eval/loss"] for row in run.rows() if "eval/loss" in row]
    call("eval", f"runs/sft-{seed}").finish()
    (results,) = (run.folder / "eval").glob("*.json")
    right = read_results(results).sets["held_out"].figures["mean@1"].value
    return OnRows(
        recipe="sft_tiny",
        seed=seed,
        before=losses[0],
        after=losses[-1],
        accuracy=right,
        seconds=took,
        least=LEAST_FINE_TUNED,
    )


def preferred(call: Callable[..., Run], place: Place, recipe: str, *, seed: int) -> OnRows:
    """Train the recipe in ``place``."""
    run, took = _trained(call, place, recipe, f"{recipe}-{seed}", seed)
    rows = [row for row in run.rows() if "eval/loss" in row]
    return OnRows(
        recipe=recipe,
        seed=seed,
        before=rows[0]["eval/loss"],
        after=rows[-1]["eval/loss"],
        accuracy=rows[-1]["eval/preference_accuracy"],
        seconds=took,
        least=LEAST_PREFERRED,
    )


def _trained(
    call: Callable[..., Run], place: Place, recipe: str, name: str, seed: int, *more: str
) -> tuple[Run, float]:
    """The run, and its seconds."""
    start = time.monotonic()
    keys = (f"seed={seed}", *more, f"run.name={name}", f"model.cache_dir={place.cache}")
    run = call("train", "--config", recipe, *keys, "learner.threads=1", "log.sinks=[]")
    run.folder = place.folder / "runs" / name
    run.finish()
    return run, round(time.monotonic() - start, 1)


def main() -> int:
    """Trains with each seed and prints what it learned beside the bars."""
    parser = argparse.ArgumentParser(prog="python -m tests.learns.run", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="of reinforcement learning")
    parser.add_argument("--folder", type=Path, default=Path("build/learns"), help="of the runs, must not be there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    place, rows = Place(folder=folder, cache=folder / "models"), list[Learned | OnRows]()
    print(
        f"bars: held out at most {MOST_BEFORE} before, at least {LEAST_AFTER} behind it, {LIMIT_SECONDS:g} s",
        flush=True,
    )
    try:
        for seed in options.seeds:
            rows.append(learned(place.call, place, seed=seed, steps=options.steps))
            print(rows[-1], flush=True)
        print(f"sft_tiny: at least {LEAST_FINE_TUNED} of held-out sums, {LIMIT_SECONDS:g} s", flush=True)
        for seed in options.seeds:
            rows.append(fine_tuned(place.call, place, seed=seed))
            print(rows[-1], flush=True)
        print(f"pairs: at least {LEAST_PREFERRED} of held-out ones, {LIMIT_SECONDS:g} s", flush=True)
        for recipe, seed in product(("dpo_tiny", "reward_tiny"), options.seeds):
            rows.append(preferred(place.call, place, recipe, seed=seed))
            print(rows[-1], flush=True)
        print(f"distill_tiny: at least {LEAST_DISTILLED} of held-out sums, {LIMIT_SECONDS:g} s", flush=True)
        for seed in options.seeds:
            rows.append(distilled(place.call, place, seed=seed))
            print(rows[-1], flush=True)
    finally:
        place.clear()
    if options.json:
        options.json.write_text(json.dumps([asdict(found) for found in rows], indent=1))
    return int(not all(found.within_bars for found in rows))


if __name__ == "__main__":
    sys.exit(main())
