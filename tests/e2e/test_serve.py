"""``rl-megatron serve``: a model is served on loopback to who has the key, until a signal ends it."""

from __future__ import annotations

import json
import os
import signal
import stat
import urllib.request
from pathlib import Path

from rl_megatron.config.run import TinyModelSection
from rl_megatron.models.tiny import make_tiny_model
from tests.e2e.processes import Place, Run
from tests.exposure import check_secrets, check_server, family


def answer(run: Run, key: str) -> str:
    """The served model's text after a prompt."""
    url = next(word for word in run.text().split() if word.startswith("http://"))
    asked = urllib.request.Request(
        f"{url}/completions",
        data=json.dumps({"prompt": "1+1=", "max_tokens": 3, "temperature": 0}).encode(),
        headers={"Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(asked) as said:
        text: str = json.loads(said.read())["choices"][0]["text"]
    return text


def test_it_serves_who_has_the_key_on_loopback_alone_until_a_signal(place: Place) -> None:
    model = make_tiny_model(TinyModelSection(), place.cache, 0)
    run = place.begin("serve", str(model), "--port", "0", "rollout.max_new_tokens=8")
    run.until(lambda: "Ctrl-C ends it" in run.text(), "the server")
    file = place.folder / "eval" / "serve.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.read_text().strip()
    assert len(answer(run, key)) >= 1
    processes = family(run.process.pid)
    assert sum(map(check_server, processes)) == 1
    file.rename(moved := place.folder.parent / "moved.key")  # the only file that has it
    check_secrets(processes, place.folder, secrets=[key])
    moved.unlink()
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 0, run.text()


def test_the_key_of_a_server_that_runs_is_not_replaced_by_another(place: Place) -> None:
    model = make_tiny_model(TinyModelSection(), place.cache, 0)
    first = place.begin_in_fork("serve", str(model), "--port", "0", "rollout.max_new_tokens=8")
    first.until(lambda: "Ctrl-C ends it" in first.text(), "the server")
    file = Path("eval") / "serve.key"
    key = (place.folder / file).read_text().strip()
    second = place.begin_in_fork("serve", str(model), "--port", "0")
    second.until(lambda: "serve.key" in second.text(), "what it says of the key")
    assert "error: " in second.text(), "it serves, with a new key"
    assert second.end() == 1
    said = f"error: {file}: a server that still runs has its key there; end it, or give --key-file {file} to serve with"
    assert said in second.text()
    assert (place.folder / file).read_text().strip() == key
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.end() == 0, first.text()
    third = place.begin_in_fork("serve", str(model), "--port", "0", "rollout.max_new_tokens=8")
    third.until(lambda: "Ctrl-C ends it" in third.text(), "the server")
    new = (place.folder / file).read_text().strip()
    assert new != key
    assert len(answer(third, new)) >= 1
    os.kill(third.process.pid, signal.SIGTERM)
    assert third.end() == 0, third.text()


def test_keys_and_ports_that_cannot_be_are_refused(place: Place, tmp_path: Path) -> None:
    model = make_tiny_model(TinyModelSection(), place.cache, 0)
    file = tmp_path / "key"
    for text, mode, said in (
        ("0123456789abcdef", 0o644, "others may read it; chmod 600 it"),
        ("short", 0o600, "one line of at least 16 characters"),
        ("two words of some length", 0o600, "one line of at least 16 characters"),
        (None, 0o600, "No such file or directory"),
    ):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
            file.chmod(mode)
        run = place.call_in_fork("serve", str(model), "--key-file", str(file))
        assert run.process.returncode == 1, run.text()
        assert f"error: --key-file {file}: " in run.text()
        assert said in run.text()
