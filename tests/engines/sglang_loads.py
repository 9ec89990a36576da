"""Has SGLang's own loaders take models that its CPU build does not run; a program of a test, for SGLang's interpreter.

Of each pair of folders the model is made by the first one and loads its weights, then those of the second. For each it
prints a line of JSON: the digests of all numbers, in order of size, of the parameters that the second one changed, of
the model and, where the second folder has one, of its draft layer. Our worker loads it, as a push through a file, and
the program ends with the names of tensors whose checksums it reports otherwise than the file's.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_loader import get_model
from sglang.srt.models import kimi_k25
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs

from rl_megatron.engines.sglang import worker
from rl_megatron.weights.checks.compare import compare
from rl_megatron.weights.checks.reports import checksum
from tests.engines.loaded import changed, digest_of

JOINS = ("eh_proj.weight", "mtp.fc.weight")  # of a draft layer
_RANKS = [f"{group}_rank" for group in ("tp", "pp", "attn_dp", "attn_tp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")]
_SIZES = [f"{group}_size" for group in ("pp", "attn_dp", "attn_tp", "attn_dcp", "moe_ep", "moe_dp", "moe_tp")]


def load(first: str, second: str) -> None:
    """Load the second folder into the model of the first one. Once a process: SGLang's arguments are the process's."""
    arguments = ServerArgs(
        model_path=first,
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        mamba_radix_cache_strategy="no_buffer",
        disable_overlap_schedule=True,
    )
    publish(arguments, role="scheduler")
    init_distributed_environment(1, 0, f"file://{Path(second) / 'rendezvous'}", 0, "gloo")
    get_parallel().override_permanently(**dict.fromkeys(_RANKS, 0), **dict.fromkeys(_SIZES, 1))
    initialize_model_parallel()
    initialize_dp_attention_flags(arguments)
    found = [digest(arguments, first, second, draft=False)]
    if any(name.endswith(JOINS) for name in load_file(Path(second) / "model.safetensors")):
        found.append(digest(arguments, first, second, draft=True))
    print(json.dumps({first: found}), flush=True)


def digest(arguments: ServerArgs, first: str, second: str, *, draft: bool) -> str:
    """Of the model of the folder ``first``, or of its draft layer, with the weights of the folder ``second``."""
    config = ModelConfig.from_server_args(arguments, is_draft_model=draft)
    config.hf_config.language_only = True
    for each in (config.hf_config, config.hf_text_config):  # one rank pads no heads of delta nets
        for key in [key for key in vars(each) if re.fullmatch("linear_num_(key|value)_heads", key)]:
            setattr(each, f"{key}_cpu", getattr(each, key))
    model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    push(model, Path(second) / "model.safetensors", draft=draft)
    return digest_of(model.get_parameter(name) for name in changed(model, before))


def push(model: torch.nn.Module, path: Path, *, draft: bool) -> None:
    """Load a file of weights by our worker, and check what it reports of tensors that are held in the file's dtype.

    Raises WeightError if weights cannot be sent straight into the model.
    """
    path.with_name(f"{path.name}.json").write_text(json.dumps({"version": 1}))
    worker.find_sglang_boxes(model, path)
    report = worker._load(model, path, 1, (), reads=not draft)
    pushed = load_file(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in pushed.items()}
    sealed = {name: checksum(tensor, shapes[name]) for name, tensor in pushed.items()}
    held = compare(sealed, shapes, [report], frozenset()).differing
    wrong = [n for n, params in held.items() if all(model.get_parameter(p).dtype == pushed[n].dtype for p in params)]
    if wrong:
        sys.exit(f"{path}: the worker reports other checksums of {', '.join(wrong)}")


def main(pairs: list[tuple[str, str]]) -> None:
    """Load each pair in a process of its own. Nothing is computed, so sparse attention and its rotary embedding may be
    a GPU's, and a tower nothing."""
    torch.use_deterministic_algorithms(True)  # fills memory that nothing has written with NaN
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    factory.get_rope_cpu = lambda *how: factory.get_rope(*how[:-1])
    kimi_k25.MoonViT3dPretrainedModel = kimi_k25.K2VLMultiModalProjector = lambda *how, **more: torch.nn.Module()
    for pair in pairs:
        process = multiprocessing.get_context("fork").Process(target=load, args=pair)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{pair[0]}: status {process.exitcode}")


if __name__ == "__main__":
    main(list(zip(sys.argv[1::2], sys.argv[2::2], strict=True)))
