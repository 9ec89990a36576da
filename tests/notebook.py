"""Executes the cells of a notebook, in one interpreter and in their order.

``python -m tests.notebook FILE`` stores in the file what they print.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.forks import FORKS

_BEFORE = "\x1e"  # written before a cell's output
_LIMIT_SECONDS = 300.0


def shown(notebook: Path) -> list[str]:
    """The stored output of each cell with code."""
    return ["".join("".join(part["text"]) for part in cell["outputs"]) for cell in _code(_read(notebook))]


def executed(notebook: Path, folder: Path) -> list[str]:
    """What each cell with code prints in ``folder``, in an interpreter that is a fork of one with most imports. Raises
    AssertionError if one fails."""
    files = [folder / "stdout.txt", folder / "stderr.txt"]
    running = FORKS.Process(target=_run, args=(notebook, folder, files, _environment()))
    running.start()
    running.join(_LIMIT_SECONDS)
    running.kill()
    printed, said = (file.read_text() for file in files)
    assert running.exitcode == 0, printed[-2000:] + said[-4000:]
    return printed.split(_BEFORE)[1:]


def _environment() -> dict[str, str]:
    scripts = Path(sys.executable).parent
    return os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def _run(notebook: Path, folder: Path, files: Sequence[Path], environment: Mapping[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(files, start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), descriptor)
    names: dict[str, Any] = {}
    for cell in _code(_read(notebook)):
        print(_BEFORE, end="", flush=True)
        exec(compile("".join(cell["source"]), "cell", "exec"), names)


def _read(notebook: Path) -> Any:
    return json.loads(notebook.read_text())


def _code(content: Any) -> list[Any]:
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def _store(notebook: Path) -> None:
    content = _read(notebook)
    with tempfile.TemporaryDirectory() as folder:
        outputs = executed(notebook, Path(folder))
    for number, (cell, text) in enumerate(zip(_code(content), outputs, strict=True), start=1):
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}]
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    _store(Path(sys.argv[1]).resolve())
