"""Writes the format of block-scaled float8 checkpoints: which weights have scales, and the size of blocks. No torch.

Upstream: DeepSeek-V3's checkpoint (arXiv:2412.19437, section 3.3.2), which Kimi-K2, Qwen3-FP8 and MiniMax-M2 share and
transformers (``integrations/finegrained_fp8.py``), vLLM and SGLang read: ``x.weight``, e4m3, beside
``x.weight_scale_inv``, a float32 factor for each block of 128 rows and 128 columns, which restores the weight; and
``quantization_config`` in config.json. Linear layers are quantised; norms, biases, convolutions, embedding, output
layer, router, gates of one row a head and the indexer's weights of heads are not: engines hold them whole (vLLM 0.32.0
``qwen_gdn_linear_attn.py``: a delta net's decays and steps have fewer rows than a block; SGLang 0.5.21
``qwen3_next_mtp.py``: the draft layer's ``fc``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_megatron.weights.boxes import Shape

BLOCK = 128  # rows and columns of a written block
SCALES = "_scale_inv"  # the suffix that a weight's name gets for its scales
_OF_HEADS = ("weights_proj", "in_proj_ba", "in_proj_b", "in_proj_a")  # which have a row or two a head
_WHOLE_MODULES = ("embed_tokens", "lm_head", "gate", "router", "shared_expert_gate", "eh_proj", "fc", *_OF_HEADS)


def is_quantised(name: str, shape: Shape) -> bool:
    """Whether the format quantises this tensor, that is, whether it is a linear layer's weight."""
    return len(shape) == 2 and name.endswith(".weight") and name.split(".")[-2] not in _WHOLE_MODULES


def quantization_config(tensors: Sequence[tuple[str, Shape]]) -> dict[str, Any]:
    """config.json's ``quantization_config`` for a checkpoint of tensors with these names and shapes.

    Experts of one tensor a layer, which are not quantised, are named by their module: readers take each ``experts``
    that is not named for quantised.
    """
    names = {name for name, _ in tensors}
    matrices = (name for name, shape in tensors if len(shape) == 2 and name.endswith(".weight"))
    whole = {name.removesuffix(".weight") for name in matrices if name + SCALES not in names}
    stacks = (name.rpartition(".")[0] for name, shape in tensors if len(shape) == 3 and name + SCALES not in names)
    whole |= {module for module in stacks if module.endswith(".experts")}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(whole),
    }
