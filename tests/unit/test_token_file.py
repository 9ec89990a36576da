from pathlib import Path

import pytest

from rl_megatron.errors import ConfigError
from rl_megatron.http.token_file import read_token

KEY = "rollout.server.token_file"


def test_a_token_is_the_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t0ken\n")
    path.chmod(0o644)
    assert read_token(path, key=KEY) == "t0ken"
    assert read_token(None, key=KEY) == ""


@pytest.mark.parametrize("held", [None, b"", b"\n", b"two\nlines", b"two words", "t\u00f6ken".encode(), b"\xff"])
def test_a_file_without_a_token_is_refused_by_its_key(held: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "token"
    if held is not None:
        path.write_bytes(held)
    with pytest.raises(ConfigError, match=f"{KEY}={path}: "):
        read_token(path, key=KEY)


def test_a_private_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t0ken")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it; chmod 600 it"):
        read_token(path, key=KEY, private=True)
