"""On the path of an engine's Python: torchvision's modules are there, and whatever is asked of them does nothing.

vLLM's CPU build does not bring it, and transformers' classes for images import it; of a model for images and text a
test makes the text model alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from unittest.mock import MagicMock


class _Loader(importlib.abc.Loader):
    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0.0"  # type: ignore[attr-defined]
        module.__getattr__ = _nothing  # type: ignore[method-assign]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)


def _nothing(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()


sys.meta_path.append(_Finder())
