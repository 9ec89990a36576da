"""Runs inside SGLang's schedulers: loads weights from a mirror file, and reports checksums of the loaded parameters.

SGLang calls `load`, which /update_weights_from_tensor names, once on each rank in its own interpreter, where torch is
installed but not this package's other dependencies. Written against SGLang 0.5.21 (weight_updater.py).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from rl_megatron.errors import RLMegatronError, WeightError
from rl_megatron.files import write_atomically
from rl_megatron.weights.checks.places import ParameterBox, record
from rl_megatron.weights.checks.reports import (
    BackgroundChecksums,
    ChecksumReport,
    drop_private,
    make_checksum_report,
    packed_report,
)
from rl_megatron.weights.routes import mirror
from rl_megatron.weights.routes.engine_ends import Receiver, one_thread
from rl_megatron.weights.routes.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Executes the order in JSON in the first tensor's name, and writes the answer to ``answer``.<rank>.

    An error in the weights is also an answer, because an exception would end the server. Without a folder for the
    answer it does nothing, and the controller finds no answer.
    """
    order = json.loads(named_tensors[0][0])
    path, rank = Path(order["path"]), get_parallel().tp_rank
    said = Path(f"{order['answer']}.{rank}")
    if not os.access(said.parent, os.W_OK):
        logger.error("this server follows no order of a run whose folder it cannot write: %s", said.parent)
        return
    answer, report = dict[str, object](), None
    _, param = next(iter(model.named_parameters()))
    torch.get_device_module(param.device).synchronize()  # an in-place pause leaves a step running with the weights
    try:
        _refuse_packed_scales(model)
        if order["do"] == "boxes":
            answer = {name: one.box for name, (one,) in find_sglang_boxes(model, path).items()}
        elif order["do"] == "join":
            places = [one for ones in find_sglang_boxes(model, path).values() for one in ones]
            params = dict(model.named_parameters())
            boxes = {one: one.local_slice(params[one.param]) for one in places}
            if model in RECEIVERS:
                RECEIVERS.pop(model).close()
            RECEIVERS[model] = Receiver(Rendezvous(**order["place"]), order["first"] + rank, boxes)
        elif order["do"] == "receive":
            report = _receive(model, order["version"], order["private"])
        elif order["do"] == "held":
            places = [one for ones in find_sglang_boxes(model, path, partial=True).values() for one in ones]
            report = make_checksum_report(drop_private(places, order["private"]), dict(model.named_parameters()))
        else:
            report = _load(model, path, order["version"], order["private"], reads=order["runner"] == "target")
        if report is not None:
            answer = packed_report(report, order.get("known", ()))  # an older trainer sends no list, and refuses this
    except (RLMegatronError, OSError) as error:
        answer = {"error": str(error)}
    write_atomically(said, json.dumps(answer).encode(), private=True)


def _refuse_packed_scales(model: Any) -> None:
    """Raises WeightError if kernels of Blackwell have packed float8's scales: a reload does not pack others again.

    SGLang 0.5.21, fp8.py: `_process_weights_after_loading_block_quant`; sgl-project/sglang#9855.
    """
    packed = (name for name, param in model.named_parameters() if getattr(param, "format_ue8m0", False))
    copied = (name for name, layer in model.named_modules() if getattr(layer, "block_fp8_mxfp8_ready", False))
    if name := next(packed, None) or next(copied, None):
        raise WeightError(
            f"{name}: SGLang keeps the scales of float8 packed on these GPUs, and cannot load others (sglang#9855); "
            "set rollout.server.options='--fp8-gemm-backend triton', or rollout=vllm"
        )


RECEIVERS: dict[Any, Receiver] = {}
"""Model -> receiver of the shards that the learner's ranks send."""


def _receive(model: Any, version: int, private: Sequence[str]) -> ChecksumReport:
    params, beside = dict(model.named_parameters()), BackgroundChecksums()

    def whole(one: ParameterBox) -> None:
        if drop_private([one], private):
            beside.checksum_boxes([one], params)
        else:
            beside.sent(one, params[one.param])

    with one_thread():  # vLLM binds its threads itself, and does not allow others to
        RECEIVERS[model].receive(version, whole)
    if (derive := getattr(model, "post_load_weights", None)) is not None:
        derive()  # computed at the end of `load_weights`, e.g. latent attention's absorbed matrices
    return beside.report()


def _load(model: Any, path: Path, version: int, private: Sequence[str], *, reads: bool) -> ChecksumReport:
    """Loads a version. ``reads``: checksum tensors without a parameter to check, as read; one of two models suffices.

    Parameters are checksummed when the loader has returned: DeepSeek's loader copies in threads until it returns.
    """
    found, params, beside = mirror.read(path, version), dict(model.named_parameters()), BackgroundChecksums()
    places = {name: drop_private(ones, private) for name, ones in find_sglang_boxes(model, path, partial=True).items()}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        """Computes checksums of the bytes read for parameters with a private layout."""
        for name, tensor in found.items():
            if reads and not places.get(name):
                beside.read(name, tensor)
            yield name, tensor

    model.load_weights(tensors())
    beside.checksum_boxes([one for name in found for one in places.get(name, ())], params)
    return beside.report()


@cache
def find_sglang_boxes(model: Any, path: Path, *, partial: bool = False) -> dict[str, list[ParameterBox]]:
    """Returns HF name -> places of a mirror file's tensors in the model (``partial``: only those copied)."""
    params = dict(model.named_parameters())
    out: dict[str, list[ParameterBox]] = {}
    for one in record(model.load_weights, mirror.shapes(path), params, mirror.dtypes(path), partial=partial):
        out.setdefault(one.hf, []).append(one)
    return out
