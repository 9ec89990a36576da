"""Orders to the loader in SGLang's schedulers (`worker.load`), and the files that it answers in."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from rl_megatron.errors import EngineError


def packed(order: Mapping[str, object]) -> str:
    """An order as the name of a tensor without numbers, as /update_weights_from_tensor takes those of one rank."""
    return base64.b64encode(pickle.dumps([(json.dumps(order), torch.empty(0))])).decode()


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
