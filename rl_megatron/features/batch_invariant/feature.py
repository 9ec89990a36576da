"""``learner.batch_invariant``: kernels for which a token's log-prob does not depend on its micro-batch."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import TYPE_CHECKING

from rl_megatron.config.activations import TORCH_ONLY, require_transformer_engine
from rl_megatron.errors import ConfigError
from rl_megatron.feature import Attention, Feature, Keywords
from rl_megatron.rules import SET, Above, Excludes, On, excluded
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

_KEY = "learner.batch_invariant=true"
_FLASH_3 = ("flash_attn_interface", "flash_attn_3")


class BatchInvariantKeys(Section):
    """The feature's key of the learner."""

    batch_invariant: bool = False
    """Whether products, norms and attention of TransformerEngine's layers use megatron-core's kernels in which a row's
    sums do not depend on the other rows, on GPUs, for models without experts; slower. Not run; whether log-probs are
    then equal to the bit is not measured (docs/troubleshooting.md)."""


def _is_used(learner: LearnerSection) -> bool:
    assert isinstance(learner, BatchInvariantKeys)
    return learner.batch_invariant


def _megatron(learner: LearnerSection, shape: ModelShape) -> Keywords:
    """Selects FlashAttention in one split. megatron-core after 0.16.1 needs its generation, and takes only 3."""
    if not _is_used(learner):
        return Keywords()
    require_transformer_engine(_KEY, learner, shape)
    if not any(importlib.util.find_spec(name) for name in (*_FLASH_3, "flash_attn")):
        raise ConfigError(f"{_KEY}: FlashAttention is not installed here; install it, or leave it out")
    model: dict[str, object] = {"batch_invariant_mode": True, "attention_backend": Attention("flash")}
    if version("megatron-core").startswith("0.16."):
        return Keywords(model=model)
    if not any(importlib.util.find_spec(name) for name in _FLASH_3):
        raise ConfigError(
            f"{_KEY}: this megatron-core needs FlashAttention 3, which is not installed; install it "
            "(flash_attn_3), use megatron-core 0.16.1, or leave it out"
        )
    return Keywords(model={**model, "flash_attention_version": 3})


_ON = On("learner.batch_invariant", True)
_ONE = "leave one of them out"
# fmt: off
_RULES = (
    *excluded(_ON,
        (On("learner.device", "cpu"), "its kernels need GPUs", "leave it out"),
        (On("learner.dtype", "float32"), "FlashAttention needs half precision", "set bfloat16"),
        (On("learner.cp", Above(1)), "TransformerEngine's attention over cp calls FlashAttention 2, whose splits are "
         "not fixed (megatron-core 0.19 refuses it)", "set learner.cp=1"),
        (On("learner.head_dtype"), "its kernel multiplies float32 in TF32, with 10 bits", _ONE),
        *((on, "megatron-core has such kernels only for TransformerEngine's layers", "set learner.layers=auto")
          for on in (On("learner.layers", "torch"), On("learner.own_layers", SET, "learner.layers"))),
        (On("learner.tp", Above(2)), "with more than two ranks, NCCL sums in an order that depends on a token's place "
         "in the micro-batch", "set learner.tp to 1 or 2")),
    *excluded(_ON,
        (On("shape.num_experts", Above(0), "shape.family"), "megatron-core 0.16.1 has no such kernels for experts' "
         "grouped products", "leave it out"),
        (TORCH_ONLY, "only torch's layers support that", "leave it out"), where="shape"),
    Excludes(one=On("learner.optimizer.name", "muon"), other=_ON, fix=_ONE,
             why="Muon needs a torch.addmm with factors"),
    Excludes(one=On("learner.fp8"), other=_ON, why="its kernels do not support float8", fix=_ONE),
    Excludes(one=On("learner.lora.rank"), other=_ON, why="merging needs a torch.addmm with a factor",
             fix=_ONE),
)
# fmt: on

FEATURE = Feature(
    name="batch_invariant",
    active=_is_used,
    keys={"learner": BatchInvariantKeys},
    may_change=frozenset({"learner.batch_invariant"}),
    learner_rules=_RULES,
    megatron=_megatron,
)
