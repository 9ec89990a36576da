"""Prompts drawn for a run, what a source answers for each, and the batch of a step, which is made of such answers.

Where every prompt is that a run drew: on its way, trained on in one step, or dropped for a reason.

``runs/<name>/ledger.jsonl`` has a line for each prompt that a step trained on, or found dropped. A resume cuts the file
back to its checkpoint's step, and compares its end with the checkpoint's, and where that differs each line before it.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from rl_megatron.errors import CheckpointError
from rl_megatron.files import ForeignText
from rl_megatron.observability.files import JsonlFile, JsonRow, rows_from
from rl_megatron.types import Completion, Prompt, RolloutGroup, Scored, Trajectory

logger = logging.getLogger(__name__)

Reason = Literal[
    "equal_rewards",
    "zero_advantages",
    "reward_error",
    "poison",
    "environment_error",
    "long_prompt",
    "nothing_sampled",
]
"""Why a prompt that was drawn is not trained on."""
UNTAUGHT: Collection[Reason] = ("equal_rewards", "zero_advantages")
"""Of a group that would give no gradient: its rewards, or the advantages that the user's own function gives it."""

POISON_SHARE = 0.01
"""More poison than this share of prompts, and than one, is an engine's fault or that of the data, and ends the run."""


def reason_of(parts: Iterable[tuple[Reason | None, ForeignText]]) -> tuple[Reason, ForeignText]:
    """Why a group is left out, with the problem, of those of its parts: poison if one of them is, since the prompt must
    not be asked again; else the first reason."""
    reasons = [(reason, problem) for reason, problem in parts if reason is not None]
    return min(reasons, key=lambda one: one[0] != "poison")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A prompt to sample a group of; its seeds are functions of ``batch``, ``time`` and the prompt's id."""

    ordinal: int  # how many prompts the run drew before it
    prompt: Prompt
    batch: int  # 1 + ordinal // rollout.prompts_per_step
    time: int = 1  # counts how often its ``batch`` drew the prompt, as it does where an epoch ends
    begun: tuple[Completion | None, ...] = ()  # what was sampled of each completion before a resume

    def name(self, kind: str = "") -> str:
        """The name in requests, of ``kind`` where it has several; with the prompt's id seeds depend on it."""
        again = f", time {self.time}" if self.time > 1 else ""
        return f"step {self.batch}{kind}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt's group, and what was scored of it."""

    group: RolloutGroup | None  # None: it is left out, for ``reason``
    reason: Reason | None = None
    problem: ForeignText = ""  # what the engine said of a prompt that is poison
    rewards: tuple[float, ...] = ()  # of its completions, also where it is left out; none if one of them failed
    scored: tuple[Scored, ...] = ()
    greedy: tuple[Scored, ...] = ()  # of the greedy completion, if there is one
    demonstrated: tuple[Scored, ...] = ()  # of the demonstration, if there is one
    left_out_tokens: int = 0  # that were sampled and are in no group: it, or some of its trajectories, is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A prompt that was drawn and is not trained on yet."""

    drawn: Drawn
    birth: int  # the version served when it was drawn
    due: int  # the last step that may train on it
    answered: Answered | None = None  # once its group is scored

    @property
    def kept(self) -> bool:
        """Whether its group may be trained on."""
        return self.answered is not None and self.answered.group is not None

    @property
    def key(self) -> tuple[int, int]:
        """The order in which steps take groups."""
        return self.due, self.drawn.ordinal


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The groups of one step, and counts of what was scored, failed or left out."""

    groups: tuple[RolloutGroup, ...] = ()
    num_completions: int = 0  # scored, including those of groups that are left out
    reward_sum: float = 0.0  # of these
    num_tokens: int = 0  # sampled, including those of groups and trajectories that are left out
    reward_errors: int = 0  # completions whose reward raised, timed out or was not finite
    late_rewards: int = 0  # those that timed out
    dropped_groups: int = 0  # groups left out for another reason than the next
    filtered_groups: int = 0  # groups left out because they would give no gradient
    part_sums: Mapping[str, float] = field(default_factory=dict)  # of each part of a weighted reward, unweighted
    part_counts: Mapping[str, int] = field(default_factory=dict)  # completions in these: those of finite parts alone
    places: tuple[Waiting, ...] = ()  # of all these, if they were drawn

    @classmethod
    def of(cls, answered: Sequence[Answered]) -> RolloutBatch:
        """The batch of these answers; its groups are in their order."""
        rewards = [reward for one in answered for reward in one.rewards]
        scored = [scored for one in answered for scored in (*one.scored, *one.greedy, *one.demonstrated)]
        parts = [s.parts for one in answered if one.rewards for s in one.scored if s.error is None and s.parts]
        names = dict.fromkeys(name for one in parts for name in one)  # sources have their own rewards
        filtered = sum(one.reason in UNTAUGHT for one in answered)
        return cls(
            groups=(groups := tuple(one.group for one in answered if one.group is not None)),
            num_completions=len(rewards),
            reward_sum=math.fsum(rewards),
            num_tokens=sum(map(sampled_tokens, groups)) + sum(one.left_out_tokens for one in answered),
            reward_errors=sum(one.error is not None for one in scored),
            late_rewards=sum(one.late for one in scored),
            dropped_groups=len(answered) - len(groups) - filtered,
            filtered_groups=filtered,
            part_sums={name: math.fsum(one[name] for one in parts if name in one) for name in names},
            part_counts={name: sum(name in one for one in parts) for name in names},
        )

    def part_means(self) -> dict[str, float]:
        """``reward/part/<name>`` of each part, over the completions of ``reward/sampled_mean`` whose reward has it."""
        return {f"reward/part/{name}": total / self.part_counts[name] for name, total in self.part_sums.items()}


def sampled_tokens(group: RolloutGroup) -> int:
    """How many were sampled, those of its greedy completion too."""
    sampled = sum(one.num_sampled for one in group.trajectories)
    return sampled + (0 if group.greedy is None else sampled_tokens(group.greedy))


class GroupSource(Protocol):
    """Samples and scores the completions that a job trains on."""

    async def groups(self, drawn: Sequence[Drawn]) -> Sequence[Answered]:
        """A group of each prompt, in their order, all requested together; it goes on from what was ``begun``."""
        ...

    async def interrupt(self) -> None:
        """Have `so_far` know every token that was sampled up to now. Sampling goes on."""
        ...

    def so_far(self, drawn: Drawn) -> tuple[Completion | None, ...]:
        """What is known of each completion of a group that is being sampled or scored; empty if nothing is."""
        ...


Whereabouts = Literal["queued", "in_flight", "buffered", "left_out"]
"""Of a prompt without a line: not sent yet, being sampled or scored, scored, or dropped since the last step."""
_BEFORE: Mapping[Whereabouts, Whereabouts | None] = {
    "queued": None,
    "in_flight": "queued",
    "buffered": "in_flight",
    "left_out": "in_flight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The prompts that have a line, for checkpoints."""

    trained: int = 0
    dropped: Mapping[Reason, int] = field(default_factory=dict)
    digest: str = "0" * 64  # XOR of the SHA-256 of "<ordinal> <step, or why it was dropped>" of each
    whole: bool = True  # whether the file has them all: it was not lost
    end: str = ""  # JsonlFile.end; of older versions empty


class Ledger:
    """Follows each prompt of a Stream, and asserts what must be so; ``path`` is its file, if it has one."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else JsonlFile(path)
        self._open: dict[int, Whereabouts] = {}
        self._trained, self._dropped, self._digest, self._whole = 0, Counter[Reason](), 0, True

    def move(self, ordinals: Iterable[int], to: Whereabouts) -> None:
        """Note where these prompts are now; each goes queued, in_flight, and then buffered or left_out."""
        for ordinal in ordinals:
            assert self._open.get(ordinal) == _BEFORE[to], (ordinal, self._open.get(ordinal), to)
            self._open[ordinal] = to

    def end(self, trained: Sequence[Waiting], dropped: Sequence[Waiting], lines: Sequence[JsonRow]) -> None:
        """Note the prompts that a step trains on, and those that were dropped since the one before; ``lines`` are their
        `lines_of`, which `write` writes."""
        for one in trained:
            assert self._open.pop(one.drawn.ordinal) == "buffered", one.drawn
        for one in dropped:
            assert self._open.pop(one.drawn.ordinal) == "left_out", one.drawn
        self._count(lines)

    def write(self, lines: Sequence[JsonRow]) -> None:
        """Append the lines of prompts that have ended, durably. Called in a thread, after `end`, and one at a time."""
        if self._file is not None:
            self._file.append(lines)

    def check(self, drawn: int) -> None:
        """Find every prompt drawn in one place."""
        ended = self._trained + self._dropped.total()
        assert len(self._open) + ended == drawn, (len(self._open), self._trained, self._dropped, drawn)

    def row(self) -> dict[str, int]:
        """The metrics ``ledger/…``."""
        now = Counter(self._open.values())
        counts = {
            "queued": now["queued"],
            "in_flight": now["in_flight"],
            "buffered": now["buffered"],
            "trained": self._trained,
            "dropped": self._dropped.total() + now["left_out"],
        }
        return {f"ledger/{name}": count for name, count in {"drawn": sum(counts.values()), **counts}.items()}

    def state(self) -> LedgerState:
        """What ``restore`` continues from."""
        dropped, digest = dict(self._dropped), f"{self._digest:064x}"
        end = "" if self._file is None else self._file.end()
        return LedgerState(trained=self._trained, dropped=dropped, digest=digest, whole=self._whole, end=end)

    def restore(self, state: LedgerState, step: int, waiting: Sequence[Waiting], left_out: Sequence[Waiting]) -> None:
        """Continue after ``step``, and cut the file back to it. Prompts without an answer are queued.

        Raises CheckpointError if the lines up to ``step`` are not those of the checkpoint.
        """
        self._open = {one.drawn.ordinal: _whereabouts(one) for one in (*waiting, *left_out)}
        self._trained, self._dropped, self._digest = state.trained, Counter(state.dropped), int(state.digest, 16)
        self._whole = state.whole
        if self._file is not None:
            self._cut(self._file, state, step)

    def _cut(self, file: JsonlFile, state: LedgerState, step: int) -> None:
        file.truncate_after(step)
        if not file.path.exists():
            if self._trained or self._dropped:
                self._whole = False
                logger.warning("%s is gone: it will have the prompts of steps after %d alone", file.path, step)
            return
        if not state.whole or file.end() == state.end:
            return
        there = Ledger()
        there._count(rows_from(file.path))
        if there.state() != replace(state, end=""):
            raise CheckpointError(
                f"{file.path}: its {there._trained} prompts trained on and {there._dropped.total()} dropped up to step "
                f"{step} are not the {state.trained} and {sum(state.dropped.values())} of the checkpoint; restore the "
                "file, or remove it to resume without its lines"
            )

    def _count(self, rows: Iterable[JsonRow]) -> None:
        for row in rows:
            ended = row["step"] if row["state"] == "trained" else row["reason"]
            self._digest ^= int(hashlib.sha256(f"{row['ordinal']} {ended}".encode()).hexdigest(), 16)
            if row["state"] == "trained":
                self._trained += 1
            else:
                self._dropped[row["reason"]] += 1  # type: ignore[index]


def _whereabouts(one: Waiting) -> Whereabouts:
    if one.answered is None:
        return "queued"
    return "buffered" if one.answered.group is not None else "left_out"


def lines_of(step: int, places: Sequence[Waiting]) -> list[JsonRow]:
    """The lines of prompts that end with ``step``; visits every turn."""
    return [_line(step, one) for one in places]


def _line(step: int, one: Waiting) -> JsonRow:
    """A line of the file; ``spans`` are of each completion or trajectory.

    ``failed`` counts completions whose reward failed, and trajectories whose environment did.
    """
    assert one.answered is not None
    group, reason = one.answered.group, one.answered.reason
    return {
        "step": step,
        "ordinal": one.drawn.ordinal,
        "prompt": one.drawn.prompt.id,
        "state": "dropped" if group is None else "trained",
        "reason": reason,
        "birth": one.birth,
        "failed": sum(scored.error is not None for scored in one.answered.scored),
        "spans": "" if group is None else ", ".join(map(_spans, group.trajectories)),
    }


def _spans(trajectory: Trajectory) -> str:
    """Where another version goes on, as <first token>:<version>, counted over the sampled tokens of all turns."""
    found, sampled, last = list[str](), 0, None
    for turn in trajectory.turns:
        for span in turn.spans:
            if span.version != last:
                found.append(f"{sampled + span.start}:{span.version}")
                last = span.version
        sampled += len(turn.logprobs)
    return " ".join(found)
