"""Reads the libraries that one environment gives to a group of ranks, and compares those of several environments.

``python libraries.py`` prints, in JSON, what its interpreter would load. It needs the standard library alone and takes
less than a second. It reads torch's files and asks NCCL for its version, which needs no GPU; it does not import torch.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

DEFAULTS: Mapping[str, str] = {"NCCL_CUMEM_ENABLE": "-2", "NCCL_NVLS_ENABLE": "2"}
"""NCCL's variables whose values the ranks of a group must share, and NCCL's defaults: what hardware and driver allow
(src/misc/cudawrap.cc, src/transport/nvls.cc)."""
_SHOWN = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_NET_PLUGIN")  # nodes may have reasons to set these differently
_OWN = "VLLM_NCCL_SO_PATH"
_VERSION = re.compile(r"^__version__\b.*= '(.+)'", re.MULTILINE)
_CUDA = re.compile(r"^cuda\b.*= '(.+)'", re.MULTILINE)
_SECONDS = 3.0  # the limit for the dynamic loader's answer
_NAMED = 4  # members of a group that a message names
_PARSING = threading.Lock()  # CPython 3.11 counts the depth of all threads' parsing together, and raises SystemError


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """The libraries of one environment. None: not there, or it cannot be read."""

    torch: str | None
    cuda: str | None  # the release that torch was built with
    nccl: str | None  # the version that torch loads, which is not always the one that it was built with
    own_nccl: str | None  # the version of VLLM_NCCL_SO_PATH, which vLLM loads for groups of its own ranks
    handle: int | None  # number of fields of torch's handle of GPU memory, which are private to torch
    settings: Mapping[str, str]  # NCCL's variables that are set


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """Something that all members of a group must share."""

    name: str
    get: Callable[[Libraries], str | None]
    advice: str


def _setting(name: str) -> _Field:
    return _Field(
        name=name,
        get=lambda one: one.settings.get(name, DEFAULTS[name]),
        advice=f"set {name} to the same value in both environments",
    )


_SAME = "install the same torch in both environments"
FIELDS: Mapping[str, _Field] = {
    "torch": _Field(name="torch", get=lambda one: None if one.torch is None else _release(one.torch), advice=_SAME),
    "nccl": _Field(name="NCCL", get=lambda one: one.nccl, advice=_SAME),
    "handle": _Field(
        name="the number of fields of torch's handles of GPU memory",
        get=lambda one: None if one.handle is None else str(one.handle),
        advice=_SAME,
    ),
    **{name: _setting(name) for name in DEFAULTS},
}
"""The values that can be compared. torch counts by its release, for example 2.13."""
OF_A_GROUP = ("nccl", "torch", *DEFAULTS)
"""The values that must be equal on all ranks of one group over NCCL."""
HANDLE = ("handle",)
"""The values that must be equal in processes that map each other's GPU memory."""


def facts(libraries: Libraries, fields: Sequence[str]) -> dict[str, str | None]:
    """The values of the ``FIELDS`` named."""
    return {name: FIELDS[name].get(libraries) for name in fields}


def compare_facts(members: Mapping[str, Mapping[str, str | None]]) -> str:
    """All facts in which ``members`` of a group, by name, differ, with the values and what to do. None is unknown."""
    found, advice = [], []
    for field in dict.fromkeys(name for known in members.values() for name in known):
        having: dict[str, list[str]] = {}
        for member, known in members.items():
            if (value := known.get(field)) is not None:
                having.setdefault(value, []).append(member)
        if len(having) > 1:
            values = " and ".join(f"{value} ({_some(names)})" for value, names in having.items())
            found.append(f"{FIELDS[field].name} differs: {values}")
            advice.append(FIELDS[field].advice)
    return "; ".join([*found, " and ".join(dict.fromkeys(advice))]) if found else ""


def library_table(environments: Mapping[str, Libraries]) -> str:
    """A table: a column for each environment, by name."""
    rows = {
        "torch": [one.torch for one in environments.values()],
        "CUDA": [one.cuda for one in environments.values()],
        "NCCL": [one.nccl for one in environments.values()],
        _OWN: [one.own_nccl for one in environments.values()],
        **{name: [one.settings.get(name) for one in environments.values()] for name in (*DEFAULTS, *_SHOWN)},
    }
    shown = {name: row for name, row in rows.items() if any(row) or name in {"torch", "CUDA", "NCCL"}}
    lines = [["", *environments], *([name, *(cell or "-" for cell in row)] for name, row in shown.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def installed_libraries() -> Libraries:
    """Returns the libraries that this interpreter would load if a program imported torch. Does not import it."""
    return _libraries(_nccl_to_load)


def loaded_libraries() -> Libraries:
    """Returns the libraries that this process has loaded; NCCL is the one linked with torch's library of CUDA."""
    return _libraries(lambda library: library)


def _libraries(nccl_of: Callable[[Path], Path | None]) -> Libraries:
    """``nccl_of`` gives the file to ask for NCCL's version, from torch's library of CUDA."""
    own, folder = os.environ.get(_OWN), torch_folder()
    version = _text(folder / "version.py") if folder else ""
    library = folder / "lib" / "libtorch_cuda.so" if folder else None
    nccl = nccl_of(library) if library and library.is_file() else None
    return Libraries(
        torch=_found(_VERSION, version),
        cuda=_found(_CUDA, version),
        nccl=nccl_version(nccl) if nccl else None,
        own_nccl=nccl_version(Path(own)) if own else None,
        handle=_handle_fields(_text(folder / "multiprocessing" / "reductions.py")) if folder else None,
        settings={name: os.environ[name] for name in (*DEFAULTS, *_SHOWN) if name in os.environ},
    )


def nccl_version(library: Path) -> str | None:
    """Returns the version by ``ncclGetVersion`` of a library, or of one that it is linked with; None without it."""
    try:
        ask, code = ctypes.CDLL(str(library)).ncclGetVersion, ctypes.c_int()
    except (OSError, AttributeError):
        return None
    if ask(ctypes.byref(code)):
        return None
    unit = 10000 if code.value >= 10000 else 1000  # 2.8 and before: 2804 is 2.8.4
    return f"{code.value // unit}.{code.value % unit // 100}.{code.value % 100}"


def _nccl_to_load(library: Path) -> Path | None:
    """The file that torch loads before ``library``: of its environment, else where the dynamic loader finds it.

    Upstream: torch/__init__.py, ``_preload_cuda_deps``.
    """
    for path in filter(None, sys.path):
        if found := sorted(Path(path).glob("nvidia/nccl/lib/libnccl.so.*[0-9]")):
            return found[0]
    try:
        said = subprocess.run(
            ["ldd", str(library)], capture_output=True, text=True, timeout=_SECONDS, env=dict(os.environ)
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    line = re.search(r"libnccl\.so\S* => (/.+) \(0x", said)
    return Path(line[1]) if line else None


def torch_folder() -> Path | None:
    """The folder that this interpreter would import torch from, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0]) if folders else None


def _handle_fields(source: str) -> int | None:
    """Into how many names torch's own code unpacks the handle of a GPU's memory."""
    with _PARSING:
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Tuple):
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr == "_share_cuda_":
                return len(node.targets[0].elts)
    return None


def _found(pattern: re.Pattern[str], source: str) -> str | None:
    line = pattern.search(source)
    return line[1] if line else None


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    print(json.dumps(asdict(installed_libraries())))
