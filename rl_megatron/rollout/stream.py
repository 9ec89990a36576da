"""Draws prompts ahead of training, requests their groups while the learner trains, and gives each step its batch.

Letters: G prompts a step, k the maximum age of trained tokens in pushes (``train.max_staleness``), v served version.

**Admission.** A prompt is drawn while fewer than (v + k + 1) G were drawn and ``rollout.max_in_flight`` allows it. A
group drawn at version b is *due* at step b + k + 1, when its tokens are at most k pushes old. So the groups due by any
step are at most as many as the steps until then have places.

**A step** takes the G finished groups that are due first. It waits while that would leave more groups due by a later
step than the steps until then have places. So no trained token is older than k pushes, no sampled group is dropped for
its age, and lengths are trained as they were drawn. With k = 0 the stream is the synchronous loop.

Servers get each prompt separately as soon as it is admitted, and only prompts that a step of the run can train on. An
engine in the learner's processes samples one batch at a time and nothing during a push. So each k gives equal
numbers after a resume. It also samples for k steps after the last, so that a resume may make the run longer.

**The ledger** holds the state of every drawn prompt: pending, trained on in one step, or dropped for a reason. Its file
``runs/<name>/ledger.jsonl`` has a line for each prompt that a step trained on or found dropped. A resume truncates the
file to its checkpoint's step and compares its end with the checkpoint's. If the ends differ, it compares each line.

Seconds are those of the event loop's clock.
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
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import ConfigDict, Field

from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.errors import CheckpointError, EngineError
from rl_megatron.files import ForeignText
from rl_megatron.observability.files import JsonlFile, JsonRow, rows_from
from rl_megatron.types import Completion, Prompt, RewardResult, RolloutGroup, Trajectory

logger = logging.getLogger(__name__)

_PATIENCE = 0.02  # fraction of a step that the learner may wait before more is sampled ahead
_CALM_STEPS = 30  # steps without such a wait before less is sampled ahead
_MAX_BATCHES = 8  # maximum batches of prompts that one step may draw
_POISON_STEPS = 20  # steps: no more than POISON_SHARE of their prompts may be poison

Reason = Literal[
    "equal_rewards",
    "zero_advantages",
    "reward_error",
    "poison",
    "environment_error",
    "long_prompt",
    "nothing_sampled",
]
"""The reason why a drawn prompt is not trained on."""
NO_GRADIENT_REASONS: Collection[Reason] = ("equal_rewards", "zero_advantages")
"""The reasons of groups without gradient: equal rewards, or zero advantages from the user's custom function."""

POISON_SHARE = 0.01
"""The maximum fraction of poison prompts; one is always allowed. More is a fault of engine or data: the run ends."""


def drop_reason(parts: Iterable[tuple[Reason | None, ForeignText]]) -> tuple[Reason, ForeignText]:
    """Returns why a group is dropped, and the problem, from those of its parts. Poison comes first, because the prompt
    must not be requested again; otherwise it is the first reason."""
    reasons = [(reason, problem) for reason, problem in parts if reason is not None]
    return min(reasons, key=lambda one: one[0] != "poison")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A prompt to sample a group of. Its seeds are functions of ``batch``, ``time`` and the prompt's id."""

    __pydantic_config__: ClassVar = ConfigDict(serialize_by_alias=True)
    ordinal: int  # number of prompts that the run drew before it
    prompt: Prompt
    batch: int  # 1 + ordinal // rollout.prompts_per_step
    time: int = 1  # 1 + how often its ``batch`` drew the prompt before (epoch ends)
    partials: Annotated[tuple[Completion | None, ...], Field(alias="begun")] = ()  # sampled before a resume

    def name(self, kind: str = "") -> str:
        """Returns the name in requests. ``kind`` separates several. Seeds depend on it and on the prompt's id."""
        again = f", time {self.time}" if self.time > 1 else ""
        return f"step {self.batch}{kind}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """One prompt's group and the results of its rewards."""

    group: RolloutGroup | None  # None: it is dropped for ``reason``
    reason: Reason | None = None
    problem: ForeignText = ""  # the engine's message about a poison prompt
    rewards: tuple[float, ...] = ()  # the completions', also of a dropped group; empty if a reward failed
    scored: tuple[RewardResult, ...] = ()
    greedy: tuple[RewardResult, ...] = ()  # the greedy completion's, if there is one
    demonstrated: tuple[RewardResult, ...] = ()  # the demonstration's, if there is one
    left_out_tokens: int = 0  # sampled tokens of dropped trajectories, or of a dropped group


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPrompt:
    """A prompt that was drawn and is not trained on yet."""

    drawn: Draw
    birth: int  # the version served when it was drawn
    due: int  # last step that may train on it
    answered: GroupResult | None = None  # None until its group is scored

    @property
    def is_trainable(self) -> bool:
        """True if its group can be trained on."""
        return self.answered is not None and self.answered.group is not None

    @property
    def key(self) -> tuple[int, int]:
        """The order in which steps take groups."""
        return self.due, self.drawn.ordinal


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The groups of one step, and counts of scored, failed and dropped completions and groups."""

    groups: tuple[RolloutGroup, ...] = ()
    num_completions: int = 0  # scored, including those of dropped groups
    reward_sum: float = 0.0  # sum over these completions
    num_tokens: int = 0  # sampled, including those of dropped groups and trajectories
    reward_errors: int = 0  # completions with a reward that raised, timed out or was not finite
    timed_out_rewards: int = 0  # completions with a reward that timed out
    dropped_groups: int = 0  # groups dropped for another reason than no gradient
    filtered_groups: int = 0  # groups dropped because they give no gradient
    part_sums: Mapping[str, float] = field(default_factory=dict)  # name -> sum of a weighted reward's part, unweighted
    part_counts: Mapping[str, int] = field(default_factory=dict)  # name -> completions in that sum, with a finite part
    places: tuple[PendingPrompt, ...] = ()  # drawn prompts of all these groups, also dropped ones

    @classmethod
    def from_results(cls, answered: Sequence[GroupResult]) -> RolloutBatch:
        """Makes a batch of these results. Its groups are in their order."""
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
            timed_out_rewards=sum(one.late for one in scored),
            dropped_groups=len(answered) - len(groups) - filtered,
            filtered_groups=filtered,
            part_sums={name: math.fsum(one[name] for one in parts if name in one) for name in names},
            part_counts={name: sum(name in one for one in parts) for name in names},
        )

    def part_means(self) -> dict[str, float]:
        """Returns ``reward/part/<name>`` for each part, over completions of ``reward/sampled_mean`` that have it."""
        return {f"reward/part/{name}": total / self.part_counts[name] for name, total in self.part_sums.items()}


def sampled_tokens(group: RolloutGroup) -> int:
    """Returns the number of sampled tokens, including those of the greedy completion."""
    sampled = sum(one.num_sampled for one in group.trajectories)
    return sampled + (0 if group.greedy is None else sampled_tokens(group.greedy))


class GroupSource(Protocol):
    """Samples and scores the completions that a job trains on."""

    async def groups(self, drawn: Sequence[Draw]) -> Sequence[GroupResult]:
        """Returns a group of each prompt, in order. All are requested together and continue its ``partials``."""
        ...

    async def collect_partials(self) -> None:
        """Makes `partial_completion` include every token sampled up to now. Sampling continues."""
        ...

    def partial_completion(self, drawn: Draw) -> tuple[Completion | None, ...]:
        """Returns the partial completions of a group in flight, or an empty tuple."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """The state of a stream between two steps, for checkpoints."""

    version: int  # the last pushed one
    drawn: int  # prompts
    opened: int  # places of dropped groups that were drawn again
    credit: int  # further places that may be drawn again
    ahead: int  # pushes that sampling may currently be ahead
    calm: int  # steps since the learner waited
    batch: tuple[str, ...]  # ids of the prompts that the current batch has drawn
    places: tuple[PendingPrompt, ...]  # prompts in the order drawn; those without an answer are sampled again
    left_out: tuple[PendingPrompt, ...]  # dropped since the last step
    ledger: LedgerState
    poison: tuple[int, ...] = ()  # ordinals of poison prompts among those drawn last


class RolloutStream:
    """The groups that a run trains on, sampled ahead by the module's rule. Controller process only.

    ``teaches`` returns whether each group has a gradient. ``rollout.dynamic_sampling`` drops others, for the reason
    ``untaught``, and draws the next prompt: in total at most 8 times the prompts that a step needs.
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
        self._apart = section.served  # sampling continues while the learner trains and weights are pushed
        self._drawn = self._opened = self._calm = self._met = 0  # met: groups in flight at the last push
        self._until = last_step if self._apart else last_step + max_staleness  # last step to sample groups for
        self._credit = (max_staleness + 1) * self._refills
        self._ahead = min(1, max_staleness) if self._apart else max_staleness
        self._batch, self._poison = Counter[str](), list[int]()
        self._places: dict[int, PendingPrompt] = {}
        self._dues = Counter[int]()  # step -> number of places due at it
        self._ready: list[tuple[int, int]] = []  # keys of the places with a result, ascending
        self._left_out, self._unsent = list[PendingPrompt](), list[PendingPrompt]()  # unsent: to sample again
        self._tasks, self._changed = set[asyncio.Task[None]](), asyncio.Event()
        self._failure: Exception | None = None
        self._closed = self._begins = False  # begins: a task is drawing, and then admits the next group
        self._took: float | None = None  # the time of the last ``take``
        self._waited = 0.0  # seconds since then
        self._described: float | None = None  # the time of the last row; None before the first
        self._idle = 0.0  # seconds since then for which the learner waited

    def admit(self) -> None:
        """Begins a group as the rule allows. Its task draws, sends, and admits the next. In the learner's processes it
        begins one batch, if no other is being sampled."""
        ended = self._closed or self._failure is not None
        if self._can_send and not (ended or self._begins) and (self._unsent or self._room > 0):
            self._begins = True
            task = asyncio.get_running_loop().create_task(self._sample(1 if self._apart else self._size))
            self._tasks.add(task)
            task.add_done_callback(self._on_finished)

    async def take(self, step: int) -> RolloutBatch:
        """Returns the batch of ``step``, which follows the last pushed version. It is smaller if groups were dropped.

        Raises the error of sampling or scoring any group.
        """
        assert step == self.version + 1 <= self._until, (step, self.version, self._until)
        chosen = await self._next(step)
        while not (kept := [one for one in chosen if one.is_trainable]) and self._can_refill(self._size):
            self._left_out += chosen
            self._refill_place(self._size)
            chosen = await self._next(step)
        dropped = [*(one for one in chosen if not one.is_trainable), *self._left_out]
        self._left_out = []
        lines = await asyncio.to_thread(ledger_lines, step, places := (*kept, *dropped))
        batch = await asyncio.to_thread(
            RolloutBatch.from_results, [one.answered for one in places if one.answered is not None]
        )
        self._ledger.end(kept, dropped, lines)
        self._ledger.check(self._drawn)
        await asyncio.to_thread(self._ledger.write, lines)
        self._adapt()
        return replace(batch, places=places)

    async def wait_until_pushable(self) -> None:
        """Waits until weights may be pushed: an engine in the learner's processes must have sampled all drawn prompts.

        Raises like ``take``.
        """
        while not self._apart and self._tasks:
            await self._change()
        self._check()

    def on_push(self, version: int) -> None:
        """Admits as the new version allows. With k = 0, or in the learner's processes, the next ``take`` does."""
        self.version = version
        self._met = self._ledger.row()["ledger/in_flight"]
        self._credit = min((self._most + 1) * self._refills, self._credit + self._refills)
        if self._apart and self._most:
            self.admit()

    def row(self) -> dict[str, float]:
        """Returns metrics of a step after its push. With staleness they include those since the last call."""
        row = dict[str, float](self._ledger.row())
        if not self._most:
            return row
        row |= {"staleness/allowed": self._ahead, "in_flight/completions": self._met * self._section.group_size}
        before, self._described = self._described, asyncio.get_running_loop().time()
        if self._apart and before is not None and (whole := self._described - before):
            row["idle/learner_fraction"] = self._idle / whole
        self._idle = 0.0
        return row

    async def collect_partials(self) -> None:
        """Makes ``state`` include every token of the completions that are being sampled."""
        if self._tasks:
            await self._source.collect_partials()

    def state(self) -> StreamState:
        """Returns the state between two steps, with the tokens that `collect_partials` found, for ``restore``."""
        return StreamState(
            version=self.version,
            drawn=self._drawn,
            opened=self._opened,
            credit=self._credit,
            ahead=self._ahead,
            calm=self._calm,
            batch=tuple(self._batch.elements()),
            places=tuple(map(self._with_partial_tokens, self._places.values())),
            left_out=tuple(self._left_out),
            ledger=self._ledger.state(),
            poison=tuple(self._poison),
        )

    def restart(self) -> None:
        """Starts at the first prompt and removes the ledger of a run that was killed before its first checkpoint."""
        self._ledger.restore(LedgerState(), -1, ())

    def restore(self, state: StreamState) -> None:
        """Continues from ``state``. Groups keep their due steps, even if ``train.max_staleness`` has changed. Raises
        CheckpointError if the ledger's file does not match."""
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
        """Cancels the sampling of all groups."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _with_partial_tokens(self, place: PendingPrompt) -> PendingPrompt:
        if place.answered is not None:
            return place
        return replace(place, drawn=replace(place.drawn, partials=self._source.partial_completion(place.drawn)))

    def _sendable(self, limit: int) -> list[PendingPrompt]:
        """Takes up to ``limit`` places to sample: those that a checkpoint left, and newly drawn ones."""
        found, self._unsent = self._unsent[:limit], self._unsent[limit:]
        return found + [self._draw() for _ in range(min(self._room, limit - len(found)))]

    @property
    def _room(self) -> int:
        """The number of prompts that may still be drawn now; none if it is not positive."""
        return min(self.version + self._ahead + 1, self._until) * self._size + self._opened - self._drawn

    @property
    def _can_send(self) -> bool:
        """True if ``rollout.max_in_flight`` allows one more group (a task). A batch is sampled without another."""
        most = self._section.max_in_flight
        return (most is None or len(self._tasks) < most // self._section.group_size) if self._apart else not self._tasks

    def _draw(self) -> PendingPrompt:
        (prompt,) = self._prompts.next_prompts(1)
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

    async def _sample(self, limit: int) -> None:
        try:
            if self._prompts.reads:  # a template may take seconds, so it runs outside the event loop
                await asyncio.to_thread(self._prompts.make_next, limit)
            places = self._sendable(limit)
        finally:
            self._begins = False
        if not places:
            return
        self._ledger.move((place.drawn.ordinal for place in places), "in_flight")
        self.admit()
        answers = await self._source.groups([place.drawn for place in places])
        for place, answered in zip(places, answers, strict=True):
            self._answer(place, answered)

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        try:
            if not task.cancelled():
                if isinstance(error := task.exception(), Exception):
                    raise error
            elif not self._closed:
                raise EngineError(
                    "the sampling of a group was canceled, but not by the run: a reward, an environment or a library "
                    "of theirs canceled a task that it did not start, or raised asyncio's error; fix that code"
                )
            self.admit()
        except Exception as failure:  # noqa: BLE001  the step that waits raises it; of a callback nobody would hear
            self._failure = self._failure or failure
        self._changed.set()

    def _answer(self, place: PendingPrompt, answered: GroupResult) -> None:
        """Buffers the group, or drops it and opens its place if ``dynamic_sampling`` says so."""
        section, group = self._section, answered.group
        if section.dynamic_sampling != "off" and group is not None and not self._teaches([group])[0]:
            tokens = answered.left_out_tokens + sampled_tokens(group)
            answered = replace(answered, group=None, reason=self._untaught, left_out_tokens=tokens)
        if answered.reason == "poison":
            self._prompts.exclude(place.drawn.prompt)
            self._count_poison(place.drawn, answered.problem)
        place = replace(place, answered=answered)
        self._ledger.move([place.drawn.ordinal], "buffered" if place.is_trainable else "left_out")
        if not place.is_trainable and section.dynamic_sampling == "refill" and self._credit:
            self._left_out.append(place)
            self._remove(place)
            self._refill_place(1)
        else:
            self._places[place.drawn.ordinal] = place
            insort(self._ready, place.key)

    def _count_poison(self, drawn: Draw, problem: str) -> None:
        """Counts a poison prompt. Raises EngineError above 1 % of 20 steps' prompts; one is always allowed."""
        window = _POISON_STEPS * self._size
        self._poison = [*(one for one in self._poison if one >= self._drawn - window), drawn.ordinal]
        if len(self._poison) > max(1, POISON_SHARE * window):
            raise EngineError(
                f"{len(self._poison)} of the last {window} prompts drawn ended servers or were refused by them, the "
                f"last {drawn.prompt.id!r} (log.txt has all); more than {POISON_SHARE:.0%} is no matter of single "
                f"prompts: read the servers' logs, and fix the engine or the data; the last one's error: {problem}"
            )

    async def _next(self, step: int) -> list[PendingPrompt]:
        """Takes G places out of the stream, once a step may."""
        self.admit()
        while not self._can_give(step):
            await self._change()
        self._check()
        chosen, self._ready = self._ready[: self._size], self._ready[self._size :]
        places = [self._places[ordinal] for _, ordinal in chosen]
        for place in places:
            self._remove(place)
        return places

    def _can_give(self, step: int) -> bool:
        """True if G groups are finished, and taking those due first leaves a place for each other by its due step.
        Without staleness a step waits for all sampling, because none may be in flight at a push.
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
        """Waits until a group ends. Raises the error of sampling."""
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

    def _refill_place(self, places: int) -> None:
        self._opened += places
        self._credit -= places

    def _can_refill(self, places: int) -> bool:
        return self._section.dynamic_sampling != "off" and self._credit >= places

    @property
    def _refills(self) -> int:
        """The maximum number of places that one step may draw again."""
        return (_MAX_BATCHES - 1) * self._size

    def _adapt(self) -> None:
        """Allows sampling to be further ahead after a step that waited, and less far after many that did not."""
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
"""The state of a prompt without a line: unsent, being sampled or scored, scored, or dropped since the last step."""
_BEFORE: Mapping[Whereabouts, Whereabouts | None] = {
    "queued": None,
    "in_flight": "queued",
    "buffered": "in_flight",
    "left_out": "in_flight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The counts of prompts that have a line, for checkpoints."""

    trained: int = 0
    dropped: Mapping[Reason, int] = field(default_factory=dict)
    digest: str = "0" * 64  # XOR of the SHA-256 of "<ordinal> <step or drop reason>" of each
    whole: bool = True  # the file has all of them: it was not lost
    end: str = ""  # JsonlFile.end; empty in older releases


class Ledger:
    """Tracks each prompt of a stream and asserts its state. ``path`` is its file, if it has one."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else JsonlFile(path)
        self._open: dict[int, Whereabouts] = {}
        self._trained, self._dropped, self._digest, self._whole = 0, Counter[Reason](), 0, True

    def move(self, ordinals: Iterable[int], to: Whereabouts) -> None:
        """Records the prompts' new state. The order is queued, in_flight, and then buffered or left_out."""
        for ordinal in ordinals:
            assert self._open.get(ordinal) == _BEFORE[to], (ordinal, self._open.get(ordinal), to)
            self._open[ordinal] = to

    def end(self, trained: Sequence[PendingPrompt], dropped: Sequence[PendingPrompt], lines: Sequence[JsonRow]) -> None:
        """Records the prompts that a step trains on, and those dropped since the previous step. ``lines`` are their
        `ledger_lines`, which `write` writes."""
        for one in trained:
            assert self._open.pop(one.drawn.ordinal) == "buffered", one.drawn
        for one in dropped:
            assert self._open.pop(one.drawn.ordinal) == "left_out", one.drawn
        self._count(lines)

    def write(self, lines: Sequence[JsonRow]) -> None:
        """Appends the lines of ended prompts durably. Called in a thread, after `end`, and one call at a time."""
        if self._file is not None:
            self._file.append(lines)

    def check(self, drawn: int) -> None:
        """Asserts that every drawn prompt has exactly one state."""
        ended = self._trained + self._dropped.total()
        assert len(self._open) + ended == drawn, (len(self._open), self._trained, self._dropped, drawn)

    def row(self) -> dict[str, int]:
        """Returns the metrics ``ledger/…``."""
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
        """Returns the state for ``restore``."""
        dropped, digest = dict(self._dropped), f"{self._digest:064x}"
        end = "" if self._file is None else self._file.end()
        return LedgerState(trained=self._trained, dropped=dropped, digest=digest, whole=self._whole, end=end)

    def restore(self, state: LedgerState, step: int, places: Iterable[PendingPrompt]) -> None:
        """Continues after ``step``, and truncates the file to it. Prompts without a result are queued.

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
    """Returns the lines of prompts that end with ``step``. It visits every turn."""
    return [_line(step, one) for one in places]


def _line(step: int, one: PendingPrompt) -> JsonRow:
    """Returns a line of the file. ``spans`` are of each completion or trajectory.

    ``failed`` counts completions with a failed reward, and trajectories with a failed environment.
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
    """Returns the sampling versions, each as <first token>:<version>, counted over sampled tokens of all turns."""
    found, sampled, last = list[str](), 0, None
    for turn in trajectory.turns:
        for span in turn.spans:
            if span.version != last:
                found.append(f"{sampled + span.start}:{span.version}")
                last = span.version
        sampled += len(turn.logprobs)
    return " ".join(found)
