"""Answers of SGLang's loaders on another node, which sees the controller's files but not its memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from rl_megatron.errors import CorruptionError, EngineError
from rl_megatron.models.named import NAMED
from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.servers.sglang.adapter import SGLangAdapter
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.servers.mirror import Mirror

T = TypeVar("T")

OTHER_NODE = """
import base64, json, pickle, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
import torch

for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
    sys.modules[name] = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=rank))
from rl_megatron.rollout.servers.sglang import worker
from rl_megatron.weights.servers.mirror import Mirror

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def load_weights(self, tensors):
        for _, tensor in tensors:
            self.w.copy_(tensor)

class SGLang(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({"tp_size": len(models)})

    def do_POST(self):
        global rank
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/update_weights_from_tensor":
            for rank, (model, order) in enumerate(zip(models, said["serialized_named_tensors"])):
                worker.load(model, pickle.loads(base64.b64decode(order)))
        self.say({"success": True})

    def say(self, answer):
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *given):
        pass

models, path = [Model(), Model()], Path(sys.argv[1])
if len(sys.argv) > 2:
    Mirror.make(path, {"w": (4, 4)}, torch.float32, Path(sys.argv[2]))
server = HTTPServer(("127.0.0.1", 0), SGLang)
print(server.server_port, flush=True)
server.serve_forever()
"""
APART = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"')
ADAPTER = SGLangAdapter(replace(NAMED["qwen3-30b-a3b"], vocab_size=10))


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """One in the controller's memory, at the path of that in the other node's."""
    (tmp_path / "config.json").write_text('{"model_type": "made-up"}')
    (tmp_path / "memory").mkdir()
    path = tmp_path / "memory" / "run" / "model.safetensors"
    Mirror.make(path, {"w": (4, 4)}, torch.float32, tmp_path / "config.json")
    return path


@pytest.fixture
def other_node(mirror: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of a server of two ranks, for which the folder ``memory`` is another than this process's."""
    memory = str(mirror.parents[1])
    if subprocess.run([*APART, memory, "true"], capture_output=True, check=False).returncode:
        pytest.skip("NO TEST OF ANOTHER NODE: a user may make no namespaces here")
    command = (*APART, memory, sys.executable, "-c", OTHER_NODE, str(mirror), str(tmp_path / "config.json"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def asked(url: str, answers: Path | None, ask: Callable[[Server], Coroutine[None, None, T]]) -> T:
    async def run() -> T:
        server = Server(url, token=None, timeout_seconds=60.0, answers=answers)
        try:
            return await ask(server)
        finally:
            await server.close()

    return asyncio.run(run())


def test_they_come_in_a_folder_of_both_nodes_and_leave_nothing(other_node: str, mirror: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    said = asked(other_node, shared, lambda server: ADAPTER.boxes(server, mirror))
    assert said == 2 * [{"w": whole_box((4, 4))}]
    assert list(shared.iterdir()) == []


def test_one_that_is_missing_is_an_error_with_what_to_do(other_node: str, mirror: Path) -> None:
    with pytest.raises(EngineError, match=r"answer is not here: .*/memory/run/held-.*\.0; .*set weights\.folder to"):
        asked(other_node, None, lambda server: ADAPTER.boxes(server, mirror))


def test_a_server_that_lacks_a_folder_lives(other_node: str, mirror: Path, tmp_path: Path) -> None:
    """Of answers, or of weights: the user's server goes on."""
    lacked = tmp_path / "memory" / "lacked"
    lacked.mkdir()
    with pytest.raises(EngineError, match="answer is not here"):
        asked(other_node, lacked, lambda server: ADAPTER.boxes(server, mirror))
    with pytest.raises(CorruptionError, match=r"rank 0: .*lacked/model\.safetensors"):
        asked(other_node, tmp_path, lambda server: ADAPTER.boxes(server, lacked / "model.safetensors"))
    assert asked(other_node, tmp_path, lambda server: ADAPTER.boxes(server, mirror))
