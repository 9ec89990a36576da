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
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.errors import EngineError
from rl_megatron.rollout.batch import (
    POISON_SHARE,
    Answered,
    Drawn,
    GroupSource,
    Ledger,
    LedgerState,
    Reason,
    RolloutBatch,
    Waiting,
    lines_of,
    sampled_tokens,
)
from rl_megatron.types import RolloutGroup

_PATIENCE = 0.02  # the share of a step for which the learner may wait before more is sampled ahead
_CALM_STEPS = 30  # steps without such a wait before less is
_MAX_BATCHES = 8  # of prompts, to draw for one step
_POISON_STEPS = 20  # the steps of whose prompts no more than POISON_SHARE may be poison


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
    places: tuple[Waiting, ...]  # in the order drawn; those without an answer are sampled again
    left_out: tuple[Waiting, ...]  # since the last step
    ledger: LedgerState
    poison: tuple[int, ...] = ()  # ordinals of the prompts dropped so among those drawn last


class Stream:
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
        self._places: dict[int, Waiting] = {}
        self._dues = Counter[int]()  # how many places are due at each step
        self._ready: list[tuple[int, int]] = []  # keys of the places with an answer, ascending
        self._left_out, self._unsent = list[Waiting](), list[Waiting]()  # unsent: of a checkpoint, to sample again
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
        lines = await asyncio.to_thread(lines_of, step, places := (*kept, *dropped))
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
        self._ledger.restore(LedgerState(), -1, (), ())

    def restore(self, state: StreamState) -> None:
        """Continue from ``state``. Groups stay due when they were, even if ``train.max_staleness`` is now another.

        Raises CheckpointError if the ledger's file does not fit.
        """
        self._ledger.restore(state.ledger, state.version, state.places, state.left_out)
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

    def _with_tokens(self, place: Waiting) -> Waiting:
        if place.answered is not None:
            return place
        begun = self._source.so_far(place.drawn)
        return replace(place, drawn=replace(place.drawn, begun=begun))

    def _sendable(self, most: int) -> list[Waiting]:
        """Up to ``most`` places that nobody samples: those of a checkpoint, and newly drawn ones."""
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

    def _draw(self) -> Waiting:
        (prompt,) = self._prompts.take(1)
        ordinal, self._drawn = self._drawn, self._drawn + 1
        if ordinal % self._size == 0:
            self._batch.clear()
        self._batch[prompt.id] += 1
        drawn = Drawn(ordinal=ordinal, prompt=prompt, batch=1 + ordinal // self._size, time=self._batch[prompt.id])
        place = Waiting(drawn=drawn, birth=self.version, due=self.version + self._most + 1)
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

    def _answer(self, place: Waiting, answered: Answered) -> None:
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

    def _count_poison(self, drawn: Drawn, problem: str) -> None:
        """Raises EngineError for the first of more than 1 % of 20 steps' prompts; one is always let pass."""
        window = _POISON_STEPS * self._size
        self._poison = [*(one for one in self._poison if one >= self._drawn - window), drawn.ordinal]
        if len(self._poison) > max(1, POISON_SHARE * window):
            raise EngineError(
                f"{len(self._poison)} of the last {window} prompts drawn ended servers or were refused by them, the "
                f"last {drawn.prompt.id!r} (log.txt has all); more than {POISON_SHARE:.0%} is no matter of single "
                f"prompts: read the servers' logs, and fix the engine or the data; the last one's error: {problem}"
            )

    async def _next(self, step: int) -> list[Waiting]:
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

    def _remove(self, place: Waiting) -> None:
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
