"""Starts SGLang's server for a run: ``python -m rl_megatron.engines.sglang.server <SGLang's options>``.

Unlike SGLang's own command it requires a token that is on no command line and in no log (`engine_token`). It skips the
warm-up, because its requests have no token and its failure ends the server. Ranks on one node rendezvous in a file of
this user, not at a port that every user can open. /rl_megatron_abort aborts several requests; SGLang has no such path.
Runs in SGLang's interpreter. Written against SGLang 0.5.21 (launch_server.py, entrypoints/http_server.py,
managers/tokenizer_manager.py).
"""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from sglang.launch_server import run_server
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree

from rl_megatron.engines.engine_token import VARIABLE, AuthMiddleware, authorization
from rl_megatron.user_code import add_import_folder

_SECONDS = 10.0


def main() -> None:
    """Starts the server like ``python -m sglang.launch_server``."""
    add_import_folder(Path.cwd())
    load_plugins()
    arguments = prepare_server_args(["--skip-server-warmup", *sys.argv[1:]])
    from sglang.srt.entrypoints import http_server  # imported after parsing arguments, like in SGLang

    http_server.app.add_middleware(AuthMiddleware)
    http_server.app.post("/rl_megatron_abort")(_abort)
    http_server._freeze_gc_after_server_warmup = _freeze
    if arguments.nnodes == 1:
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{tempfile.mkdtemp()}/ranks"
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


async def _abort(body: dict[str, list[str]]) -> None:
    """Aborts the requests in ``names``, like SGLang's /abort_request does with one. It ignores unknown names and leaves
    other requests running."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    for name in body["names"]:
        manager.abort_request(name)


def _freeze(arguments: Any) -> None:
    """Freezes the garbage collector as SGLang does at the end of its start. SGLang's own request has no token."""
    header = authorization(os.environ[VARIABLE])
    asking = urllib.request.Request(f"{arguments.url()}/freeze_gc", method="POST", headers=dict(header))
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asking, timeout=_SECONDS):
        pass


if __name__ == "__main__":
    main()
