"""Draws prompts ahead of training, has them sampled while the learner trains, and gives each step its batch.

Letters: G prompts a step, k pushes that a trained token may be old (``train.max_staleness``), v the version served.

**Admission.** A prompt is drawn while fewer than (v + k + 1) G were, and ``rollout.max_in_flight`` allows it. A group
drawn at version b is *due* at step b + k + 1: its tokens are then k pushes old, or younger. So the groups due at a step
or before it are at most as many as these steps have places.

**A step** takes the G finished groups that are due first, and waits while that would leave more groups due by a later
step than the steps until then have places. So no trained token is older than k pushes, nothing that was sampled is
dropped for its age, and lengths are trained as they were drawn. With k = 0 the stream is the synchronous loop.

Servers get each prompt by itself, as soon as it is admitted, and none that no step of the run would train on. An engine
in the learner's processes samples one batch at a time, and nothing during a push, so that each k gives equal numbers
again after a resume; for k steps after the last too, so that a resume may make the run longer.

Seconds are those of the event loop's clock.

**The ledger** has where every prompt is that a run drew: on its way, trained on in one step, or dropped for a reason.
``runs/<name>/ledger.jsonl`` has a line for each prompt that a step trained on, or found dropped. A resume cuts the file
back to its checkpoint's step, and compares its end with the checkpoint's, and where that differs each line before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.errors import CheckpointError, EngineError
from rl_megatron.files import ForeignText
from rl_megatron.observability.files import JsonlFile, JsonRow, rows_from
from rl_megatron.types import Completion, Prompt, RewardResult, RolloutGroup, Trajectory

logger = logging.getLogger(__name__)

_PATIENCE = 0.02  # the share of a step for which the learner may wait before more is sampled ahead
_CALM_STEPS = 30  # steps without such a wait before less is
_MAX_BATCHES = 8  # batches of prompts that one step may draw
_POISON_STEPS = 20  # the steps of whose prompts no more than POISON_SHARE may be poison

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
NO_GRADIENT_REASONS: Collection[Reason] = ("equal_rewards", "zero_advantages")
"""Of a group that would give no gradient: its rewards, or the advantages that the user's own function gives it."""

POISON_SHARE = 0.01
"""More poison than this share of prompts, and than one, is an engine's fault or that of the data, and ends the run."""


def drop_reason(parts: Iterable[tuple[Reason | None, ForeignText]]) -> tuple[Reason, ForeignText]:
    """Why a group is left out, with the problem, of those of its parts: poison if one of them is, since the prompt must
    not be asked again; else the first reason."""
    reasons = [(reason, problem) for reason, problem in parts if reason is not None]
    return min(reasons, key=lambda one: one[0] != "poison")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A prompt to sample a group of; its seeds are functions of ``batch``, ``time`` and the prompt's id."""

    ordinal: int  # prompts that the run drew before it
    prompt: Prompt
    batch: int  # 1 + ordinal // rollout.prompts_per_step
    time: int = 1  # 1 + how often its ``batch`` drew the prompt before, as it may where an epoch ends
    begun: tuple[Completion | None, ...] = ()  # the partial completions that were sampled before a resume

    def name(self, kind: str = "") -> str:
        """The name in requests, of ``kind`` where it has several; with the prompt's id seeds depend on it."""
        again = f", time {self.time}" if self.time > 1 else ""
        return f"step {self.batch}{kind}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """One prompt's group, and what was scored of it."""

    group: RolloutGroup | None  # None: it is left out, for ``reason``
    reason: Reason | None = None
    problem: ForeignText = ""  # the engine's words on a prompt that is poison
    rewards: tuple[float, ...] = ()  # the completions', also if the group is left out; empty if one of them failed
    scored: tuple[RewardResult, ...] = ()
    greedy: tuple[RewardResult, ...] = ()  # the greedy completion's, if there is one
    demonstrated: tuple[RewardResult, ...] = ()  # the demonstration's, if there is one
    left_out_tokens: int = 0  # sampled tokens that are in no group: it, or some of its trajectories, is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPrompt:
    """A prompt that was drawn and is not trained on yet."""

    drawn: Draw
    birth: int  # the version served when it was drawn
    due: int  # the last step that may train on it
    answered: GroupResult | None = None  # once its group is scored

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
    reward_sum: float = 0.0  # over these completions
    num_tokens: int = 0  # sampled, including those of groups and trajectories that are left out
    reward_errors: int = 0  # completions whose reward raised, timed out or was not finite
    late_rewards: int = 0  # completions whose reward timed out
    dropped_groups: int = 0  # groups left out for another reason than the next
    filtered_groups: int = 0  # groups left out because they would give no gradient
    part_sums: Mapping[str, float] = field(default_factory=dict)  # parts of a weighted reward, unweighted, by name
    part_counts: Mapping[str, int] = field(default_factory=dict)  # completions in these: those of finite parts alone
    places: tuple[PendingPrompt, ...] = ()  # the places of all these in the stream, if they were drawn

    @classmethod
    def of(cls, answered: Sequence[GroupResult]) -> RolloutBatch:
        """The batch of these answers; its groups are in their order."""
        rewards = [reward for one in answered for reward in one.rewards]
        scored = [scored for one in answered for scored in (*one.scored, *one.greedy, *one.demonstrated)]
        parts = [s.parts for one in answered if one.rewards for s in one.scored if s.error is None and s.parts]
        names = dict.fromkeys(name for one in parts for name in one)  # sources have their own rewards
        filtered = sum(one.reason in NO_GRADIENT_REASONS for one in answered)
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

    async def groups(self, drawn: Sequence[Draw]) -> Sequence[GroupResult]:
        """A group of each prompt, in their order, all requested together; it goes on from what was ``begun``."""
        ...

    async def interrupt(self) -> None:
        """Have `so_far` know every token that was sampled up to now. Sampling goes on."""
        ...

    def so_far(self, drawn: Draw) -> tuple[Completion | None, ...]:
        """What is known of each completion of a group that is being sampled or scored; empty if nothing is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A Stream between two steps, for checkpoints."""

    version: int  # pushed last
    drawn: int  # prompts
    opened: int  # places that groups left without being trained on, and that were drawn again
    credit: int  # more places that may be so
    ahead: int  # pushes that sampling may be ahead at present
    calm: int  # steps since the learner waited
    batch: tuple[str, ...]  # ids of the prompts that the present batch has drawn
    places: tuple[PendingPrompt, ...]  # prompts in the order drawn; those without an answer are sampled again
    left_out: tuple[PendingPrompt, ...]  # since the last step
    ledger: LedgerState
    poison: tuple[int, ...] = ()  # ordinals of the prompts dropped so among those drawn last


class RolloutStream:
    """The groups that a run trains on, sampled ahead by the rule above. Controller process only.

    ``teaches`` says of groups whether to train on them; ``rollout.dynamic_sampling`` leaves others out, for the
    reason ``untaught``, and draws the next prompt: in all at most 8 times what a step needs.
    """

    def __init__(
        self,
        *,
        prompts: PromptStream,
        source: GroupSource,
        section: RolloutSection,
        max_staleness: int,
        last_step: int,
        teaches: Callable[[Sequence[RolloutGroup]], Sequence[bool]],
        untaught: Reason = "equal_rewards",
        ledger: Ledger,
    ) -> None:
        self.version = 0
        self._prompts, self._source, self._section, self._teaches = prompts, source, section, teaches
        self._ledger, self._untaught = ledger, untaught
        self._size, self._most = section.prompts_per_step, max_staleness
        self._apart = section.served  # sampling goes on while the learner trains and weights are pushed
        self._drawn = self._opened = self._calm = self._met = 0  # met: groups that the last push met
        self._until = last_step if self._apart else last_step + max_staleness  # the last step to sample groups for
        self._credit = (max_staleness + 1) * self._refills
        self._ahead = min(1, max_staleness) if self._apart else max_staleness
        self._batch, self._poison = Counter[str](), list[int]()
        self._places: dict[int, PendingPrompt] = {}
        self._dues = Counter[int]()  # places that are due at each step
        self._ready: list[tuple[int, int]] = []  # keys of the places with an answer, ascending
        self._left_out, self._unsent = list[PendingPrompt](), list[PendingPrompt]()  # unsent: to sample again
        self._tasks, self._changed = set[asyncio.Task[None]](), asyncio.Event()
        self._failure: Exception | None = None
        self._closed = self._begins = False  # begins: a task that draws; it then admits the next group
        self._took: float | None = None  # the time of the last ``take``
        self._waited = 0.0  # seconds since
        self._described: float | None = None  # the time of the last row; there is none before the first
        self._idle = 0.0  # seconds since, for which the learner waited

    def admit(self) -> None:
        """Begin a group as the rule allows, whose task draws, sends and admits the next. In the learner's processes one
        batch, if none is being sampled."""
        ended = self._closed or self._failure is not None
        if self._may_send and not (ended or self._begins) and (self._unsent or self._room > 0):
            self._begins = True
            task = asyncio.get_running_loop().create_task(self._sample(1 if self._apart else self._size))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def take(self, step: int) -> RolloutBatch:
        """The batch of ``step``, which follows the version pushed last; short where groups were left out.

        Raises what sampling or scoring any group raised.
        """
        assert step == self.version + 1 <= self._until, (step, self.version, self._until)
        chosen = await self._next(step)
        while not (kept := [one for one in chosen if one.kept]) and self._may_open(self._size):
            self._left_out += chosen
            self._open(self._size)
            chosen = await self._next(step)
        dropped = [*(one for one in chosen if not one.kept), *self._left_out]
        self._left_out = []
        lines = await asyncio.to_thread(ledger_lines, step, places := (*kept, *dropped))
        batch = await asyncio.to_thread(RolloutBatch.of, [one.answered for one in places if one.answered is not None])
        self._ledger.end(kept, dropped, lines)
        self._ledger.check(self._drawn)
        await asyncio.to_thread(self._ledger.write, lines)
        self._adapt()
        return replace(batch, places=places)

    async def settled(self) -> None:
        """Wait until weights may be pushed: an engine in the learner's processes must have sampled all that is drawn.

        Raises as ``take`` does.
        """
        while not self._apart and self._tasks:
            await self._change()
        self._check()

    def pushed(self, version: int) -> None:
        """Admit as the new version allows; without staleness and in the learner's processes the next ``take`` does."""
        self.version = version
        self._met = self._ledger.row()["ledger/in_flight"]
        self._credit = min((self._most + 1) * self._refills, self._credit + self._refills)
        if self._apart and self._most:
            self.admit()

    def row(self) -> dict[str, float]:
        """Metrics of a step after its push; with staleness, those of the time since the last call too."""
        row = dict[str, float](self._ledger.row())
        if not self._most:
            return row
        row |= {"staleness/allowed": self._ahead, "in_flight/completions": self._met * self._section.group_size}
        before, self._described = self._described, asyncio.get_running_loop().time()
        if self._apart and before is not None and (whole := self._described - before):
            row["idle/learner_fraction"] = self._idle / whole
        self._idle = 0.0
        return row

    async def interrupt(self) -> None:
        """Have ``state`` know every token of the completions that are being sampled."""
        if self._tasks:
            await self._source.interrupt()

    def state(self) -> StreamState:
        """What ``restore`` continues from, with the tokens that `interrupt` found. Call it between steps."""
        return StreamState(
            version=self.version,
            drawn=self._drawn,
            opened=self._opened,
            credit=self._credit,
            ahead=self._ahead,
            calm=self._calm,
            batch=tuple(self._batch.elements()),
            places=tuple(map(self._with_tokens, self._places.values())),
            left_out=tuple(self._left_out),
            ledger=self._ledger.state(),
            poison=tuple(self._poison),
        )

    def start_over(self) -> None:
        """Draw from the first prompt on: the ledger of a run that was killed before its first checkpoint is removed."""
        self._ledger.restore(LedgerState(), -1, ())

    def restore(self, state: StreamState) -> None:
        """Continue from ``state``. Groups stay due when they were, even if ``train.max_staleness`` is now another.

        Raises CheckpointError if the ledger's file does not fit.
        """
        self._ledger.restore(state.ledger, state.version, (*state.places, *state.left_out))
        self.version, self._drawn, self._opened = state.version, state.drawn, state.opened
        self._credit, self._calm, self._batch = state.credit, state.calm, Counter(state.batch)
        if self._apart:
            self._ahead = max(min(1, self._most), min(state.ahead, self._most))
        self._left_out, self._poison = list(state.left_out), list(state.poison)
        self._places = {place.drawn.ordinal: place for place in state.places}
        self._dues = Counter(place.due for place in state.places)
        self._ready = sorted(place.key for place in state.places if place.answered is not None)
        self._unsent = [place for place in state.places if place.answered is None]

    async def close(self) -> None:
        """End what is being sampled."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _with_tokens(self, place: PendingPrompt) -> PendingPrompt:
        if place.answered is not None:
            return place
        begun = self._source.so_far(place.drawn)
        return replace(place, drawn=replace(place.drawn, begun=begun))

    def _sendable(self, most: int) -> list[PendingPrompt]:
        """Takes up to ``most`` places to sample: those that a checkpoint left, and newly drawn ones."""
        found, self._unsent = self._unsent[:most], self._unsent[most:]
        return found + [self._draw() for _ in range(min(self._room, most - len(found)))]

    @property
    def _room(self) -> int:
        """How many more prompts may be drawn at present; less than one: none."""
        return min(self.version + self._ahead + 1, self._until) * self._size + self._opened - self._drawn

    @property
    def _may_send(self) -> bool:
        """Whether ``rollout.max_in_flight`` allows one more group, which is a task; a batch has no other beside it."""
        most = self._section.max_in_flight
        return (most is None or len(self._tasks) < most // self._section.group_size) if self._apart else not self._tasks

    def _draw(self) -> PendingPrompt:
        (prompt,) = self._prompts.take(1)
        ordinal, self._drawn = self._drawn, self._drawn + 1
        if ordinal % self._size == 0:
            self._batch.clear()
        self._batch[prompt.id] += 1
        drawn = Draw(ordinal=ordinal, prompt=prompt, batch=1 + ordinal // self._size, time=self._batch[prompt.id])
        place = PendingPrompt(drawn=drawn, birth=self.version, due=self.version + self._most + 1)
        self._places[ordinal] = place
        self._ledger.move([ordinal], "queued")
        self._dues[place.due] += 1
        return place

    async def _sample(self, most: int) -> None:
        try:
            if self._prompts.reads:  # a template may take seconds, in which the event loop has other work
                await asyncio.to_thread(self._prompts.make_next, most)
            places = self._sendable(most)
        finally:
            self._begins = False
        if not places:
            return
        self._ledger.move((place.drawn.ordinal for place in places), "in_flight")
        self.admit()
        answers = await self._source.groups([place.drawn for place in places])
        for place, answered in zip(places, answers, strict=True):
            self._answer(place, answered)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        try:
            if not task.cancelled():
                if isinstance(error := task.exception(), Exception):
                    raise error
            elif not self._closed:
                raise EngineError(
                    "the sampling of a group was cancelled, but not by the run: a reward, an environment or a library "
                    "of theirs cancelled a task that it did not start, or raised CancelledError; fix that code"
                )
            self.admit()
        except Exception as failure:  # noqa: BLE001  the step that waits raises it; of a callback nobody would hear
            self._failure = self._failure or failure
        self._changed.set()

    def _answer(self, place: PendingPrompt, answered: GroupResult) -> None:
        """Buffer the group; or leave it out, and open its place where ``dynamic_sampling`` says so."""
        section, group = self._section, answered.group
        if section.dynamic_sampling != "off" and group is not None and not self._teaches([group])[0]:
            tokens = answered.left_out_tokens + sampled_tokens(group)
            answered = replace(answered, group=None, reason=self._untaught, left_out_tokens=tokens)
        if answered.reason == "poison":
            self._prompts.leave_out(place.drawn.prompt)
            self._count_poison(place.drawn, answered.problem)
        place = replace(place, answered=answered)
        self._ledger.move([place.drawn.ordinal], "buffered" if place.kept else "left_out")
        if not place.kept and section.dynamic_sampling == "refill" and self._credit:
            self._left_out.append(place)
            self._remove(place)
            self._open(1)
        else:
            self._places[place.drawn.ordinal] = place
            insort(self._ready, place.key)

    def _count_poison(self, drawn: Draw, problem: str) -> None:
        """Raises EngineError for the first of more than 1 % of 20 steps' prompts; one is always let pass."""
        window = _POISON_STEPS * self._size
        self._poison = [*(one for one in self._poison if one >= self._drawn - window), drawn.ordinal]
        if len(self._poison) > max(1, POISON_SHARE * window):
            raise EngineError(
                f"{len(self._poison)} of the last {window} prompts drawn ended servers or were refused by them, the "
                f"last {drawn.prompt.id!r} (log.txt has all); more than {POISON_SHARE:.0%} is no matter of single "
                f"prompts: read the servers' logs, and fix the engine or the data; the last one's error: {problem}"
            )

    async def _next(self, step: int) -> list[PendingPrompt]:
        """Take G places out of the stream, once a step may."""
        self.admit()
        while not self._may_give(step):
            await self._change()
        self._check()
        chosen, self._ready = self._ready[: self._size], self._ready[self._size :]
        places = [self._places[ordinal] for _, ordinal in chosen]
        for place in places:
            self._remove(place)
        return places

    def _may_give(self, step: int) -> bool:
        """Whether G groups are finished, and those due first leave a place for each of the others by its due. Without
        staleness a step waits for all that is being sampled, which no push may meet.
        """
        if len(self._ready) < self._size or (not self._most and self._tasks):
            return False
        left, chosen = 0, Counter(due for due, _ in self._ready[: self._size])
        for due in sorted(self._dues):
            left += self._dues[due] - chosen[due]
            if left > (due - step) * self._size:
                return False
        return True

    async def _change(self) -> None:
        """Wait until a group ends. Raises what sampling raised."""
        self._check()
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._changed.clear()
        await self._changed.wait()
        seconds = loop.time() - began
        self._waited += seconds
        self._idle += seconds
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _remove(self, place: PendingPrompt) -> None:
        del self._places[place.drawn.ordinal]
        self._dues[place.due] -= 1
        if not self._dues[place.due]:
            del self._dues[place.due]

    def _open(self, places: int) -> None:
        self._opened += places
        self._credit -= places

    def _may_open(self, places: int) -> bool:
        return self._section.dynamic_sampling != "off" and self._credit >= places

    @property
    def _refills(self) -> int:
        """The places that one step may have drawn again."""
        return (_MAX_BATCHES - 1) * self._size

    def _adapt(self) -> None:
        """Let sampling be further ahead after a step that waited, and less far after many that did not."""
        last, self._took = self._took, asyncio.get_running_loop().time()
        seconds, self._waited = self._waited, 0.0
        if not self._apart or not self._most or last is None:
            return
        waited = seconds > _PATIENCE * (self._took - last)
        self._calm = 0 if waited else self._calm + 1
        if not self._calm:
            self._ahead = min(self._most, self._ahead + 1)
        elif self._calm % _CALM_STEPS == 0:
            self._ahead = max(1, self._ahead - 1)


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

    def end(self, trained: Sequence[PendingPrompt], dropped: Sequence[PendingPrompt], lines: Sequence[JsonRow]) -> None:
        """Note the prompts that a step trains on, and those that were dropped since the one before; ``lines`` are their
        `ledger_lines`, which `write` writes."""
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

    def restore(self, state: LedgerState, step: int, places: Iterable[PendingPrompt]) -> None:
        """Continue after ``step``, and cut the file back to it. Prompts without an answer are queued.

        Raises CheckpointError if the lines up to ``step`` are not those of the checkpoint.
        """
        self._open = {one.drawn.ordinal: _ledger_state(one) for one in places}
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


def _ledger_state(one: PendingPrompt) -> Whereabouts:
    if one.answered is None:
        return "queued"
    return "buffered" if one.answered.group is not None else "left_out"


def ledger_lines(step: int, places: Sequence[PendingPrompt]) -> list[JsonRow]:
    """The lines of prompts that end with ``step``; visits every turn."""
    return [_line(step, one) for one in places]


def _line(step: int, one: PendingPrompt) -> JsonRow:
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
    """The versions that sampled it, each as <first token>:<version>, counted over the sampled tokens of all turns."""
    found, sampled, last = list[str](), 0, None
    for turn in trajectory.turns:
        for span in turn.spans:
            if span.version != last:
                found.append(f"{sampled + span.start}:{span.version}")
                last = span.version
        sampled += len(turn.logprobs)
    return " ".join(found)
