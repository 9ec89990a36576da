"""The bearer token of a server, in a file that the configuration names, and which may rotate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.errors import ConfigError
from rl_megatron.http.client import TryAgain

StatusAndBody = tuple[int, bytes]
"""Of an answer."""
_REFUSED = (401, 403)  # 403: of a gateway, for a token that has expired


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """The one line of ``file``, which is the value of the configuration's ``key``. It is read for each request.

    Raises ConfigError for a file that cannot be read, without a token, or that others can read if it is ``private``.
    """

    file: Path
    key: str
    private: bool = False

    def __post_init__(self) -> None:
        self._read()

    def now(self) -> str:
        """The token. Raises TryAgain where the file holds none: who rotates it may be writing it just now."""
        try:
            return self._read()
        except ConfigError as error:
            raise TryAgain(str(error)) from error

    async def answer(self, ask: Callable[[str], Awaitable[StatusAndBody]]) -> StatusAndBody:
        """What ``ask`` gets with the token; where that is refused and the file holds another by then, with that one.

        Raises TryAgain as `now`, and what ``ask`` raises.
        """
        token = self.now()
        answered = await ask(token)
        if answered[0] in _REFUSED and (newer := self.now()) != token:
            return await ask(newer)
        return answered

    def refused(self, status: int) -> str:
        """What to do about an answer of this status, as the end of a sentence; empty if it is no refusal of a token."""
        if status not in _REFUSED:
            return ""
        return f"; it refuses the token of {self.key}={self.file}: write one that it takes into that file"

    def _read(self) -> str:
        try:
            path = self.file.expanduser()
            if self.private and path.stat().st_mode & 0o077:
                raise ConfigError(f"{self.key}={self.file}: others can read it; chmod 600 it")
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: ~ of no user
            raise ConfigError(f"{self.key}={self.file}: {error}") from error
        if not token.isascii() or not token.isprintable() or " " in token or not token:
            raise ConfigError(f"{self.key}={self.file}: it holds no token: one line of printable ASCII")
        return token
