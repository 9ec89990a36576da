"""Reads the rows of a run and says what they show in at most five sentences, each with a verdict.

docs/troubleshooting.md lists the thresholds. tests/verdicts records the runs on which they were chosen and tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_megatron.observability.history import Floats
from rl_megatron.observability.metrics import PHASE_SECONDS

State = Literal["good", "watch", "bad"]

MIN_STEPS = 10
"""A run with fewer steps has no verdict."""
FLAT_STEPS = 40
"""Steps after which a reward that does not change is worth a look."""
SURE = 3.0
"""A change counts from this many standard errors on."""
FELL = 0.3
"""Reward fell if it lost this share of its best part."""
OVERFITTED = 0.1
"""Held-out accuracy fell if it lost this much from its start or its best three evaluations."""
NO_GRADIENT, FEW_GRADIENTS = 0.05, 0.1
"""Shares of groups with a gradient: bad, and worth a look."""
SOLVED = 0.5
"""If this share of groups has all completions correct, low entropy and equal rewards are success. If it has already in
the first part, the data are too easy."""
LOW_ENTROPY, FALLING_ENTROPY, RISING_ENTROPY = 0.05, 0.2, 2.0
"""Last over first entropy: bad and worth a look where it falls, bad where it rises while reward falls."""
MISMATCH = {"float32": (1e-4, 1e-2), "bfloat16": (0.05, 1.0)}
"""The largest healthy mean and maximum difference of log-probs, in nats, by the learner's data type."""
OLD_KL, CLIPPED = 0.2, 0.5
"""KL to the old policy in nats, and share of clipped tokens, from which on updates are too large."""
ERRORS, TRUNCATED, LONGER = 0.01, 0.5, 2.0
"""Shares of failed rewards and of cut completions, and growth of the length, that are worth a look."""
SLOWER = 1.5
"""Measured over planned seconds of a phase that are worth a look."""

_ACCURACY, _REWARDS = "eval/accuracy", ("reward/sampled_mean", "reward/mean")
_MISMATCH = ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "kl/old_policy", "clip_fraction")
_GROUPS = ("groups/zero_advantage_fraction", "groups/all_correct", "groups/none_correct")
_PHASES = tuple(f"seconds/{phase}" for phase in PHASE_SECONDS)
READS = (
    *("step", _ACCURACY, "eval/loss", *_REWARDS, "reward/errors", *_GROUPS, "groups/trained", "groups/filtered"),
    *("advantage/std", "grad_norm", "entropy", *_MISMATCH, "response/length_mean", "response/truncated_fraction"),
    *("steps/skipped", "seconds/step", *_PHASES),
)
"""The metrics that `read_run` reads; a row may lack any of them."""
_NAMES = {"rollout": "sampling", "train": "training", "weights": "weight pushes", "logprobs": "log-probs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One sentence about a run. ``charts`` are the metrics that it is about, the main one first."""

    topic: str  # learning, groups, entropy, mismatch, completions or time
    state: State
    sentence: str
    charts: tuple[str, ...]


def read_run(
    rows: Sequence[Mapping[str, object]],
    *,
    plan: Mapping[str, float] | None = None,
    needs_differences: bool = True,
    dtype: str = "float32",
) -> list[Verdict]:
    """Returns at most five verdicts, each of another topic; none for a run of fewer than `MIN_STEPS` steps.

    Args:
        rows: metrics.jsonl in order, or the columns `READS` of it. Rows of the warm start are skipped.
        plan: planned values of metrics, by name (plan.json).
        needs_differences: groups of equal rewards give no gradient.
        dtype: the learner's data type, which sets the limits of the mismatch.
    """
    run = _Run(rows)
    if run.steps < MIN_STEPS:
        return []
    found = (
        _learning(run, needs_differences),
        _groups(run) if needs_differences else None,
        _entropy(run),
        _mismatch(run, dtype),
        _completions(run) or _time(run, plan or {}),
    )
    return [verdict for verdict in found if verdict is not None]


def describe_verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns a line for each verdict that is not good, or one line if all are good; none without verdicts."""
    lines = [f"{verdict.state}: {verdict.sentence}" for verdict in verdicts if verdict.state != "good"]
    good = ", ".join(verdict.topic for verdict in verdicts)
    return lines or ([f"healthy: {good}"] if good else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Means over the first, the best and the last part of a metric, and the standard error of a difference."""

    first: float
    best: float
    last: float
    error: float
    at: int  # index of the middle of the best part

    @property
    def rose(self) -> bool:
        return self.last - self.first > SURE * self.error

    @property
    def fell(self) -> bool:
        lost = self.best - self.last
        return self.first - self.last > SURE * self.error or lost > max(SURE * self.error, FELL * abs(self.best))


class _Run:
    """The values of each metric, without steps that lack it."""

    def __init__(self, rows: Sequence[Mapping[str, object]]) -> None:
        chosen = [row for row in rows if row.get("phase") != "warm_start"]
        self._values, self._steps = dict[str, Floats](), dict[str, Floats]()
        steps = _numbers(chosen, "step")
        for name in READS:
            values = _numbers(chosen, name)
            known = np.isfinite(values)
            self._values[name], self._steps[name] = values[known], steps[known]
        self.reward = next((name for name in _REWARDS if len(self[name])), "")
        self.steps = len(self["seconds/step"]) or len(self[self.reward or "grad_norm"])

    def __getitem__(self, name: str) -> Floats:
        return self._values[name]

    def has(self, *names: str) -> tuple[str, ...]:
        """Returns the names of recorded metrics."""
        return tuple(name for name in names if len(self._values[name]))

    def last(self, name: str) -> float:
        """Returns the mean of the last part; NaN if the metric is not recorded."""
        values = self[name][-_part(len(self[name])) :]
        return float(values.mean()) if len(values) else math.nan

    def first(self, name: str) -> float:
        """Returns the mean of the first part; NaN if the metric is not recorded."""
        values = self[name][: _part(len(self[name]))]
        return float(values.mean()) if len(values) else math.nan

    def change(self, name: str, part: int | None = None) -> _Change:
        """Compares parts of a metric. Steps that follow each other give the noise, so a trend does not count as
        noise."""
        values = self[name]
        size = min(part or _part(len(values)), len(values))
        noise = float(np.mean(np.diff(values) ** 2)) / 2 if len(values) > 1 else 0.0
        sums = np.concatenate([[0.0], np.cumsum(values)])
        means = (sums[size:] - sums[:-size]) / size
        best = int(means.argmax())
        error = math.sqrt(2 * noise / size)
        return _Change(first=means[0], best=means[best], last=means[-1], error=error, at=best + size // 2)

    def find_step(self, name: str, place: int) -> int:
        """Returns the step of a value."""
        return int(self._steps[name][place])


def _part(count: int) -> int:
    """A fifth of the values, 3 to 50."""
    return max(3, min(50, count // 5))


def _numbers(rows: Sequence[Mapping[str, object]], name: str) -> Floats:
    found = [value if isinstance(value := row.get(name), int | float) else math.nan for row in rows]
    return np.array(found, np.float64)


def _learning(run: _Run, needs_differences: bool) -> Verdict | None:
    if not run.reward:
        return _loss(run)
    reward = run.change(run.reward)
    held_out = run.change(_ACCURACY, 3) if len(run[_ACCURACY]) >= 4 else None

    def verdict(state: State, sentence: str) -> Verdict:
        names = run.has(*_REWARDS[::-1], _ACCURACY)  # the page hides a chart that equals another
        charts = names if sentence.startswith("Reward") else names[::-1]
        return Verdict(topic="learning", state=state, sentence=sentence, charts=charts)

    moved = f"reward went from {reward.first:.3g} to {reward.last:.3g}"
    if held_out is not None and (fall := _fall(run, held_out)):
        advice = "Resume an earlier checkpoint with a lower train.learning_rate."
        if not reward.rose:
            return verdict("bad", f"Held-out accuracy fell {fall}, and {moved}. {advice}")
        return verdict("bad", f"Overfitting: held-out accuracy fell {fall}, while {moved}. Use more problems.")
    if reward.fell:
        step = run.find_step(run.reward, reward.at)
        return verdict(
            "bad",
            f"Reward fell from {reward.best:.3g} (step {step}) to {reward.last:.3g}. Resume an earlier checkpoint "
            "with a lower train.learning_rate.",
        )
    accuracy = ""
    if held_out is not None:
        gained = 100 * (held_out.last - float(run[_ACCURACY][0]))
        accuracy = f", and held-out accuracy {'rose' if gained > 0 else 'fell'} by {abs(gained):.0f} points"
        accuracy += f" to {_share(held_out.last)}"
    if reward.rose:
        error = f"± {2 * reward.error:.2g}"
        by = f"Reward rose by {reward.last - reward.first:.3g} {error} to {reward.last:.3g}{accuracy}."
        return verdict("good", f"Learning. {by}")
    if needs_differences and run.has(_GROUPS[0]) and _has_no_gradient(run):
        return verdict("bad", f"Nothing is learned: reward stays at {reward.last:.3g}, and no group has a gradient.")
    if run.steps < FLAT_STEPS:
        return None
    return verdict("watch", f"Not learning yet: {moved} (± {2 * reward.error:.2g}) in {run.steps} steps.")


def _has_fallen(run: _Run) -> bool:
    has_accuracy = len(run[_ACCURACY]) >= 4
    fell = bool(run.reward) and run.change(run.reward).fell
    return fell or (has_accuracy and bool(_fall(run, run.change(_ACCURACY, 3))))


def _fall(run: _Run, held_out: _Change) -> str:
    """Describes how far held-out accuracy fell from its start or its best three evaluations; empty if it did not."""
    start = float(run[_ACCURACY][0])
    best, step = (start, 0) if start > held_out.best else (held_out.best, run.find_step(_ACCURACY, held_out.at))
    if best - held_out.last <= max(OVERFITTED, SURE * held_out.error):
        return ""
    return f"from {_share(best)} (step {step}) to {_share(held_out.last)}"


def _has_no_gradient(run: _Run) -> bool:
    return _gradient_share(run) <= NO_GRADIENT and not run.last("advantage/std") > 0


def _gradient_share(run: _Run) -> float:
    """Returns the share of sampled groups with a gradient; groups of dynamic sampling count as sampled."""
    trained, filtered = run.last("groups/trained"), run.last("groups/filtered")
    kept = trained / (trained + filtered) if trained + filtered > 0 else 1.0
    equal = run.last("groups/zero_advantage_fraction")
    return kept * (1 - (0.0 if math.isnan(equal) else equal))


def _loss(run: _Run) -> Verdict | None:
    """Judges the held-out loss of a job on a dataset."""
    if len(run["eval/loss"]) < 2:
        return None
    losses = run["eval/loss"]
    best, last = float(losses.min()), float(losses[-1])
    step = run.find_step("eval/loss", int(losses.argmin()))
    if last - best > max(0.02 * abs(best), 0.1 * abs(float(losses[0]) - best)):
        text = f"Overfitting: held-out loss rose from {best:.4g} (step {step}) to {last:.4g}. Use fewer passes."
        return Verdict(topic="learning", state="bad", sentence=text, charts=("eval/loss",))
    state: State = "good" if last < losses[0] else "watch"
    text = f"Held-out loss went from {losses[0]:.4g} to {last:.4g}."
    return Verdict(topic="learning", state=state, sentence=text, charts=("eval/loss",))


def _groups(run: _Run) -> Verdict | None:
    share, charts = _gradient_share(run), run.has(*_GROUPS)
    right, wrong = run.last("groups/all_correct"), run.last("groups/none_correct")
    sentence = f"{_share(share)} of the groups have a gradient"
    if not math.isnan(right):
        sentence += f"; in {_share(right)} all completions are correct, in {_share(wrong)} none"
    if not charts or (share == 0 and run.last("advantage/std") > 0):  # another baseline gives equal rewards a gradient
        return None
    state: State = "bad" if share <= NO_GRADIENT else "watch" if share < FEW_GRADIENTS else "good"
    if state != "good":
        is_solved = right >= SOLVED
        if is_solved and run.first("groups/all_correct") < SOLVED:
            state, advice = "good", "The run has solved its data"
        elif is_solved:
            advice = "Use harder data"
        elif wrong >= SOLVED and _has_fallen(run):
            advice = "The policy has lost what it could do"
        elif wrong >= SOLVED:
            advice = "Use easier data, partial credit or a warm start"
        else:
            advice = "Read samples.jsonl: rewards hardly differ"
        sentence += f". {advice}"
    return Verdict(topic="groups", state=state, sentence=f"{sentence}.", charts=charts)


def _entropy(run: _Run) -> Verdict | None:
    if len(run["entropy"]) < MIN_STEPS:
        return None
    first, last = run.first("entropy"), run.last("entropy")
    over = last / first if first > 0 else 1.0
    reward = run.change(run.reward) if run.reward else None
    numbers = f"from {first:.3g} to {last:.3g} nats"
    state: State = "good"
    sentence = f"Entropy is healthy: {numbers}."
    if over >= RISING_ENTROPY and reward is not None and reward.fell:
        state = "bad"
        sentence = f"Entropy rose {numbers} while reward fell: the policy becomes random. Lower train.learning_rate."
    elif over <= FALLING_ENTROPY and not run.last("groups/all_correct") >= SOLVED:
        state = "bad" if over <= LOW_ENTROPY else "watch"
        verb = "collapsed" if state == "bad" else "falls fast"
        sentence = f"Entropy {verb}, {numbers}. Lower the learning rate, add a KL term, or raise the upper clip."
    return Verdict(topic="entropy", state=state, sentence=sentence, charts=("entropy",))


def _mismatch(run: _Run, dtype: str) -> Verdict | None:
    charts = run.has(*_MISMATCH)
    if not charts:
        return None
    mean, largest, old, clipped = (run.last(name) for name in _MISMATCH)
    most_mean, most = MISMATCH.get(dtype, MISMATCH["bfloat16"])
    parts = [f"log-prob mismatch {mean:.2g} nats (at most {most_mean:g})"] if not math.isnan(mean) else []
    parts += [f"KL to the old policy {old:.2g}"] if not math.isnan(old) else []
    parts += [f"{_share(clipped)} clipped"] if not math.isnan(clipped) else []
    numbers = ", ".join(parts)
    state: State = "good"
    sentence = f"Updates are healthy: {numbers}."
    if mean > most_mean:
        state = "bad"
        sentence = f"Engine and learner disagree: {numbers}. Run rl-megatron doctor mismatch."
    elif largest > most:
        state = "watch"
        sentence = f"Engine and learner disagree in single tokens, by up to {largest:.2g} nats: {numbers}."
    elif old > OLD_KL or clipped > CLIPPED:
        state = "watch"
        sentence = f"Updates are large: {numbers}. Lower the learning rate or train.epochs."
    return Verdict(topic="mismatch", state=state, sentence=sentence, charts=charts)


def _completions(run: _Run) -> Verdict | None:
    """Returns the first thing about completions and optimizer steps that a user should act on."""
    problems = []
    if (errors := run.last("reward/errors")) > 0 and errors > ERRORS * run.last("groups/trained"):
        problems.append(("reward/errors", f"{errors:.3g} rewards a step fail: log.txt names the prompts"))
    if run.last("steps/skipped") > 0:
        problems.append(("steps/skipped", "optimizer steps are skipped, because gradients are not finite"))
    length = run.first("response/length_mean"), run.last("response/length_mean")
    if length[1] > LONGER * length[0] and run.reward and not run.change(run.reward).rose:
        problems.append(("response/length_mean", f"completions grew from {length[0]:.0f} to {length[1]:.0f} tokens"))
    if (cut := run.last("response/truncated_fraction")) > TRUNCATED:
        problems.append(
            ("response/truncated_fraction", f"{_share(cut)} of completions are cut: raise rollout.max_new_tokens")
        )
    if not problems:
        return None
    sentence = "; ".join(text for _, text in problems)
    charts = tuple(name for name, _ in problems)
    return Verdict(topic="completions", state="watch", sentence=f"{sentence[0].upper()}{sentence[1:]}.", charts=charts)


def _time(run: _Run, plan: Mapping[str, float]) -> Verdict | None:
    seconds = run.last("seconds/step")
    if not seconds > 0:
        return None
    shares = {name: float(run[name].sum() / run["seconds/step"].sum()) for name in run.has(*_PHASES)}
    largest = sorted(shares, key=lambda name: -shares[name])[:3]
    text = ", ".join(f"{_phase(name)} {_share(shares[name])}" for name in largest if shares[name] >= 0.01)
    sentence = f"A step takes {seconds:.3g} s: {text}"
    slow = [name for name in largest if plan.get(name) and run.last(name) > SLOWER * plan[name]]
    if planned := [name for name in largest if plan.get(name)]:
        both = ", ".join(
            f"{_phase(name)} {plan[name]:.3g} s planned, {run.last(name):.3g} s measured" for name in planned
        )
        sentence += f"; {both}"
    state: State = "watch" if slow else "good"
    return Verdict(topic="time", state=state, sentence=f"{sentence}.", charts=("seconds/step", *largest))


def _phase(name: str) -> str:
    phase = name.removeprefix("seconds/")
    return _NAMES.get(phase, phase)


def _share(value: float) -> str:
    """Formats a share in percent."""
    return f"{100 * value:.0f} %"
