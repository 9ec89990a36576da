"""Lets vLLM 0.32.0 fork its processes on a CPU, as it does on GPUs: loaded by a .pth file in every process of its
environment.

Its CPU platform asks for new interpreters (vllm/platforms/cpu.py), whose imports take half of a start's CPU time: 28 s
became 14 s. A fork is sound while OpenMP has one thread, as the tests run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "vllm.utils.system_utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if os.environ.get("OMP_NUM_THREADS") == "1":
    sys.meta_path.insert(0, _Finder())
