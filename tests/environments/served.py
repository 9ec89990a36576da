"""A server of another package, in the interpreter that has it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

REPO = Path(__file__).parents[2]
INTERPRETERS = REPO / ".environments"
EXAMPLES = REPO / "docs" / "examples" / "environments"
PACKAGES = Path(__file__).parent / "packages"
_START_LIMIT = 120.0  # seconds: a loaded machine imports the packages for as long


def interpreter(name: str) -> str:
    python = INTERPRETERS / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}; make test-all PART=environments installs it")
    return str(python)


@contextmanager
def serving(python: str, application: str, log: Path) -> Iterator[str]:
    """The URL of the application of a module of PACKAGES."""
    with socket.create_server(("127.0.0.1", 0)) as listening, log.open("wb") as said:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [python, "-m", "uvicorn", application, "--fd", str(listening.fileno())]
        process = subprocess.Popen(
            command, cwd=PACKAGES, stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[listening.fileno()]
        )
        try:
            until = time.monotonic() + _START_LIMIT
            while True:  # the socket listens already: a request waits until the application answers it
                assert process.poll() is None, log.read_text()
                try:
                    httpx2.get(f"{url}/openapi.json", timeout=2, trust_env=False)
                    break
                except httpx2.TimeoutException:
                    assert time.monotonic() < until, log.read_text()
            yield url
        finally:
            process.kill()
            process.wait()
