"""Servers on two nodes, which here are two guards on one machine; transformers' forward is the oracle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import psutil
import pytest

from launcher.processes.guards import ServerSite
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.layouts.recorded import Boxes
from tests.engines.benches import NEW, REPO, ServedBench, request, served, words_of
from tests.engines.conftest import needs
from tests.engines.straight import FolderSender, direct
from tests.engines.test_models import PROMPTS, bytes_of, samples_from
from tests.engines.test_restarts import check, until_healthy
from tests.exposure import check_sockets, family

TWO = [[ServerSite(), ServerSite()]]


def holds_all_once(server: ServedBench, folder: Path) -> None:
    """Two ranks answer between two tokens of a request; they hold the whole model, and each element of an expert once
    between them."""

    async def asked() -> Mapping[str, Sequence[Boxes]]:
        for new in NEW:
            running = asyncio.create_task(server.engine.generate(request(new=new)))
            await server.sampling(running)
            met, said = not running.done(), await server.engine.weights.boxes(server.path)
            await running
            if met:
                return said
        raise AssertionError("no request was met while it ran")

    (ranks,) = server.run(asked()).values()
    assert len(ranks) == 2
    shapes = hf_layout(read_shape(folder)).local_shapes(0)
    assert set().union(*ranks) == shapes.keys()
    held = sum(bytes_of({name: box for name, box in rank.items() if ".experts." in name}) for rank in ranks)
    assert held == sum(4 * prod(shape) for name, shape in shapes.items() if ".experts." in name)


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        ("vllm", {"tp": 2}),
        ("vllm", {"dp": 2, "ep": 2, "options": "'--worker-extension-cls vllm_ranks.WorkerExtension'"}),
        ("sglang", {"tp": 2}),
    ],
    ids=["vllm-tp2", "vllm-dp2-ep2", "sglang-tp2"],
)
def test_a_server_on_two_nodes_samples_from_what_was_pushed(
    engine: str, keys: dict[str, object], models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the file and straight into its ranks; it comes back when its second node is lost. 60 seconds."""
    needs(engine)
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'tests' / 'engines'}{os.pathsep}{with_plugin(tmp_path / 'plugins')}")
    with served(engine, models[0], tmp_path, sites=TWO, nodes=2, routes=False, **keys) as server:
        server.push(models[1], 1)
        samples_from(server, models[1], 1)
        samples_from(server, models[1], 1, PROMPTS[:1])  # beside ranks without a request
        if engine == "vllm" and "ep" not in keys:  # the others have ports that speak no HTTP
            (url,) = [replica.url for replica in server.engine.servers]
            store = int(url.rpartition(":")[2]) + 1
            assert check_sockets(its_processes(), everywhere={store})["An engine server"] == 1
        holds_all_once(server, models[0])
        sender = FolderSender(models[0])
        with direct(server, sender):
            sender.hold(models[0], lambda tensors: None)
            server.sync.folder = models[0]
            update = server.run(server.weights.push(2))
            assert update.num_bytes == sender.least_bytes
            samples_from(server, models[0], 2)
        if "ep" in keys:
            return  # what follows is the same code
        server.push(models[1], 3)
        os.killpg(second_node().pid, signal.SIGKILL)
        until_healthy(server, 1)
        check(server, models[1], [], 3, restarts=1)


def with_plugin(folder: Path) -> Path:
    """A folder by which vLLM finds the plugin vllm_late."""
    found = folder / "vllm_late-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-late\nVersion: 0\n")
    (found / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_late = vllm_late:plugin\n")
    return folder


def its_processes() -> list[psutil.Process]:
    """Of the server on two nodes: tests before may have servers of their own."""
    return [p for one in its_servers() for p in family(one.pid)]


def second_node() -> psutil.Process:
    """The process of the server on its second node."""
    (server,) = [p for p in its_servers() if words_of(p)[words_of(p).index("--node-rank") + 1] == "1"]
    return server


def its_servers() -> list[psutil.Process]:
    """Each node's; what asks for its guard has the same words in its command line."""
    found = [p for p in psutil.Process().children(recursive=True) if "--node-rank" in words_of(p)]
    return [p for p in found if p.ppid() != os.getpid()]
