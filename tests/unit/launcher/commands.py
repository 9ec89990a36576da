"""Calls a command as a user does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from launcher.__main__ import main


@dataclass(frozen=True, slots=True)
class Said:
    """What ``command`` prints: its output, or with a status its errors."""

    command: str
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([self.command, *arguments])
        out = self.capsys.readouterr()
        assert ended.value.code == status, out
        return out.err if status else out.out
