"""A server of transformers' log-probs: ``python -m tests.e2e.served_teacher FOLDER PORT [KEY_FILE]``; and the engine
that a run names to ask it. It stands in for vLLM or SGLang, which tests/engines has."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from rl_megatron.rollout.servers.decoding import Judged
from rl_megatron.rollout.servers.http import Server


class Transformers:
    """What `Teacher` uses of an engine's adapter."""

    def __init__(self, shape: object) -> None:
        """Of any sizes."""

    async def judge(self, server: Server, text: Sequence[int], top: int) -> Judged:
        said = await server.sampled("/judge", {"text": list(text), "top": top}, json.loads)
        return Judged(
            logprobs=np.array(said["logprobs"], np.float32),
            top_ids=np.array(said["ids"], np.int32),
            top_logprobs=np.array(said["top"], np.float32),
        )


@contextlib.contextmanager
def serving(folder: Path, *key: Path, port: int = 0) -> Iterator[str]:
    """The server of a folder's model while the context is open: its URL. Port 0: any that is free."""
    words = (sys.executable, "-m", "tests.e2e.served_teacher", str(folder), str(port), *map(str, key))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder, port, *keys = sys.argv[1:]
    key = Path(keys[0]).read_text() if keys else ""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, b"")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if key and self.headers["Authorization"] != f"Bearer {key}":
                self.answer(401, b"who are you?")
                return
            with torch.no_grad():
                logprobs = model(torch.tensor([asked["text"]])).logits[0, :-1].double().log_softmax(-1)
            best = logprobs.topk(asked["top"])
            own = logprobs.gather(1, torch.tensor(asked["text"][1:])[:, None])[:, 0]
            said = {"logprobs": own.tolist(), "ids": best.indices.tolist(), "top": best.values.tolist()}
            self.answer(200, json.dumps(said).encode())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing of requests."""

    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
