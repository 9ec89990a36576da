"""The cache of keys and values of the sequences being decoded, a ring of columns that all sequences share, and the
states of their delta nets.

One clock ticks for the whole batch: in each step every active row writes the same column, so a write is one strided
copy and no row needs an index. A row is a sequence; its tokens end at the current column, whatever its length, and a
bias of minus infinity hides the columns that are not its own. Keys are rotated before they come here, so columns may
be in any order and the ring may wrap.

Both products of attention are weighted sums of stored rows, which `torch.embedding_bag` computes while it reads each of
them once: a query head's scores are its D numbers times the D key rows of B columns, its output is its weights times
the value rows. The query is one token, and for matrices that thin a batched product takes two to three times as long
(five with two threads, as MKL's then uses only one).

Letters: n active rows (always the first n), Q query heads, K key-value heads, D a head's numbers
(`ModelShape.widest_head`), C columns, B columns of a block of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.models.attention import Context, score_scale
from rl_megatron.models.delta import DeltaStates
from rl_megatron.models.indexer import choose_keys
from rl_megatron.models.shape import ModelShape

# Keys lie in blocks of columns, so that the scores of columns not in use are not computed.
BLOCK_COLUMNS = 48


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The cached keys, values and states of P sequences, for those that continue them.

    ``columns`` [2 * layers that attend, P, longest, K, D] are all rotated keys, then all values; each sequence stands
    at the END of its row, with zeros before it, as do those of ``index_keys`` (`index_key_zeros`).
    """

    columns: Tensor
    remembered: DeltaStates
    index_keys: Tensor

    def select(self, sequences: Tensor) -> PrefixCache:
        """Returns copies of those of ``sequences``."""
        columns, index_keys = (held.index_select(1, sequences) for held in (self.columns, self.index_keys))
        return PrefixCache(columns, self.remembered.select(sequences), index_keys)


def index_key_zeros(
    shape: ModelShape | None, rows: int, columns: int, dtype: torch.dtype | None, device: torch.device
) -> Tensor:
    """Returns zeros [layers with an indexer, rows, columns, its D] for its rotated keys; no layers without a shape."""
    indexer = None if shape is None else shape.indexer
    size = (0, 0) if indexer is None else (len(indexer.layers), indexer.head_dim)
    return torch.zeros(size[0], rows, columns, size[1], dtype=dtype, device=device)


class KVCache(Context):
    """A ring of ``columns`` for ``rows`` sequences; no row may live for more than ``columns`` tokens.

    If these are more than an indexer chooses, it holds its keys, and steps with a longer sequence attend to those that
    it chooses.
    """

    def __init__(self, shape: ModelShape, *, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.columns = rows, columns
        self._heads, self._query_heads, self._head_dim = shape.num_kv_heads, shape.num_heads, shape.widest_head
        self._scale, self._windows = score_scale(shape), shape.windows
        self._block = min(BLOCK_COLUMNS, columns)
        blocks, heads = -(-columns // self._block), shape.num_kv_heads
        self._places, layers = shape.places_of_layers, len(shape.attention_layers)
        # Zeros, not empty: a hidden column has weight 0, and 0 * NaN would show.
        key_size = (layers, blocks, rows, heads, self._head_dim, self._block)
        self._keys = torch.zeros(key_size, dtype=dtype, device=device)
        self._values = torch.zeros((layers, rows, heads, columns, self._head_dim), dtype=dtype, device=device)
        self._remembered = DeltaStates.zeros(shape, rows, dtype, device)
        self._indexers = () if shape.indexer is None else shape.indexer.layers
        self._top_k = columns if shape.indexer is None else shape.indexer.top_k
        self.indexed = columns > self._top_k
        self._index_keys = index_key_zeros(shape if self.indexed else None, rows, columns, dtype, device)
        self._sparse, self._wraps = False, False
        self._chosen = torch.zeros(0, dtype=torch.int64, device=device)  # columns [n, top_k], -1 for none
        self._bias = torch.zeros(rows, 1, columns, dtype=dtype, device=device)
        # The key-value head of every query head, counted over all rows.
        head = torch.arange(rows * heads, device=device, dtype=torch.int32)
        head = head.repeat_interleave(shape.num_heads // heads)[:, None]
        self._key_rows = (head * self._head_dim + self._counted(self._head_dim)).view(-1)
        self._key_starts = self._counted(0, len(self._key_rows), self._head_dim)
        self._first_value_row = head * columns
        self._active = self._column = self._first = self._last = 0
        self._value_rows = self._value_starts = self._key_starts[:0]
        self._outside: dict[int, Tensor] = {}  # window -> minus infinity for columns in use that are too old

    def open_column(self, clock: int, *, active: int, oldest: int) -> None:
        """Begins step ``clock`` for the first ``active`` rows, whose oldest token is of step ``oldest``."""
        self._active, self._column = active, clock % self.columns
        first = oldest % self.columns
        self._wraps, self._sparse = first > self._column, clock - oldest >= self._top_k
        self._first, self._last = (0, self.columns) if self._wraps else (first, self._column + 1)
        self._bias[:active, :, self._column] = 0
        heads, window = active * self._query_heads, self._last - self._first
        self._value_rows = (self._first_value_row[:heads] + self._counted(self._first, self._last)).view(-1)
        self._value_starts = self._counted(0, heads * window, window)
        age = (self._column - self._counted(self._first, self._last)) % self.columns
        for size in {*self._windows} - {0}:
            self._outside[size] = self._bias.new_zeros(len(age)).masked_fill_(age >= size, -torch.inf)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Writes the open column, and attends from one token per active row to its own columns."""
        num, place = self._active, self._places[layer]
        block, inside = divmod(self._column, self._block)
        self._keys[place, block, :num, ..., inside] = key
        self._values[place, :num, :, self._column] = value
        if self._sparse:
            return self._attend_chosen(place, query)
        bias = self._bias[:num, :, self._first : self._last]
        if self._windows and (size := self._windows[layer]):
            bias = bias + self._outside[size]
        scores = torch.add(bias, self._scores(place, query.reshape(-1)), alpha=self._scale)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None].expand(num, -1, 1)), -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        if sinks is not None:
            weights = weights[..., :-1].contiguous()
        values = self._values[place].view(-1, self._head_dim)
        return _weighted_sums(values, self._value_rows, self._value_starts, weights.view(-1)).view(num, -1)

    def choose(self, layer: int, key: Tensor, queries: Callable[[], tuple[Tensor, Tensor]]) -> None:  # noqa: D102
        keys = self._index_keys[self._indexers.index(layer), : self._active]
        keys[:, self._column] = key
        if not self._sparse:
            return
        query, weights = queries()
        keys, visible = keys[:, self._first : self._last], self._bias[: self._active, :, self._first : self._last] == 0
        shift = self._column + 1 if self._wraps else 0
        if shift:  # the first of equal scores is the oldest
            keys, visible = keys.roll(-shift, 1), visible.roll(-shift, 2)
        found = choose_keys(query[:, None], weights[:, None], keys, visible, self._top_k)[:, 0].long()
        self._chosen = found.where(found < 0, (found + shift + self._first) % self.columns)

    def _attend_chosen(self, place: int, query: Tensor) -> Tensor:
        """Attends from ``query`` [n, Q, D] to the chosen columns; all Q heads have keys."""
        at, rows = self._chosen.clamp(min=0), self._counted(self._active)[:, None]
        keys = self._keys[place][at // self._block, rows, :, :, at % self._block]  # [n, top_k, Q, D]
        values = self._values[place][rows, :, at]
        scores = torch.einsum("nqd,nkqd->nqk", query, keys) * self._scale
        weights = scores.masked_fill_((self._chosen < 0)[:, None], -torch.inf).softmax(-1, dtype=torch.float32)
        return torch.einsum("nqk,nkqd->nqd", weights.to(values.dtype), values).flatten(1)

    def remember(self, layer: int, x: Tensor, taps: Tensor, decay: Tensor, beta: Tensor) -> Tensor:  # noqa: D102
        return self._remembered.step(self._places[layer], x, taps, decay, beta)

    def insert(self, start: int, clock: int, prefix: PrefixCache, lengths: Tensor) -> None:
        """Writes the prefixes, of ``lengths`` [rows] tokens, of the rows from ``start`` on, as if they were decoded in
        the steps before ``clock``."""
        columns = prefix.columns
        stop, longest = start + columns.shape[1], columns.shape[2]
        self._remembered.write(slice(start, stop), prefix.remembered)
        age = (clock - 1 - torch.arange(self.columns, device=lengths.device)) % self.columns
        hidden = age >= lengths[:, None]
        self._bias[start:stop] = hidden.to(self._bias.dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)
        layers = len(self._values)
        keys, values = columns[:layers].permute(0, 1, 3, 4, 2), columns[layers:].transpose(2, 3)
        for column, source, count in self._runs((clock - longest) % self.columns, longest):
            block, inside = divmod(column, self._block)
            here = slice(source, source + count)
            self._keys[:, block, start:stop, ..., inside : inside + count] = keys[..., here]
            self._values[:, start:stop, :, column : column + count] = values[..., here, :]
            if self.indexed:
                self._index_keys[:, start:stop, column : column + count] = prefix.index_keys[:, :, here]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies rows ``source`` over rows ``target`` (indices; no row is in both)."""
        self._bias[target] = self._bias[source]
        self._remembered.write(target, self._remembered.select(source))
        keys, values = self._keys[:, self._live_blocks], self._values[..., self._first : self._last, :]
        keys[:, :, target] = keys[:, :, source]
        values[:, target] = values[:, source]
        index_keys = self._index_keys[:, :, self._first : self._last]
        index_keys[:, target] = index_keys[:, source]

    @property
    def _live_blocks(self) -> slice:
        return slice(self._first // self._block, (self._last - 1) // self._block + 1)

    def _scores(self, layer: int, query: Tensor) -> Tensor:
        """Returns unscaled scores [n, Q, columns in use] of ``query`` [n * Q * D]."""
        num, live = len(query), self._live_blocks
        rows, starts = self._key_rows[:num], self._key_starts[: num // self._head_dim]
        parts = [
            _weighted_sums(self._keys[layer, block].view(-1, self._block), rows, starts, query)
            for block in range(live.start, live.stop)
        ]
        offset = live.start * self._block
        scores = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return scores[:, self._first - offset : self._last - offset].view(self._active, self._query_heads, -1)

    def _runs(self, column: int, count: int) -> Iterator[tuple[int, int, int]]:
        """``count`` columns from ``column`` on round the ring, cut at blocks: (column, how many before it, length)."""
        done = 0
        while done < count:
            length = min(count - done, self._block - column % self._block, self.columns - column)
            yield column, done, length
            column, done = (column + length) % self.columns, done + length

    def _counted(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, dtype=torch.int32, device=self._bias.device)


def _weighted_sums(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Sums of ``weights[i] * table[rows[i]]`` over the stretches of i that begin at ``starts``: [starts, width]."""
    sums: Tensor = torch.embedding_bag(table, rows, starts, False, 0, False, weights)[0]
    return sums
