"""Has vLLM's own loaders take models that its CPU build does not run; a program of a test, for vLLM's interpreter.

Of each pair of folders the model is made by the first one and loads its weights, then those of the second. For each it
prints a line of JSON: the digests of all numbers, in order of size, of the parameters that the second one filled, of
the model and, where the second folder has one, of its draft layer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.engines.loaded import changed, digest_of

JOINS = ("eh_proj.weight", "mtp.fc.weight")  # of a draft layer
_choose = CpuPlatform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]


def _dense(cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    """Without its refusal of sparse attention: nothing is computed here."""
    chosen: str = _choose(cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)
    return chosen


def digest(config: VllmConfig, model_config: ModelConfig, second: str) -> str:
    """Of the model that ``model_config`` describes, with the weights of the folder ``second``."""
    with set_default_torch_dtype(torch.float32):
        model = initialize_model(vllm_config=config, model_config=model_config)
    get_model_loader(config.load_config).load_weights(model, model_config)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    filled = model.load_weights(iter(load_file(Path(second) / "model.safetensors").items()))
    held = dict(model.named_parameters())
    if filled is None:  # the loader of Hunyuan 3's draft layer does not say
        filled = changed(model, before)
    return digest_of(held[name] for name in filled)


def main(pairs: list[tuple[str, str]]) -> None:
    """Load each second folder into the model of the first one."""
    torch.use_deterministic_algorithms(True)  # fills memory that nothing has written with NaN
    torch.cpu._is_amx_tile_supported = lambda: False  # with AMX, vLLM's latent attention is dense and bfloat16 alone
    CpuPlatform.get_attn_backend_cls = classmethod(_dense)  # type: ignore[assignment]
    registry._run_in_subprocess = lambda inspect: inspect()  # a process for each class would import vLLM again
    for number, (first, second) in enumerate(pairs):
        drafts = any(name.endswith(JOINS) for name in load_file(Path(second) / "model.safetensors"))
        arguments = EngineArgs(
            model=first,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            language_model_only=True,
            speculative_config={"method": "mtp", "num_speculative_tokens": 1} if drafts else None,
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            if not number:
                init_distributed_environment(1, 0, f"file://{Path(first).parent / 'rendezvous'}", 0, "gloo")
                initialize_model_parallel(1, 1)
            found = [digest(config, config.model_config, second)]
        if config.speculative_config is not None:
            draft = config.speculative_config.draft_model_config
            config = replace(config, model_config=draft)
            with set_current_vllm_config(config):
                found.append(digest(config, draft, second))
        print(json.dumps({first: found}), flush=True)


if __name__ == "__main__":
    main(list(zip(sys.argv[1::2], sys.argv[2::2], strict=True)))
