"""The bearer token of a server, in a file that the configuration names. The token may rotate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.errors import ConfigError
from rl_megatron.http.client import TryAgain

StatusAndBody = tuple[int, bytes]
"""The status and the body of a response."""
_REFUSED = (401, 403)  # 403: from a gateway, for an expired token


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """The one line of ``file``, the value of the configuration's ``key``. The file is read for each request.

    Raises ConfigError for a file that cannot be read, without a token, or that others can read if it is ``private``.
    """

    file: Path
    key: str
    private: bool = False

    def __post_init__(self) -> None:
        self._read()

    def now(self) -> str:
        """Returns the token. Raises TryAgain if the file holds none, because a rotation may be writing it just now."""
        try:
            return self._read()
        except ConfigError as error:
            raise TryAgain(str(error)) from error

    async def answer(self, ask: Callable[[str], Awaitable[StatusAndBody]]) -> StatusAndBody:
        """Returns the response of ``ask`` with the token. If it is refused and the file has a new token, it retries.

        Raises TryAgain like `now`, and the errors of ``ask``.
        """
        token = self.now()
        answered = await ask(token)
        if answered[0] in _REFUSED and (newer := self.now()) != token:
            return await ask(newer)
        return answered

    def refused(self, status: int) -> str:
        """Returns advice for this status, as the end of a sentence, or "" if it does not refuse a token."""
        if status not in _REFUSED:
            return ""
        return f"; it refuses the token of {self.key}={self.file}: write one that it takes into that file"

    def _read(self) -> str:
        try:
            path = self.file.expanduser()
            if self.private and path.stat().st_mode & 0o077:
                raise ConfigError(f"{self.key}={self.file}: others can read it; chmod 600 it")
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
            raise ConfigError(f"{self.key}={self.file}: {error}") from error
        if not token.isascii() or not token.isprintable() or " " in token or not token:
            raise ConfigError(f"{self.key}={self.file}: it holds no token: one line of printable ASCII")
        return token
