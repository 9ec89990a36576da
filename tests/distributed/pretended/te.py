"""TransformerEngine's own Python classes without its compiled parts: they can be built, and compute nothing
but an optimizer's step, by kernels that are written here.

Its wheel of Python sources alone (0.7 MB) lies in a folder of its own (`make .venv/te/.installed`), so that no other
test finds it. Names of the C++ extension and of kernels stand for themselves.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(sys.prefix) / "te"
_KERNELS = ("onnx_extensions", "triton", "triton.pad", "triton.permutation", "triton.cross_entropy")


class _Name(type):
    """A name of the extension; so are its attributes, as those of an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _Name(name, (), {}))
        return getattr(cls, name)


class _Compiled(ModuleType):
    """A module that has every name."""

    __getattr__ = _Name.__getattr__


def load() -> None:
    """Make ``transformer_engine`` importable in this process, for good."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # loads no library
    sys.path.insert(0, str(FOLDER))  # its version, too
    package = ModuleType("transformer_engine")
    package.__path__ = [str(FOLDER / package.__name__)]
    package.__spec__ = ModuleSpec(package.__name__, None, is_package=True)
    package.__dict__["__version__"] = importlib.metadata.version(package.__name__)
    sys.modules[package.__name__] = package
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    compiled: Any = _Compiled("transformer_engine_torch")
    compiled.get_cudnn_version = lambda: 91300
    compiled.multi_tensor_adam = adam
    compiled.multi_tensor_l2norm, compiled.multi_tensor_scale = l2norm, scale
    sys.modules[compiled.__name__] = compiled
    for name in _KERNELS:
        sys.modules[f"transformer_engine.pytorch.{name}"] = _Compiled(name)
    for name in ("common", "pytorch"):
        setattr(package, name, importlib.import_module(f"transformer_engine.{name}"))
    for name, module in [*sys.modules.items()]:
        if name.startswith("transformer_engine.") and "canonicalize_device" in vars(module):
            vars(module)["canonicalize_device"] = _device
    wrapper: Any = importlib.import_module("transformer_engine.pytorch.quantized_tensor").QuantizedTensor
    make = wrapper.__new__
    wrapper.__new__ = lambda cls, *given, device=None, **named: make(cls, *given, device=_device(device), **named)
    yarn: Any = importlib.import_module("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    yarn.torch = _Torch("torch")


class _Torch(ModuleType):
    """torch for megatron-core's YaRN, which makes all tensors within a device that it names by a GPU's number."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(_of: int) -> AbstractContextManager[None]:
        """Nothing to do: each tensor names its device, too."""
        return nullcontext()


def _device(device: Any) -> torch.device:
    """As TransformerEngine's, which hands a GPU's number to `torch.device`: a build for CPUs refuses it."""
    number = torch.cuda.current_device() if device is None or device == torch.device("cuda") else device
    return torch.device("cuda", number) if isinstance(number, int) else torch.device(number)


# TransformerEngine's multi-tensor kernels, written in torch by their documented semantics (its csrc/multi_tensor).
# Each takes a chunk's size and a flag, which are the kernels' own, and lists of tensors, one entry a parameter.
def l2norm(chunk: int, flag: Tensor, lists: Sequence[Sequence[Tensor]], each: bool) -> tuple[Tensor, Tensor]:
    """The norm over all tensors of the one list, and of each; float32."""
    norms = torch.stack([torch.linalg.vector_norm(x.float()) for x in lists[0]])
    return torch.linalg.vector_norm(norms).reshape(1), norms if each else norms[:0]


def scale(chunk: int, flag: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Writes the first list's tensors, scaled, into the second's."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def adam(
    chunk: int,
    flag: Tensor,
    lists: Sequence[Sequence[Tensor]],
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    corrected: int,
    decay: float,
) -> None:
    """One step of Adam: gradients, parameters, both moments and, if there is a fifth list, float32 weights, of which
    the parameters get a copy. Moments must be float32: `FusedAdam` makes temporary copies of others."""
    gradients, parameters, means, squares, *weights = lists
    for i, (gradient, parameter, mean, square) in enumerate(zip(gradients, parameters, means, squares, strict=True)):
        assert mean.dtype == square.dtype == torch.float32
        weight = weights[0][i] if weights else parameter
        wide, by = weight.float(), gradient.float()
        if not decoupled:
            by = by + decay * wide
        mean.mul_(beta1).add_(by, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(by, by, value=1 - beta2)
        first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
        update = (mean / first) / ((square / second).sqrt() + eps)
        if decoupled:
            update = update + decay * wide
        wide = wide - rate * update
        weight.copy_(wide)
        parameter.copy_(wide)
