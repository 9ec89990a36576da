"""Pools of prompts, in memory or of rows of files, and how they are drawn: shuffled epochs, and pass rates."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rl_megatron.columns import Rates, Retired, Visits
from rl_megatron.config.sections.data import CurriculumSection
from rl_megatron.data.problems.mixture import (
    OLDER_DIGESTS,
    DigestOf,
    Epochs,
    MixtureState,
    Proportions,
    SourceState,
    digest_of_prompts,
)
from rl_megatron.data.problems.parquet import FileRows
from rl_megatron.data.problems.rendering import (
    PromptExcess,
    RowForm,
    conversation,
    render_row,
    tokenize_one,
    unrendered,
)
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.types import Prompt

logger = logging.getLogger(__name__)


_WINDOW_BYTES = 64 << 20  # the rows that one read takes
_LARGE_WINDOW_BYTES = 256 << 20  # the same for an epoch of many windows, since each reads every row group
_MOST_WINDOWS = 16  # maximum windows of an epoch; they grow up to the size above instead
_MOST_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class NextDraw:
    """The number of a draw, and a function that gives the rows of the draws from one number to another. Any thread may
    call it."""

    number: int
    rows: Callable[[int, int], NDArray[np.integer]]


class PromptPool(Sequence[Prompt]):
    """Prompts by row. ``dropped``: prompts that it lacks, which were too long as files were read."""

    dropped: int = 0

    @abstractmethod
    def prompt_of_draw(self, row: int, draw: NextDraw) -> Prompt | None:
        """Returns the prompt of the draw ``upcoming.number``, which this row is; None if it is too long."""

    def read_ahead(self, row: int, draw: NextDraw) -> bool:
        """Reads what `prompt_of_draw` needs for this row and some that follow, and renders the row. Returns whether it
        is short enough. May take minutes. Raises as `prompt_of_draw`."""
        return True

    @property
    def reads(self) -> bool:
        """True if `prompt_of_draw` reads or renders, unless `read_ahead` did."""
        return False

    @abstractmethod
    def conversations(self) -> Iterator[Prompt]:
        """Returns the conversations among them, each read once and not held."""

    @abstractmethod
    def find_row(self, name: str) -> int:
        """Returns the row of the prompt with this id."""

    @abstractmethod
    def prompt_id(self, row: int) -> str:
        """Returns the prompt's id."""

    @abstractmethod
    def sources(self, names: Sequence[str]) -> Mapping[str, NDArray[np.integer]]:
        """Returns the rows of each of these sources."""

    @abstractmethod
    def digest(self, rows: NDArray[np.integer], of: DigestOf = "rows") -> str:
        """Returns a checksum of all prompts of one source, as `digest_of_prompts`."""

    @overload
    def __getitem__(self, row: int) -> Prompt: ...

    @overload
    def __getitem__(self, row: slice) -> list[Prompt]: ...

    def __getitem__(self, row: int | slice) -> Prompt | list[Prompt]:
        """Raises DataError if it is too long."""
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        at = range(len(self))[row]  # IndexError, and rows from the end
        rows = NextDraw(at, lambda start, stop: np.arange(start, min(stop, len(self)), dtype=np.uint32))
        prompt = self.prompt_of_draw(at, rows)
        if prompt is None:
            raise DataError(f"prompt {self.prompt_id(at)!r} has too many tokens")
        return prompt


class ListPool(PromptPool):
    """Prompts that are in memory."""

    def __init__(self, prompts: Sequence[Prompt], dropped: int = 0) -> None:
        self._prompts, self.dropped = prompts, dropped

    def __len__(self) -> int:
        return len(self._prompts)

    @override
    def prompt_of_draw(self, row: int, draw: NextDraw) -> Prompt | None:
        return self._prompts[row]

    @override
    def conversations(self) -> Iterator[Prompt]:
        return (one for one in self._prompts if not one.token_ids)

    @override
    def find_row(self, name: str) -> int:
        hashes, rows = self._hash_index
        first, last = (int(np.searchsorted(hashes, np.int64(hash(name)), side)) for side in ("left", "right"))
        for row in rows[first:last].tolist():
            if self._prompts[row].id == name:
                return int(row)
        raise KeyError(name)

    @override
    def prompt_id(self, row: int) -> str:
        return self._prompts[row].id

    @override
    def sources(self, names: Sequence[str]) -> Mapping[str, NDArray[np.integer]]:
        rows: dict[str, list[int]] = {name: [] for name in names}
        for row, prompt in enumerate(self._prompts):
            rows[prompt.source].append(row)
        return {name: np.array(own, np.uint32) for name, own in rows.items()}

    @override
    def digest(self, rows: NDArray[np.integer], of: DigestOf = "rows") -> str:
        return digest_of_prompts([self._prompts[row] for row in rows.tolist()], of)

    @cached_property
    def _hash_index(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """The hashes of all ids, ascending, and their rows: 12 bytes a prompt, where a table of names takes 59."""
        hashes = np.fromiter((hash(prompt.id) for prompt in self._prompts), np.int64, len(self._prompts))
        rows = np.argsort(hashes, kind="stable").astype(np.uint32)
        return hashes[rows], rows


class FilePool(PromptPool):
    """Rows of files. The rows that are drawn next are held: once a window of them is in use, a thread reads the
    following one. The order of draws does not depend on windows."""

    def __init__(self, files: FileRows, kept: NDArray[np.bool_] | None, form: RowForm, *, source: str) -> None:
        """``kept``: the rows of ``files`` that are in the pool; None: all."""
        self._files, self._form, self._source = files, form, source
        whole = np.arange(len(self._files), dtype=np.uint32)
        self._kept = whole if kept is None or kept.all() else whole[kept]
        self._held = _Held(np.zeros(0, np.int64), (), 0)
        self._following: Future[_Held] | None = None
        self._reader = ThreadPoolExecutor(1, "parquet")
        self._too_long = 0
        self._made: dict[int, Prompt | PromptExcess] = {}  # rows that were read ahead, by their numbers

    def __len__(self) -> int:
        return len(self._kept)

    @property
    @override
    def reads(self) -> bool:
        return True

    @override
    def read_ahead(self, row: int, draw: NextDraw) -> bool:
        number = int(self._kept[row])
        if number not in self._made:
            if self._held.batch(number) is None:
                self._move(number, draw)
            record, (path, line) = self._files.record(number, self._held.batch(number)), self._files.line(number)
            data, form = self._files.data, self._form
            if data.fields["messages"] is not None:
                self._made[number] = unrendered([conversation(record, path, line, data)])[0]
            else:
                problem = render_row(record, path, line, data, form.tokenizer)
                self._made[number] = tokenize_one(problem, form, chat=data.chat_template)
        return isinstance(self._made[number], Prompt)

    @override
    def prompt_of_draw(self, row: int, draw: NextDraw) -> Prompt | None:
        self.read_ahead(row, draw)
        number = int(self._kept[row])
        prompt = self._made.pop(number)
        if isinstance(prompt, PromptExcess):
            self._is_long(self._files.place(number), prompt)
            return None
        return self._named(prompt)

    @override
    def conversations(self) -> Iterator[Prompt]:
        return map(self._named, self._files.conversations(self._kept.astype(np.int64)))

    @override
    def find_row(self, name: str) -> int:
        stem, line = name.removeprefix(f"{self._source}/").rsplit(":", 1)
        row = self._kept.dtype.type(self._files.row(stem, int(line)))  # numpy would copy all rows for another type
        return int(np.searchsorted(self._kept, row))

    @override
    def prompt_id(self, row: int) -> str:
        path, line = self._files.line(int(self._kept[row]))
        return f"{self._source}/{path.stem}:{line}" if self._source else f"{path.stem}:{line}"

    @override
    def sources(self, names: Sequence[str]) -> Mapping[str, NDArray[np.integer]]:
        return {self._source: np.arange(len(self), dtype=np.uint32)}

    @override
    def digest(self, rows: NDArray[np.integer], of: DigestOf = "rows") -> str:
        """Returns a checksum of the files' bytes, and of the rows that are in the pool."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(self._files.checksum().encode() + self._kept.tobytes(), digest_size=16).hexdigest()

    def _named(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the source in its id, if that is one of a mixture."""
        return replace(prompt, id=f"{self._source}/{prompt.id}", source=self._source) if self._source else prompt

    def _move(self, number: int, draw: NextDraw) -> None:
        """Holds the following window, or, if it lacks the row that is drawn, one that begins with it."""
        following, self._following = self._following, None
        held = following.result() if following is not None else None
        if held is None or held.batch(number) is None:
            held = self._read(draw.number, draw)
        self._held = held
        self._following = self._reader.submit(self._read, held.stop, draw)

    def _read(self, start: int, draw: NextDraw) -> _Held:
        """Returns the window that begins with this draw, across the end of an epoch if need be."""
        each = self._files.row_bytes
        most = max(_WINDOW_BYTES // each, min(len(self) // _MOST_WINDOWS, _LARGE_WINDOW_BYTES // each), 1)
        stop = start + min(most, _MOST_ROWS, len(self))
        numbers = np.unique(self._kept[draw.rows(start, stop)]).astype(np.int64)
        return _Held(numbers, tuple(self._files.selected(numbers, None)), stop)

    def _is_long(self, place: str, why: PromptExcess) -> None:
        if self._form.on_long_prompt == "fail":
            raise DataError(f"{place}: the prompt has {why}; raise it or set {self._form.keys[1]}=drop")
        self._too_long += 1
        if not self._too_long & (self._too_long - 1):
            logger.warning(
                "dropped %d prompts so far that have more tokens than %s when they were drawn; the last is %s with %s",
                *(self._too_long, f"{why.key}={why.limit}", place, why.length),
            )


class _Held:
    """Rows in memory: their ascending ``numbers``, and record batches of them, one after the other. ``stop``: number of
    the first draw after them."""

    def __init__(self, numbers: NDArray[np.int64], batches: Sequence[Any], stop: int) -> None:
        self._numbers, self._batches, self.stop = numbers, batches, stop
        self._starts = np.cumsum([0, *map(len, batches)])

    def batch(self, number: int) -> Any:
        """Returns the row alone; None if it is not held."""
        at = int(np.searchsorted(self._numbers, number))
        if at == len(self._numbers) or self._numbers[at] != number:
            return None
        part = int(np.searchsorted(self._starts, at, "right")) - 1
        return self._batches[part].slice(at - int(self._starts[part]), 1)


class JoinedPool(PromptPool):
    """Pools of several sources, one after the other; each has one source."""

    def __init__(self, parts: Sequence[PromptPool]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])
        self.dropped = sum(part.dropped for part in parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @override
    def prompt_of_draw(self, row: int, draw: NextDraw) -> Prompt | None:
        part, start = self._part(row)
        return part.prompt_of_draw(row - start, _inside(draw, start, len(part)))

    @property
    @override
    def reads(self) -> bool:
        return any(part.reads for part in self._parts)

    @override
    def read_ahead(self, row: int, draw: NextDraw) -> bool:
        part, start = self._part(row)
        return part.read_ahead(row - start, _inside(draw, start, len(part)))

    @override
    def conversations(self) -> Iterator[Prompt]:
        return chain.from_iterable(part.conversations() for part in self._parts)

    @override
    def find_row(self, name: str) -> int:
        source = name.split("/", 1)[0]
        at = next(i for i, part in enumerate(self._parts) if part.prompt_id(0).startswith(f"{source}/"))
        return int(self._starts[at]) + self._parts[at].find_row(name)

    @override
    def prompt_id(self, row: int) -> str:
        part, start = self._part(row)
        return part.prompt_id(row - start)

    @override
    def sources(self, names: Sequence[str]) -> Mapping[str, NDArray[np.integer]]:
        found = {}
        for part, start in zip(self._parts, self._starts.tolist(), strict=False):
            (name,) = {part.prompt_id(0).split("/", 1)[0]}
            found[name] = np.arange(start, start + len(part), dtype=np.uint32)
        return {name: found[name] for name in names}

    @override
    def digest(self, rows: NDArray[np.integer], of: DigestOf = "rows") -> str:
        part, start = self._part(int(rows[0]))
        return part.digest(rows - np.uint32(start), of)

    def _part(self, row: int) -> tuple[PromptPool, int]:
        at = int(np.searchsorted(self._starts, row, "right")) - 1
        return self._parts[at], int(self._starts[at])


def _inside(draw: NextDraw, start: int, count: int) -> NextDraw:
    """Returns the draws of the part that has ``count`` rows from ``start`` on, with the rows' numbers in it."""

    def rows(first: int, stop: int) -> NDArray[np.integer]:
        found = draw.rows(first, stop)
        return found[(found >= start) & (found < start + count)] - np.uint32(start)

    return NextDraw(draw.number, rows)


_PRIOR = 0.5, 1.0  # a value, and of how many completions: Beta(1/2, 1/2)
_MIN_LEFT = 0.1  # the share of a source's prompts below which retired ones are drawn again
_MOST_SPREAD = 0.5  # the std of a reward of 0 or 1, at a pass rate of a half


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """A table between two steps, for checkpoints; a number for each prompt."""

    visits: Visits
    rates: Rates  # NaN: unknown
    retired: Retired  # the step; -1: it is drawn
    values: Rates | None = None  # None: they are not tracked
    counts: Rates | None = None  # completions that still count, each by its weight


class PromptTable:
    """One row a prompt: how often it was trained on, its pass rate, whether it is drawn, and its value, SPO's baseline.

    It is updated at the end of a step, in the order of draws, so that it is a function of the steps. ``sources`` has
    the rows of each source.
    """

    def __init__(
        self,
        prompts: PromptPool,
        sources: Mapping[str, NDArray[np.integer]],
        section: CurriculumSection,
        *,
        seed: int,
        track_decay: float | None = None,
    ) -> None:
        """``track_decay``: of the values (`track`); None: these are not tracked."""
        self._section, self._seed, self._track_decay = section, seed, track_decay
        self._sources, self._prompts = sources, prompts
        self.visits = np.zeros(len(prompts), np.int32)
        self.rates = np.full(len(prompts), np.nan)
        self.retired = np.full(len(prompts), -1, np.int32)
        self._again = Counter[str]()  # retired prompts of each source that were drawn again, by this process
        value, count = _PRIOR
        self.values, self.counts = np.full(len(prompts), value), np.full(len(prompts), count)

    def draws(self, row: int, epoch: int) -> bool:
        """True if this epoch draws the prompt. Any thread may ask."""
        s, rate = self._section, self.rates[row]
        drawn = self.retired[row] < 0
        known = self.visits[row] >= s.min_seen
        if drawn and known and s.explore is not None and not np.isnan(rate):
            share = (np.sqrt(rate * (1 - rate)) + s.explore) / (_MOST_SPREAD + s.explore)
            drawn = np.random.default_rng([self._seed, epoch, row, 2]).random() < share
        return bool(drawn)

    def update(self, seen: Iterable[tuple[str, float]], step: int, left_out: Set[int]) -> None:
        """Adds the share of right completions of each prompt that ``step`` ended, by its id and in the order drawn.

        ``left_out``: rows that are not drawn for another reason.
        """
        s = self._section
        for name, share in seen:
            row = self._prompts.find_row(name)
            before = share if np.isnan(self.rates[row]) else self.rates[row]
            self.rates[row] = (before + share) / 2
            self.visits[row] += 1
            if s.retire_above is not None and self.visits[row] >= s.min_seen and self.rates[row] >= s.retire_above:
                self.retired[row] = step
        self.restore_retired(left_out)

    def track(self, seen: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Adds the rewards of completions of each prompt, by its id and in the order drawn, to its value.

        The value is the posterior mean of SPO's value tracker (arXiv:2509.13232), alpha / (alpha + beta), and the count
        is alpha + beta. Then alpha' = decay alpha + sum of r, and beta' = decay beta + sum of 1 - r.
        """
        if self._track_decay is None:
            return
        for name, rewards in seen:
            row = self._prompts.find_row(name)
            kept = self._track_decay * self.counts[row]
            self.counts[row] = kept + len(rewards)
            self.values[row] = (kept * self.values[row] + sum(rewards)) / self.counts[row]

    def prompt_value(self, name: str) -> float:
        """Returns the value of the prompt, from its completions of earlier steps."""
        return float(self.values[self._prompts.find_row(name)])

    def restore_retired(self, left_out: Set[int]) -> None:
        """Draws retired prompts of a source again while less than a tenth of it is drawn, in the order in which they
        retired. Each must be seen ``min_seen`` times before it can retire again. A warning says so whenever their
        number has doubled: with a policy that solves nearly all, it happens at each step."""
        gone = np.zeros(len(self.retired), np.bool_)
        gone[list(left_out)] = True
        for name, rows in self._sources.items():
            retired = rows[(self.retired[rows] >= 0) & ~gone[rows]]
            drawn = int((~gone[rows]).sum()) - len(retired)
            missing = min(len(retired), int(np.ceil(_MIN_LEFT * len(rows))) - drawn)
            if missing <= 0:
                continue
            back = retired[np.argsort(self.retired[retired], kind="stable")][:missing]
            self.retired[back], self.visits[back] = -1, 0
            before = self._again[name]
            self._again[name] += len(back)
            if self._again[name].bit_length() > before.bit_length():
                of = f" of source {name!r}" if name else ""
                logger.warning(
                    "%d of %d prompts%s are left: %d that had retired are drawn again, %d so far",
                    *(drawn, len(rows), of, len(back), self._again[name]),
                )

    def row(self) -> dict[str, float]:
        """Returns the metrics ``curriculum/…``."""
        known = self.rates[~np.isnan(self.rates)]
        mean = {"curriculum/mean_pass_rate": float(known.mean())} if len(known) else {}
        return {"curriculum/retired": int((self.retired >= 0).sum()), **mean}

    def state(self) -> TableState:
        """Returns the state that ``restore`` continues from."""
        columns = {"visits": self.visits.copy(), "rates": self.rates.copy(), "retired": self.retired.copy()}
        if self._track_decay is not None:
            columns |= {"values": self.values.copy(), "counts": self.counts.copy()}
        return TableState(**columns)

    def restore(self, state: TableState | None) -> None:
        """Continues from ``state``. Raises CheckpointError if it belongs to other data."""
        found = 0 if state is None else len(state.visits)
        if state is None or found != len(self.visits):
            raise CheckpointError(
                f"the checkpoint has pass rates of {found} prompts, but data.curriculum needs {len(self.visits)}; "
                "resume with the same data and limits"
            )
        self.visits, self.rates, self.retired = state.visits.copy(), state.rates.copy(), state.retired.copy()
        if state.values is not None and state.counts is not None:
            self.values, self.counts = state.values.copy(), state.counts.copy()


_SAME_LEAKS = (
    "and with data.on_leak and eval.sets by which the same problems are dropped; if nothing of these has changed, an "
    "older version of rl_megatron, with which to resume it, took other problems for equal (docs/cluster.md)"
)


class PromptStream:
    """Endless epochs over ``prompts``, each shuffled by (seed, epoch), so that a position determines the order.

    With ``weights`` each prompt is of one of these sources, which follow each other by `Proportions`; without, all
    prompts are of one source. ``left_out`` are the rows of ``prompts`` that are no longer drawn. With a ``curriculum``
    `table` has their pass rates and says which are drawn; with a ``track_decay`` it has their values, too. The caller
    updates, saves and restores it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        curriculum: CurriculumSection | None = None,
        track_decay: float | None = None,
    ) -> None:
        if not len(prompts):
            raise DataError("no prompts to train on")
        self._pool, self._weights = (
            prompts if isinstance(prompts, PromptPool) else ListPool(prompts),
            dict(weights or {}),
        )
        self.left_out = set[int]()
        rows = self._pool.sources(list(self._weights)) if weights else {"": np.arange(len(prompts), dtype=np.uint32)}
        self._epochs = {name: Epochs(own, seed=seed) for name, own in rows.items()}
        self.table: PromptTable | None = None
        if (curriculum is not None and curriculum.is_on) or track_decay is not None:
            section = curriculum or CurriculumSection()
            self.table = PromptTable(self._pool, rows, section, seed=seed, track_decay=track_decay)
        self._shares = Proportions(self._weights or {"": 1.0})

    def next_prompts(self, n: int) -> list[Prompt]:
        """Returns the next ``n`` prompts, across the end of an epoch if need be."""
        return [self._next(self._shares.next()) for _ in range(n)]

    def read_ahead(self) -> None:
        """Reads what the next prompts, `state` and `exclude` need: large files, for minutes. Runs in a thread, while
        no other code uses the stream."""
        self.digest()
        self._pool.find_row(self._pool.prompt_id(0))  # may make a table of all names
        for epochs in self._epochs.values():
            number = epochs.drawn
            (row,) = epochs.draws(number, number + 1).tolist()
            self._pool.read_ahead(row, NextDraw(number, epochs.draws))

    @property
    def reads(self) -> bool:
        """True if `next_prompts` reads or renders rows of files, unless `make_next` did."""
        return self._pool.reads

    def make_next(self, n: int) -> None:
        """Reads and renders the prompts that `next_prompts` is to give next, for seconds if the chat template is slow.
        Runs in a thread, while no other code takes from the stream. `next_prompts` raises the error of a bad row."""
        shares = Proportions(self._weights or {"": 1.0}, self._shares.taken)
        for name, count in Counter(shares.next() for _ in range(n)).items():
            epochs, left = self._epochs[name], count
            for number in range(first := epochs.drawn, first + len(epochs.rows)):
                (row,) = epochs.draws(number, number + 1).tolist()
                if row in self.left_out or (self.table and not self.table.draws(row, number // len(epochs.rows))):
                    continue
                try:
                    left -= self._pool.read_ahead(row, NextDraw(number, epochs.draws))
                except DataError:
                    return
                if not left:
                    break

    def digest(self) -> Mapping[str, str]:
        """Returns a checksum of each source's prompts, which `state` and `restore` compare: read once."""
        return self._digests

    def exclude(self, prompt: Prompt) -> None:
        """Stops drawing ``prompt``. Raises DataError if no other of its source is left."""
        self.left_out.add(self._pool.find_row(prompt.id))
        name = prompt.source if self._weights else ""
        rows = self._epochs[name].rows
        if len(self.left_out) >= len(rows) and self.left_out.issuperset(rows.tolist()):
            of = f" of source {name!r}" if name else ""
            raise DataError(f"no prompts{of} are left to train on: none of {len(rows)} can be sampled")
        if self.table is not None:
            self.table.restore_retired(self.left_out)

    def epochs(self, more: int = 0) -> dict[str, float]:
        """Returns the epochs of each source of a mixture that were drawn, or will be after ``more`` prompts."""
        found, whole = self._epochs, sum(self._weights.values())
        shares = {name: more * weight / whole for name, weight in self._weights.items()}
        return {name: found[name].passed + share / len(found[name].rows) for name, share in shares.items()}

    def state(self) -> dict[str, int] | MixtureState:
        """Returns the position in the stream; ``restore`` of it and ``left_out`` continues with the same prompts."""
        if not self._weights:
            (only,) = self._epochs.values()
            size, digest = len(self._pool), _short(self._digests[""])
            return {"epoch": only.epoch, "position": only.position, "num_prompts": size, "digest": digest}
        taken = self._shares.taken
        sources = {
            name: SourceState(
                epoch=one.epoch,
                position=one.position,
                size=len(one.rows),
                digest=self._digests[name],
                weight=self._weights[name],
                taken=taken[name],
            )
            for name, one in self._epochs.items()
        }
        return MixtureState(position=sum(taken.values()), sources=sources)

    def restore(self, state: Mapping[str, int] | MixtureState, left_out: Sequence[int] = ()) -> None:
        """Continues from ``state``; where weights have changed, shares are counted from there on.

        Raises CheckpointError if it belongs to another data set.
        """
        if isinstance(state, MixtureState):
            self._restore_sources(state)
        elif self._weights:
            raise CheckpointError("the checkpoint was made with one source of prompts, and data.sources has several")
        elif state["num_prompts"] != len(self._pool):
            raise CheckpointError(
                f"the checkpoint was made with {state['num_prompts']} training prompts, but the data has "
                f"{len(self._pool)}; resume with the same data and limits, {_SAME_LEAKS}"
            )
        elif "digest" in state and state["digest"] not in map(_short, self._digests_of("")):
            raise CheckpointError(
                f"the checkpoint was made with as many training prompts ({state['num_prompts']}), but with others, by "
                f"their digest; resume with the same files, {_SAME_LEAKS}"
            )
        else:
            self._epochs[""].move(state["epoch"], state["position"])
        self.left_out = set(left_out)

    def _next(self, name: str) -> Prompt:
        """Returns the next prompt of this source that is not left out or too long, and that the curriculum draws.

        With a table, rows that are too long are left out: they do not count among those that must be left.
        """
        epochs, table, tried = self._epochs[name], self.table, 0
        while True:
            row = epochs.next()
            tried += 1
            if row not in self.left_out and (table is None or table.draws(row, epochs.epoch)):
                prompt = self._pool.prompt_of_draw(row, NextDraw(epochs.drawn - 1, epochs.draws))
                if prompt is not None:
                    return prompt
                if table is not None:
                    self.left_out.add(row)
            if tried % len(epochs.rows):
                continue
            if table is not None:  # it then knows the rows dropped since the last step, at the cost of all rows
                table.restore_retired(self.left_out)
            if self.left_out.issuperset(epochs.rows.tolist()) or (table is None and tried > len(epochs.rows)):
                raise DataError("every prompt has too many tokens; the warnings before name the key to raise")

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {name: self._pool.digest(one.rows) for name, one in self._epochs.items()}

    def _digests_of(self, name: str) -> Iterator[str]:
        """Yields the digests of the source's prompts that a checkpoint may have: this version's, then older ones'."""
        yield self._digests[name]
        for of in OLDER_DIGESTS:
            yield self._pool.digest(self._epochs[name].rows, of)

    def _restore_sources(self, state: MixtureState) -> None:
        if list(state.sources) != list(self._weights):
            then, now = ", ".join(state.sources), ", ".join(self._weights) or "one source"
            raise CheckpointError(f"the checkpoint was made with the sources {then}, but the data has {now}")
        for name, source in state.sources.items():
            size = len(self._epochs[name].rows)
            if source.size != size or source.digest not in self._digests_of(name):
                raise CheckpointError(
                    f"data.sources.{name}: the checkpoint was made with {source.size} training prompts of digest "
                    f"{source.digest}, but the source has {size} of {self._digests[name]}; resume with the same file "
                    f"and limits, {_SAME_LEAKS}"
                )
        for name, source in state.sources.items():
            self._epochs[name].move(source.epoch, source.position)
        before = {name: source.weight for name, source in state.sources.items()}
        if before == self._weights:
            self._shares = Proportions(before, {name: source.taken for name, source in state.sources.items()})
        else:
            logger.warning(
                "the weights of data.sources were %s and are %s: after %d prompts, shares are counted from there on",
                *(before, self._weights, state.position),
            )
            self._shares = Proportions(self._weights)


def _short(digest: str) -> int:
    """Returns 60 bits of it, which checkpoints of one source have."""
    return int(digest[:15], 16)
