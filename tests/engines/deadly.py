"""A server of the in-process engine that dies by SIGKILL: when it has one prompt, and once in the middle of a push.

``DEADLY`` in its environment is a folder: its file ``prompt`` has the prompt's tokens, and whoever finds ``push`` in
the middle of a load beside which something is sampled takes it and dies. Each death is a line of ``deaths.jsonl``, with
the number of completions beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose modules are the tests'

from rl_megatron.engines.local import adapter, server
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.engines.local.server import RunningBatch

FOLDER = Path(os.environ["DEADLY"])
PROMPT = tuple(json.loads((FOLDER / "prompt").read_text()))
RUNNING = list[RunningBatch]()


def die(cause: str, beside: int) -> None:
    with (FOLDER / "deaths.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "cause": cause, "beside": beside}) + "\n")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    asked, serve, make = adapter.decode_request, LocalEngine.serve, RunningBatch.__init__

    def request_of(body: Any) -> Any:
        name, request = asked(body)
        if request.token_ids[: len(PROMPT)] == PROMPT:
            die("prompt", 0)
        return name, request

    def half_loaded(engine: LocalEngine, version: int) -> None:
        """Its tensors are the new ones, but none of it is served."""
        beside = sum(batch.unfinished for batch in RUNNING)
        with contextlib.suppress(FileNotFoundError):
            if beside:
                os.rename(FOLDER / "push", FOLDER / "taken")
                die("push", beside)
        serve(engine, version)

    def remembered(batch: RunningBatch, *given: Any, **named: Any) -> None:
        make(batch, *given, **named)
        RUNNING.append(batch)

    setattr(adapter, "decode_request", request_of)  # noqa: B010  an assignment is none of mypy's
    setattr(LocalEngine, "serve", half_loaded)  # noqa: B010
    setattr(RunningBatch, "__init__", remembered)  # noqa: B010
    server.main()


if __name__ == "__main__":
    main()
