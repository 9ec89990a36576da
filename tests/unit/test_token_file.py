from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl_megatron.errors import ConfigError
from rl_megatron.http.client import TryAgain
from rl_megatron.http.token_file import TokenFile

KEY = "rollout.server.token_file"


def test_a_token_is_the_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t0ken\n")
    path.chmod(0o644)
    token = TokenFile(file=path, key=KEY)
    assert token.now() == "t0ken"
    path.write_text("other")
    assert token.now() == "other"


@pytest.mark.parametrize("held", [None, b"", b"\n", b"two\nlines", b"two words", "t\u00f6ken".encode(), b"\xff"])
def test_a_file_without_a_token_is_refused_by_key_and_read_again_in_a_run(held: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t0ken")
    token = TokenFile(file=path, key=KEY)
    path.unlink()
    if held is not None:
        path.write_bytes(held)
    with pytest.raises(ConfigError, match=f"{KEY}={path}: "):
        TokenFile(file=path, key=KEY)
    with pytest.raises(TryAgain, match=f"{KEY}={path}: "):
        token.now()


def test_a_private_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t0ken")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it; chmod 600 it"):
        TokenFile(file=path, key=KEY, private=True)


@pytest.mark.parametrize("refusal", [401, 403])
@pytest.mark.parametrize(
    ("written", "takes", "asked", "status"),
    [
        ("old", "old", ["old"], 200),
        ("new", "new", ["old", "new"], 200),
        ("old", "new", ["old"], None),
        ("new", "newest", ["old", "new"], None),
    ],
    ids=["taken", "rotated", "not yet rotated", "rotated in vain"],
)
def test_a_request_whose_token_is_refused_is_sent_again_once_with_another(
    tmp_path: Path, refusal: int, written: str, takes: str, asked: list[str], status: int | None
) -> None:
    path, seen = tmp_path / "token", list[str]()
    path.write_text("old")
    token = TokenFile(file=path, key=KEY)

    async def ask(given: str) -> tuple[int, bytes]:
        seen.append(given)
        path.write_text(written)  # who rotates it does so while the request is under way
        return (200 if given == takes else refusal), b"expired"

    answered = asyncio.run(token.answer(ask))
    assert seen == asked
    assert answered[0] == (status or refusal)
    said = f"; it refuses the token of {KEY}={path}: write one that it takes into that file"
    assert token.refused(answered[0]) == ("" if status else said)
