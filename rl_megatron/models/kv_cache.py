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
        # Zeros, not empty: a hidden column has weight 0, and 0 * NaN would show.
        size = (2 * shape.num_layers, rows, self._heads, columns, shape.head_dim)
        self._store = torch.zeros(size, dtype=dtype, device=device)
        self._flat = self._store.view(2 * shape.num_layers, rows * self._heads, columns, shape.head_dim)
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
        self._store[2 * layer, :num, :, self._column] = key
        self._store[2 * layer + 1, :num, :, self._column] = value
        keys = self._flat[2 * layer, :heads, self._first : self._last]
        values = self._flat[2 * layer + 1, :heads, self._first : self._last]
        bias = self._bias.view(-1, 1, self.columns)[:heads, :, self._first : self._last]
        # The query heads of one key-value head are the rows of one small matrix: no key is repeated.
        grouped = query.reshape(heads, self._group, -1)
        scores = torch.baddbmm(bias.expand(-1, self._group, -1), grouped, keys.transpose(1, 2), alpha=self._scale)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(num, -1)

    def insert(self, start: int, clock: int, prefix: Tensor, lengths: Tensor) -> None:
        """Give rows ``start``... their prefixes, as if just decoded in the steps before ``clock``.

        ``prefix`` [2 * layers, rows, longest, K, D] holds each row's ``lengths`` [rows] tokens at its end.
        """
        stop, longest = start + prefix.shape[1], prefix.shape[2]
        age = (clock - 1 - torch.arange(self.columns, device=lengths.device)) % self.columns
        hidden = age >= lengths[:, None]
        self._bias[start:stop] = hidden.to(self._bias.dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)
        target, source = self._store[:, start:stop], prefix.transpose(2, 3)
        begin = (clock - longest) % self.columns
        before_wrap = min(longest, self.columns - begin)
        target[:, :, :, begin : begin + before_wrap] = source[:, :, :, :before_wrap]
        target[:, :, :, : longest - before_wrap] = source[:, :, :, before_wrap:]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows ``source`` over rows ``target`` (indices, no row in both)."""
        self._bias[target] = self._bias[source]
        live = self._store[:, :, :, self._first : self._last]
        live[:, target] = live[:, source]
