"""Orders to the loader in SGLang's schedulers (`worker.load`), and the files that it answers in."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from rl_megatron.errors import EngineError
from rl_megatron.rollout.servers.http import Refused, Server


def packed(order: Mapping[str, object]) -> str:
    """An order as the name of a tensor without numbers, as /update_weights_from_tensor takes those of one rank."""
    return base64.b64encode(pickle.dumps([(json.dumps(order), torch.empty(0))])).decode()


@asynccontextmanager
async def update(server: Server, to: Mapping[str, str]) -> AsyncIterator[None]:
    """A weight update of what ``to`` selects. First ends one that a killed run left open: SGLang refuses a second."""
    try:
        await server.post("/begin_weight_update", to)
    except Refused:
        with contextlib.suppress(Refused):
            await server.post("/end_weight_update", {})
        await server.post("/begin_weight_update", to)
    try:
        yield
    finally:
        await server.post("/end_weight_update", {})


def loaders_answers(path: Path, ranks: int) -> list[bytes]:
    """Read and remove the answer file of each rank's loader: ``path`` with the rank's number behind a dot.

    Raises EngineError where one is missing.
    """
    files = [path.with_name(f"{path.name}.{rank}") for rank in range(ranks)]
    try:
        said = [file.read_bytes() for file in files]
    except FileNotFoundError as error:
        raise EngineError(
            f"a loader's answer is not here: {error.filename}; each node of the server must see {path.parent}, and be "
            "able to write there: set weights.folder to a folder that this machine and the server see"
        ) from error
    for file in files:
        file.unlink()
    return said
