"""A server of transformers' log-probs: ``python -m tests.e2e.served_teacher FOLDER PORT [KEY_FILE]``; and the engine
that a run names to ask it. It stands in for vLLM or SGLang, which tests/engines has."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from rl_megatron.engines.answers import TopLogprobs
from rl_megatron.engines.http import Server
from tests.forks import FORKS


class Transformers:
    """What `ServedTeacher` uses of an engine's adapter."""

    def __init__(self, shape: object) -> None:
        """Of any sizes."""

    async def score_top(self, server: Server, text: Sequence[int], top: int) -> TopLogprobs:
        said = await server.post_sampling("/judge", {"text": list(text), "top": top}, json.loads)
        return TopLogprobs(
            logprobs=np.array(said["logprobs"], np.float32),
            top_ids=np.array(said["ids"], np.int32),
            top_logprobs=np.array(said["top"], np.float32),
        )


@contextlib.contextmanager
def serving(folder: Path, key: Path | None = None, *, port: int = 0) -> Iterator[str]:
    """The server of a folder's model in a fork while the context is open: its URL. Port 0: any that is free."""
    ours, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=serve, args=(folder, port, key, theirs.send), daemon=True)
    process.start()
    theirs.close()  # so that its end is seen
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def serve(folder: Path, port: int, key_file: Path | None, told: Callable[[int], object]) -> None:
    """Tell the port, and answer for ever."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    key = "" if key_file is None else key_file.read_text()
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

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    told(server.server_port)
    server.serve_forever()


def main() -> None:
    """By its command."""
    folder, port, *keys = sys.argv[1:]
    serve(Path(folder), int(port), Path(keys[0]) if keys else None, print)


if __name__ == "__main__":
    main()
