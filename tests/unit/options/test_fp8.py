"""What float8 keeps of a token, by TransformerEngine's source, and the copies of weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.named import NAMED
from rl_megatron.options import table
from rl_megatron.options.fp8 import Fp8, rows
from rl_megatron.options.kept import freed, kept
from rl_megatron.options.option import Elements, Rank

OPTION, QWEN, DEEPSEEK = Fp8(), NAMED["qwen3-30b-a3b"], NAMED["deepseek-v3"]


def learner(fp8: str | None, **keys: Any) -> LearnerSection:
    return LearnerSection.model_validate({"device": "cuda", "dtype": "bfloat16", "fp8": fp8, **keys})


def test_linears_keep_their_inputs_in_a_byte_but_for_what_others_keep_too() -> None:
    """Qwen3-30B-A3B: h 2048, 8 of 128 experts of 768. A byte less of the norm's output and of each chosen expert's row
    and product. Attention keeps its output in bfloat16, so megatron-core has its projection keep no other."""
    fewer = kept(learner(None), QWEN, 0) - kept(learner("tensorwise"), QWEN, 0)
    assert fewer == 2048 + 8 * (2048 + 768)
    product = freed(learner(None), QWEN, 0)["moe_act"] - freed(learner("tensorwise"), QWEN, 0)["moe_act"]
    assert product == 8 * 768


def test_of_latent_attention_normed_latents_have_a_byte_and_its_input_as_many_as_linears_read_it() -> None:
    """DeepSeek-V3, a layer of experts: 8 of 2048 and one shared, h 7168, latents of 1536 and 512. Two linears read what
    the first norm gives, each with a copy of a byte; routers keep what the second gives, for shared experts too."""
    fewer = kept(learner(None), DEEPSEEK, 60) - kept(learner("blockwise"), DEEPSEEK, 60)
    assert fewer == 8 * (7168 + 2048) + 2048 + 1536 + 512


@pytest.mark.parametrize(("stage", "tables"), [(0, 1), (1, 0), (2, 1)])
def test_weights_have_two_copies_of_a_byte_but_for_tables_of_the_vocabulary(stage: int, tables: int) -> None:
    held = Elements(dense=10**9, experts=10**9)
    rank = Rank(
        stage=stage,
        parameters=held,
        trained=held,
        matrices=held,
        tokens=1.0,
        layers=(0,),
        inputs=(1.0,),
        longest=1,
        largest=1,
    )
    terms = table.memory(learner("mxfp8", pp=3, tp=2), QWEN, rank)
    assert terms["fp8 weights"] == 2 * (2 * 10**9 - tables * 151936 * 2048 / 2)
    assert "fp8 weights" not in table.memory(learner(None, pp=3, tp=2), QWEN, rank)


def test_blocks_of_128_are_gathered_whole() -> None:
    """Float8BlockQuantizer.is_quantizable of TransformerEngine 2.11, which asserts it of what it gathers."""
    shape = replace(QWEN, hidden_size=2048 + 16, latent=None)
    said = [list(OPTION.problems(learner(fp8, tp=tp), shape)) for fp8, tp in (("blockwise", 2), ("blockwise", 1))]
    assert said[1] == []
    assert "learner.tp=2: ranks gather the 2064 hidden columns in float8, and they are no multiple of 128" in said[0][0]
    assert list(OPTION.problems(learner("blockwise", tp=2), DEEPSEEK)) == []
    narrow = replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, kv_rank=520, rope_dim=56))
    (problem,) = OPTION.problems(learner("tensorwise"), narrow)
    assert "the 520 columns of a latent are no multiple of 16" in problem


def test_tokens_are_multiples_of_what_has_a_scale_of_its_own() -> None:
    assert [rows(learner(fp8)) for fp8 in (None, "tensorwise", "blockwise", "mxfp8")] == [1, 16, 128, 32]
