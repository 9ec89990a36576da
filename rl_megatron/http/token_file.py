"""Reads the bearer token of a server from a file that the configuration names, and whose token may rotate."""

from __future__ import annotations

from pathlib import Path

from rl_megatron.errors import ConfigError
from rl_megatron.http.client import TryAgain


def read_token(file: Path | None, *, key: str, private: bool = False) -> str:
    """The one line of ``file``, which is the value of the configuration's ``key``; empty without a file.

    Raises ConfigError for a file that cannot be read, without a token, or that others can read if it is ``private``.
    """
    if file is None:
        return ""
    try:
        path = file.expanduser()
        if private and path.stat().st_mode & 0o077:
            raise ConfigError(f"{key}={file}: others can read it; chmod 600 it")
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: ~ of no user
        raise ConfigError(f"{key}={file}: {error}") from error
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise ConfigError(f"{key}={file}: it holds no token: one line of printable ASCII")
    return token


def token_now(file: Path | None, *, key: str, private: bool = False) -> str:
    """As `read_token`, for an attempt while the run goes on: raises TryAgain where that raises ConfigError, since who
    rotates the token may be writing the file just now."""
    try:
        return read_token(file, key=key, private=private)
    except ConfigError as error:
        raise TryAgain(str(error)) from error
