"""Calls a command as a user does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.__main__ import main


def status_of(*arguments: object) -> int:
    """The exit status of a command; that of one which ends with a message is 1."""
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    code = ended.value.code
    return 1 if isinstance(code, str) else code or 0


@dataclass(frozen=True, slots=True)
class Said:
    """What ``command`` prints: its output, or with a status its errors."""

    command: str
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, status: int = 0) -> str:
        ended, out = status_of(self.command, *arguments), self.capsys.readouterr()
        assert ended == status, out
        return out.err if status else out.out


def program(path: Path, text: str) -> Path:
    """Write a program, as one that stands in for a command of Slurm or for an interpreter."""
    path.write_text(text)
    path.chmod(0o755)
    return path
