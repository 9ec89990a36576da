"""Moves what layers keep for their backward pass to the host's memory and back (``learner.offload.activations``).

megatron-core 0.16.1 has such an offload (``fine_grained_activation_offloading``), which is not used here. It asks for
TransformerEngine; it takes the micro-batches of its first step for those of all later ones, and leaves others on the
GPU; its pinned memory grows with every new length (`rl_megatron.weights.bytes.parked`); and it frees storages that
torch's layers keep other parts of. Here torch's own hooks of saved tensors act around the halves of a layer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rl_megatron.learner.keywords import HELD, SLAB
from rl_megatron.weights.bytes.parked import Extent, PinnedPool

LEAST = 2**20
"""Bytes of the smallest storage that is moved: a smaller copy would take as long."""


@cache
def arena() -> PinnedPool:
    """Returns the pinned memory of all models of this process, which train one after the other."""
    return PinnedPool(SLAB)


class _Piece:
    """A storage of the GPU that several saved tensors may share. Without ``storage`` it is in the host's memory."""

    def __init__(self, half: _Half, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.half, self.device, self.size = half, device, storage.nbytes()
        self.extents: Sequence[Extent] = ()

    def __del__(self) -> None:
        """Gives its memory back once nothing needs it, perhaps before anything did."""
        if self.extents:
            arena().free(self.extents, self.half.copied)
        elif self.half.loading is not None:  # its memory must not be others' while it is written
            torch.cuda.current_stream().wait_event(self.half.loading)


@dataclass(slots=True, eq=False)
class _Half:
    """The tensors that one half of a layer keeps in one forward pass."""

    before: _Half | None  # the previous half of the same pass
    pieces: list[weakref.ref[_Piece]] = field(default_factory=list)
    copied: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event())
    is_offloaded: bool = False  # no longer on the GPU
    loading: torch.cuda.Event | None = None  # happens when all of it is back

    @property
    def alive(self) -> list[_Piece]:
        """Pieces that a backward pass still needs."""
        return [piece for one in self.pieces if (piece := one()) is not None]


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """A saved tensor."""

    piece: _Piece
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Activations:
    """Offloads ``parts`` of the layers of a rank's chunks: "attention", "mlp" and "moe", each with its norm.

    A half's copies begin when it has been computed. In the backward pass they come back while the one after it
    computes. Values are copied by whole storages, so views keep their strides and results their bits. Parameters,
    and storages of less than `LEAST` bytes, stay. Without parts, nothing is done.
    """

    def __init__(self, models: Sequence[GPTModel], parts: Collection[str]) -> None:
        self._models, self._parts = models, parts
        if not parts:
            return
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()
        self._weights: set[int] | None = None  # storages of parameters, within a pass
        self._held: deque[_Half] = deque()
        self._last: _Half | None = None  # the forward pass's last half
        self._open: tuple[_Half, Any] | None = None  # the half that computes, with its hooks
        self._seen: dict[int, _Piece] = {}  # pieces of the half that computes, by storage
        self._moved: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # storages that earlier halves moved
        for model in models:
            model.decoder.register_forward_pre_hook(self._begin)
            for first, last in (half for layer in model.decoder.layers for half in self._halves(layer)):
                first.register_forward_pre_hook(self._enter)
                last.register_forward_hook(self._leave)

    def _halves(self, layer: Any) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
        """Yields the first and last module of each half of ``layer`` that is offloaded."""
        if "attention" in self._parts:
            yield layer.input_layernorm, layer.self_attention
        if ("moe" if isinstance(layer.mlp, MoELayer) else "mlp") in self._parts:
            yield layer.pre_mlp_layernorm, layer.mlp

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A context in which forward passes offload what they keep. All their backward passes are within it too."""
        if not self._parts:
            yield
            return
        parameters = [p for model in self._models for p in model.parameters()]
        self._weights = {p.untyped_storage()._cdata for p in parameters}
        try:
            yield
        finally:
            if self._open is not None:  # a module raised
                self._open[1].__exit__(None, None, None)
            self._weights = self._open = self._last = None
            self._held.clear()
            self._seen.clear()
            self._moved.clear()

    def _begin(self, *_: Any) -> None:
        self._last = None
        self._moved.clear()

    def _enter(self, *_: Any) -> None:
        if self._weights is None or not torch.is_grad_enabled():
            return
        self._last = half = _Half(self._last)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._open = half, hooks
        hooks.__enter__()

    def _leave(self, *_: Any) -> None:
        if self._open is None:
            return
        half, hooks = self._open
        hooks.__exit__(None, None, None)
        self._open, pieces, self._seen = None, list(self._seen.values()), {}
        computes = torch.cuda.current_stream()
        self._out.wait_stream(computes)
        with torch.cuda.stream(self._out):
            for piece in pieces:
                piece.extents = arena().allocate(piece.size, self._out)
                for extent, there in _cut(piece):
                    arena().view(extent)[: len(there)].copy_(there, non_blocking=True)
        half.copied.record(self._out)
        self._moved |= {piece.storage._cdata: weakref.ref(piece.storage) for piece in pieces if piece.storage}
        self._held.append(half)
        if len(self._held) > HELD:
            done = self._held.popleft()
            computes.wait_event(done.copied)  # later work of this stream may have the memory
            done.is_offloaded = True
            for piece in done.alive:
                piece.storage = None

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        if not tensor.is_cuda or storage.nbytes() < LEAST or storage._cdata in (self._weights or ()):
            return tensor
        if (moved := self._moved.get(storage._cdata)) is not None and moved() is not None:
            return tensor  # others keep it, as all layers do rotary angles
        assert self._open is not None
        piece = self._seen.get(storage._cdata)
        if piece is None:
            half = self._open[0]
            self._seen[storage._cdata] = piece = _Piece(half, storage, tensor.device)
            half.pieces.append(weakref.ref(piece))
        return _Saved(piece, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        half = saved.piece.half
        self._load(half)
        if half.loading is not None:
            torch.cuda.current_stream().wait_event(half.loading)
        if half.before is not None:
            self._load(half.before)
            half.before = None
        empty = torch.empty(0, dtype=saved.dtype, device=saved.piece.device)
        assert saved.piece.storage is not None
        return empty.set_(saved.piece.storage, saved.offset, saved.size, saved.stride)

    def _load(self, half: _Half) -> None:
        """Begins to copy back the part of ``half`` that only the host's memory holds."""
        if not half.is_offloaded:
            return
        half.is_offloaded, gone = False, half.alive
        for piece in gone:
            piece.storage = torch.empty(piece.size, dtype=torch.uint8, device=piece.device).untyped_storage()
        half.loading = torch.cuda.Event()
        self._back.wait_event(half.copied)
        self._back.wait_stream(torch.cuda.current_stream())  # it may have had that memory before
        with torch.cuda.stream(self._back):
            for piece in gone:
                for extent, here in _cut(piece):
                    here.copy_(arena().view(extent)[: len(here)], non_blocking=True)
        half.loading.record(self._back)
        for piece in gone:
            arena().free(piece.extents, half.loading)
            piece.extents = ()


def _cut(piece: _Piece) -> Iterator[tuple[Extent, Tensor]]:
    """Yields the piece's extents in the host's memory, and for each the bytes of the GPU's storage."""
    assert piece.storage is not None
    flat, at = torch.empty(0, dtype=torch.uint8, device=piece.device).set_(piece.storage), 0
    for extent in piece.extents:
        size = min(extent[1] - extent[0], piece.size - at)
        yield extent, flat[at : at + size]
        at += size
