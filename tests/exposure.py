"""What others can reach and read of a run: its listening sockets, its command lines, its files.

Tests call this of runs that they have for other reasons. docs/how_it_works.md has the list that it holds runs to.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil

NAMED = {
    r"launcher train|rl-megatron train|pytest": "The controller",
    r"-u -c import sys;exec\(eval\(sys\.stdin\.readline": "The controller",  # a test's own, in a worker of pytest-xdist
    r"launcher\.worker\.(process|node)\b|ray::RankActor": "A learner rank",
    r"multiprocessing\.forkserver .*'tests\.imports'": "A learner rank",  # of a test's own, by tests/forks.py
    r"sglang::scheduler|VLLM::": "A rank of an engine server",
    r"/ray/core/|/ray/_private/|/ray/dashboard/|/ray/autoscaler/|ray::|ray\.scripts|ray[./]util[./]client": "Ray",
}
"""Who may listen without a token of ours, as docs/how_it_works.md calls them, by patterns of command lines."""
_SERVER = "An engine server"
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY")
_TOKEN = re.compile(r"\b(?:[0-9a-f]{48}|[0-9a-f]{64})\b")  # as this package makes them
_PATHS = (
    *("/", "/health", "/metrics", "/openapi.json", "/server_info", "/v1/models", "/freeze_gc", "/collective_rpc"),
    *("/update_weights", "/update_weights_from_tensor", "/sleep", "/pause", "/pause_generation"),
)
_EVERYTHING = tuple((method, path) for path in _PATHS for method in ("GET", "POST", "OPTIONS"))
_GRPC = (
    *("NodeManagerService/GetNodeStats", "InternalKVGcsService/InternalKVKeys"),
    *("CoreWorkerService/GetCoreWorkerStats", "ObjectManagerService/Pull"),
)
_LISTEN = "0A"  # in /proc/net/tcp
_ACCEPTS = 0x10000  # in /proc/net/unix


def family(pid: int) -> list[psutil.Process]:
    """The process and all its descendants."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def check_sockets(
    processes: Iterable[psutil.Process], *, loopback: bool = True, everywhere: Collection[int] = ()
) -> Counter[str]:
    """Count listening sockets by owner, but for those that listen at all addresses at the ports ``everywhere``. Each is
    bound to one address, on one machine (``loopback``) to that; and those that are not `NAMED` speak HTTP, and ask for
    a token at every path."""
    counts: Counter[str] = Counter()
    for pid, line, host, port in _listening(processes):
        if port in everywhere:
            continue
        who = next((who for pattern, who in NAMED.items() if re.search(pattern, line)), _SERVER)
        counts[who] += 1
        where = f"pid {pid} ({line[:200]}) listens at {host}, port {port}"
        if loopback:
            assert ip_address(host).is_loopback, where
        else:
            assert who in ("Ray", "The controller", "A learner rank") or not ip_address(host).is_unspecified, where
        if who == _SERVER:
            _ask_without_token(f"http://{host}:{port}", where)
    return counts


def check_secrets(processes: Iterable[psutil.Process], *folders: Path, secrets: Iterable[str] = ()) -> set[str]:
    """The tokens in processes' environments, none of which is on a command line or in a file below ``folders``."""
    found, lines = {*secrets}, list[str]()
    for process in processes:
        try:
            held = {value for name, value in process.environ().items() if _SECRET.search(name) and len(value) >= 16}
            found, lines = found | held, [*lines, " ".join(process.cmdline())]
        except psutil.NoSuchProcess:
            continue
    for line in lines:
        assert not any(secret in line for secret in found), f"a token is on a command line: {line[:500]}"
        assert "/ray/" in line or not _TOKEN.search(line), f"what looks like a token is on a command line: {line[:500]}"
    for path in (Path(at, name) for folder in folders for at, _, names in os.walk(folder) for name in names):
        try:
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""  # nor a socket
        except FileNotFoundError:  # the run has removed or renamed it
            continue
        assert not any(secret.encode() in data for secret in found), f"{path} holds a token"
    return found


def check_ray(port: int, host: str = "127.0.0.1") -> None:
    """Check that Ray's servers require the cluster's token for every service."""
    import grpc

    said = set()
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for method in _GRPC:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=120.0)
                said.add("answered")
            except grpc.RpcError as error:
                said.add(error.code().name)
    assert said <= {"UNAUTHENTICATED", "UNIMPLEMENTED"}, (port, said)
    assert "UNAUTHENTICATED" in said, (port, said)


def ports_of(process: psutil.Process) -> list[int]:
    """The addresses at which the process listens."""
    return [port for _, _, _, port in _listening([process])]


def _listening(processes: Iterable[psutil.Process]) -> Iterator[tuple[int, str, str, int]]:
    """Process, its command line, address and port; of a process on another of a test's nodes too."""
    for process in processes:
        try:
            line, folder = " ".join(process.cmdline()), Path(f"/proc/{process.pid}")
            open_ = {name for path in (folder / "fd").iterdir() if (name := _opened(path))}
            tables = [(folder / "net" / table).read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
        except (psutil.NoSuchProcess, OSError):
            continue
        for fields in (row.split() for rows in tables for row in rows):
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in open_:
                address, port = fields[1].split(":")
                yield process.pid, line, _address(address), int(port, 16)


def _opened(descriptor: Path) -> str:
    """What a descriptor in /proc is of; empty if it was closed since it was listed."""
    try:
        return descriptor.readlink().name
    except FileNotFoundError:
        return ""


def _address(text: str) -> str:
    """Of /proc/net/tcp and tcp6: words of four bytes in the machine's order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    found = ip_address(socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, data))
    return str(getattr(found, "ipv4_mapped", None) or found)


def _ask_without_token(url: str, who: str) -> None:
    plain = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for method, path in _EVERYTHING:
        asking = urllib.request.Request(url + path, method=method, headers={"Authorization": "Bearer wrong"})
        try:
            status = plain.open(asking, timeout=120.0).status
        except urllib.error.HTTPError as error:
            status = error.code
        except TimeoutError as error:
            raise AssertionError(f"{who}: {method} {path} without the token: no answer in 120 s") from error
        assert status == 401, f"{who}: {method} {path} without the token: status {status}"
