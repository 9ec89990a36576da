"""Records where an engine's own loader puts every Hugging Face element, while it loads tensors without data.

Each copy of the loader goes from a view of a Hugging Face tensor, or of several joined by torch.cat, to a view of a
parameter. The recorder notes both views and copies nothing. Engines import this module: it needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.errors import WeightError
from rl_megatron.weights.boxes import Box, Shape, intersect, shift, whole_box

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
_Parts = Sequence[tuple[str, Box]]
"""The Hugging Face tensors in a tensor without data, and where they are in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBox:
    """``box`` of Hugging Face tensor ``hf`` of shape ``full_shape`` is stored in ``param`` at ``view``.

    ``dtype`` is the tensor's in the file. ``view`` is the size, strides and offset, in elements of the parameter's
    storage, of a view of the box's shape.
    """

    hf: str
    full_shape: Shape
    dtype: torch.dtype
    box: Box
    param: str
    view: tuple[Shape, Shape, int]

    def local_slice(self, tensor: Tensor) -> Tensor:
        """The box in the parameter."""
        size, strides, offset = self.view
        return tensor.detach().as_strided(size, strides, offset)


def record(
    load: Load,
    shapes: Mapping[str, Shape],
    params: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    *,
    partial: bool = False,
) -> list[ParameterBox]:
    """Records where ``load`` copies every tensor of ``shapes`` in ``params``, which stay unchanged.

    Raises WeightError that names a tensor from which the loader computes other values; with ``partial`` such a tensor
    is left out.
    """
    sources = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
    recorder = _Recorder(sources, params, partial)
    with torch.no_grad(), recorder:
        load(iter(sources.items()))
    return recorder.held


class _Recorder(TorchDispatchMode):
    def __init__(self, sources: Mapping[str, Tensor], params: Mapping[str, Tensor], partial: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, tuple[Tensor, _Parts]] = {
            _storage(tensor): (tensor, [(name, whole_box(tensor.shape))]) for name, tensor in sources.items()
        }
        self._params = {_storage(tensor): name for name, tensor in params.items()}
        self._partial = partial
        self.held: list[ParameterBox] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.cat.default:
            joined: Tensor = func(*args, **(kwargs or {}))
            self._join(joined, *args)
            return joined
        if func is not torch.ops.aten.copy_.default or _storage(args[0]) not in self._params:
            return func(*args, **(kwargs or {}))
        target, source = args[0], args[1]
        if not target.numel():  # a padded parameter leaves this rank nothing
            return target
        param = self._params[_storage(target)]
        if _storage(source) not in self._sources:
            if self._partial:
                return target
            raise WeightError(
                f"{param}: the engine's loader does not copy a Hugging Face tensor into it, but computes its values; "
                "its layout cannot be recorded"
            )
        self.held += _held(*self._sources[_storage(source)], source, param, target)
        return target

    def _join(self, joined: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
        """Notes the parts of a tensor that is joined from whole sources alone."""
        start, parts = 0, list[tuple[str, Box]]()
        for tensor in tensors:
            whole, own = self._sources.get(_storage(tensor), (None, ()))
            if whole is None or (tensor.shape, tensor.stride()) != (whole.shape, whole.stride()):
                return
            move = [start if d == dim % joined.ndim else 0 for d in range(joined.ndim)]
            parts += [
                (hf, tuple((low + by, high + by) for (low, high), by in zip(box, move, strict=True))) for hf, box in own
            ]
            start += tensor.shape[dim]
        self._sources[_storage(joined)] = joined, parts


def _held(whole: Tensor, parts: _Parts, source: Tensor, param: str, target: Tensor) -> Iterator[ParameterBox]:
    """Yields the boxes that one copy takes of each part, with dims in the order of the Hugging Face tensor's."""
    if target.shape != source.shape:
        source = source.expand(target.shape)
    dims = [d for d in zip(source.shape, source.stride(), target.stride(), strict=True) if d[0] > 1]
    left, box, strides = int(source.storage_offset()), [], []
    for size, stride in zip(whole.shape, whole.stride(), strict=True):
        start, left = divmod(left, stride) if size > 1 else (0, left)
        found = next((d for d in dims if d[1] == stride), None) if size > 1 else None
        if found is not None:
            dims.remove(found)
        box.append((start, start + (found[0] if found else 1)))
        strides.append(found[2] if found else 1)
    if dims or left or any(stop > size for (_, stop), size in zip(box, whole.shape, strict=True)):
        names = ", ".join(hf for hf, _ in parts)
        raise WeightError(f"{names}: the engine's loader copies a view of it into {param} that is not a box")
    for hf, place in parts:
        if (cut := intersect(tuple(box), place)) is None:
            continue
        ahead = sum((low - first) * stride for (low, _), (first, _), stride in zip(cut, box, strides, strict=True))
        sizes, wide = (tuple(high - low for low, high in one) for one in (cut, place))
        own = shift(cut, place, whole_box(wide))
        view = sizes, tuple(strides), int(target.storage_offset()) + ahead
        yield ParameterBox(hf=hf, full_shape=wide, dtype=whole.dtype, box=own, param=param, view=view)


def _storage(tensor: Tensor) -> int:
    """The identity of the memory that a tensor views, with or without data."""
    return int(tensor.untyped_storage()._cdata)
