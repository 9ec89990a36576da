"""What others can reach and read of a run: its listening sockets, its command lines, its files."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

NAMED = {
    r"launcher\.nursery|launcher\.rank\b|ray::RankActor": "A learner rank",
    r"sglang::scheduler|VLLM::": "A rank of an engine server",
    r"/ray/_?core/|ray/_private|ray::|ray\.scripts": "Ray",
}
"""Whose sockets ask for no token of ours: patterns of command lines, and who that is in docs/security.md."""
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY")
PATHS = (
    *("/", "/health", "/metrics", "/openapi.json", "/server_info", "/v1/models", "/freeze_gc", "/collective_rpc"),
    *("/update_weights", "/update_weights_from_tensor", "/sleep", "/pause", "/pause_generation"),
)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it started."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def check_sockets(processes: Iterable[psutil.Process], hosts: Iterable[str] = ("127.0.0.1",)) -> dict[str, int]:
    """How many listen, by who they are; each at one of ``hosts``, and asking for a token if it is not `NAMED`."""
    counts: dict[str, int] = {}
    for process, line, address in _listening(processes):
        assert address.ip in set(hosts), f"{line} listens at {address}"
        who = next((who for pattern, who in NAMED.items() if re.search(pattern, line)), "An engine server")
        if who == "An engine server":
            _ask_without_token(f"http://{address.ip}:{address.port}", f"pid {process.pid}: {line}")
        counts[who] = counts.get(who, 0) + 1
    return counts


def check_secrets(processes: Iterable[psutil.Process], *folders: Path, secrets: Iterable[str] = ()) -> set[str]:
    """No token that a process holds in its environment is in a command line, or in a file below ``folders``; which."""
    processes = list(processes)
    found = {*secrets}
    lines: list[str] = []
    for process in processes:
        try:
            found |= {value for name, value in process.environ().items() if SECRET.search(name) and len(value) >= 16}
            lines.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    for line in lines:
        assert not any(secret in line for secret in found), f"a token is in a command line: {line[:300]}"
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in found), f"{path} holds a token"
    return found


def _listening(processes: Iterable[psutil.Process]) -> Iterator[tuple[psutil.Process, str, psutil._common.addr]]:
    for process in processes:
        try:
            line = " ".join(process.cmdline())
            sockets = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        except psutil.NoSuchProcess:
            continue
        for one in sockets:
            yield process, line, one.laddr


def _ask_without_token(url: str, who: str) -> None:
    plain = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for path in PATHS:
        for method in ("GET", "POST", "OPTIONS"):
            asking = urllib.request.Request(url + path, method=method, headers={"Authorization": "Bearer wrong"})
            try:
                status = plain.open(asking, timeout=20.0).status
            except urllib.error.HTTPError as error:
                status = error.code
            assert status == 401, f"{who}: {method} {path} without the token: status {status}"
