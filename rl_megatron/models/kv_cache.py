"""Keys and values of the sequences being decoded, in a ring of columns that all of them share.

One clock ticks for the whole batch: in each step every active row writes the same column, so a write is one strided
copy and no row needs an index. A row is a sequence; its tokens end at the current column, whatever its length, and a
bias of minus infinity hides the columns that are not its own. Keys are rotated before they come here, so columns may
be in any order and the ring may wrap.

Letters: n active rows (always the first n), K key-value heads, D head size, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.models.shape import ModelShape


class KVCache:
    """A ring of ``columns`` for ``rows`` sequences; no row may live for more than ``columns`` tokens."""

    def __init__(self, shape: ModelShape, *, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.columns = rows, columns
        self._heads, self._group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        self._scale = shape.head_dim**-0.5
        layers, heads, head_dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        # Zeros, not empty: a hidden column has weight 0, and 0 * NaN would show. Keys lie along the columns, as the
        # product with queries reads them (a third faster than the transposed product).
        self._keys = torch.zeros((layers, rows, heads, head_dim, columns), dtype=dtype, device=device)
        self._values = torch.zeros((layers, rows, heads, columns, head_dim), dtype=dtype, device=device)
        self._bias = torch.zeros(rows, self._heads, columns, dtype=dtype, device=device)
        self._active = self._column = self._first = self._last = 0

    def open_column(self, clock: int, *, active: int, oldest: int) -> None:
        """Begin step ``clock`` for the first ``active`` rows, whose oldest token was written at step ``oldest``."""
        self._active, self._column = active, clock % self.columns
        first = oldest % self.columns
        wraps = first > self._column
        self._first, self._last = (0, self.columns) if wraps else (first, self._column + 1)
        self._bias[:active, :, self._column] = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the open column and attend to each row's own: an `Attend` of one token per active row."""
        num, heads = self._active, self._active * self._heads
        self._keys[layer, :num, ..., self._column] = key
        self._values[layer, :num, :, self._column] = value
        keys = self._keys[layer].flatten(0, 1)[:heads, :, self._first : self._last]
        values = self._values[layer].flatten(0, 1)[:heads, self._first : self._last]
        bias = self._bias.view(-1, 1, self.columns)[:heads, :, self._first : self._last]
        # The query heads of one key-value head are the rows of one small matrix: no key is repeated.
        grouped = query.reshape(heads, self._group, -1)
        scores = torch.baddbmm(bias.expand(-1, self._group, -1), grouped, keys, alpha=self._scale)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(num, -1)

    def insert(self, start: int, clock: int, prefix: Tensor, lengths: Tensor) -> None:
        """Give rows ``start``... their prefixes, as if just decoded in the steps before ``clock``.

        ``prefix`` [2 * layers, rows, longest, K, D], all keys, then all values, holds each row's ``lengths`` [rows]
        tokens at its end.
        """
        stop, longest = start + prefix.shape[1], prefix.shape[2]
        age = (clock - 1 - torch.arange(self.columns, device=lengths.device)) % self.columns
        hidden = age >= lengths[:, None]
        self._bias[start:stop] = hidden.to(self._bias.dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)
        begin = (clock - longest) % self.columns
        before_wrap = min(longest, self.columns - begin)
        layers = len(self._keys)
        keys, values = prefix[:layers].permute(0, 1, 3, 4, 2), prefix[layers:].transpose(2, 3)
        for to, here in (
            (slice(begin, begin + before_wrap), slice(before_wrap)),
            (slice(longest - before_wrap), slice(before_wrap, None)),
        ):
            self._keys[:, start:stop, ..., to] = keys[..., here]
            self._values[:, start:stop, :, to] = values[..., here, :]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows ``source`` over rows ``target`` (indices, no row in both)."""
        self._bias[target] = self._bias[source]
        for live in (self._keys[..., self._first : self._last], self._values[..., self._first : self._last, :]):
            live[:, target] = live[:, source]
