"""Two tiny models of one shape, and each engine once for all tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.servers.engines import SERVERS
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.layouts.families import read_shape
from tests.engines.benches import Bench, LocalBench, ServedBench, interpreter, served, spare_a_core
from tests.engines.forked import forked_guards


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Servers that tests start in this process are forks."""
    with forked_guards():
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    spec = TinySizes(head_dim=32, max_position_embeddings=2048)
    return make_tiny_model(spec, folder, seed=1), make_tiny_model(spec, folder, seed=2)


@pytest.fixture(scope="session")
def start(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Bench]]:
    """An engine by name, started when it is asked for first."""
    running: dict[str, Bench] = {}
    with contextlib.ExitStack() as stack:

        def get(name: str) -> Bench:
            if name not in running and name in SERVERS:
                needs(name)
                running[name] = stack.enter_context(served(name, models[0], tmp_path_factory.mktemp(name)))
                spare_a_core()
            return running.setdefault(name, LocalBench(read_shape(models[0])))

        yield get


def needs(engine: str) -> None:
    """Skip what needs an engine that is not installed."""
    if not interpreter(engine).exists():
        pytest.skip(f"{interpreter(engine)} is not there; `make test-engines` makes it")


@pytest.fixture(params=["local", *sorted(SERVERS)])
def bench(request: pytest.FixtureRequest, start: Callable[[str], Bench]) -> Bench:
    """Each engine, embedded and served."""
    return start(request.param)


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, start: Callable[[str], Bench]) -> ServedBench:
    """Each engine that is a server."""
    bench = start(request.param)
    assert isinstance(bench, ServedBench)
    return bench
