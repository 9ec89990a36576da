"""Has vLLM's own loaders take models that its CPU build does not run; a program of a test, for vLLM's interpreter.

Of each pair of folders the model is made by the first one and loads its weights, then those of the second. For each it
prints a line of JSON: the digest of all numbers, in order of size, of the parameters that the second one filled.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype

_choose = CpuPlatform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]


def _dense(cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    """Without its refusal of sparse attention: nothing is computed here."""
    chosen: str = _choose(cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)
    return chosen


def main(pairs: list[tuple[str, str]]) -> None:
    """Load each second folder into the model of the first one."""
    CpuPlatform.get_attn_backend_cls = classmethod(_dense)  # type: ignore[assignment]
    for number, (first, second) in enumerate(pairs):
        arguments = EngineArgs(
            model=first, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, language_model_only=True
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            if not number:
                init_distributed_environment(1, 0, f"file://{Path(first).parent / 'rendezvous'}", 0, "gloo")
                initialize_model_parallel(1, 1)
            with set_default_torch_dtype(torch.float32):
                model = initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
            loaded = model.load_weights(iter(load_file(Path(second) / "model.safetensors").items()))
        held = dict(model.named_parameters())
        numbers = torch.cat([held[name].detach().float().flatten() for name in sorted(loaded)]).sort().values
        print(json.dumps({first: hashlib.sha256(numbers.numpy().tobytes()).hexdigest()}), flush=True)


if __name__ == "__main__":
    main(list(zip(sys.argv[1::2], sys.argv[2::2], strict=True)))
