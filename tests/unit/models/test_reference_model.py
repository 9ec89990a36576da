"""The plain-torch decoder against transformers' own Qwen3-MoE on random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_megatron.models import experts, kv_cache
from rl_megatron.models.delta import DeltaStates
from rl_megatron.models.experts import PackedExperts, all_experts, grouped_experts
from rl_megatron.models.kv_cache import KVCache, Prefix
from rl_megatron.models.reference import ReferenceModel
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.families import read_shape

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def saved(folder: Path, **changes: object) -> tuple[Qwen3MoeForCausalLM, ModelShape, dict[str, torch.Tensor]]:
    """transformers' model with every weight random (norms too), its shape, and the tensors of its checkpoint."""
    torch.manual_seed(1)
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    theirs.save_pretrained(folder)
    return theirs, read_shape(folder), load_file(folder / "model.safetensors")


def filled(
    shape: ModelShape, checkpoint: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> ReferenceModel:
    model = ReferenceModel(shape, dtype=dtype, device="cpu", max_length=64)
    assert {name: t.shape for name, t in model.tensors.items()} == {name: t.shape for name, t in checkpoint.items()}
    for name, tensor in checkpoint.items():
        model.tensors[name].copy_(tensor)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"norm_topk_prob": False},
        {"num_key_value_heads": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"num_key_value_heads": 1, "num_experts_per_tok": 1},
    ],
    ids=["gqa", "tied", "unnormalised", "mha", "mqa"],
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    theirs, shape, checkpoint = saved(tmp_path, **changes)
    ids = torch.randint(0, 67, (5, 33), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids).logits
    torch.testing.assert_close(filled(shape, checkpoint).logits(ids), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    _, shape, checkpoint = saved(tmp_path, num_experts_per_tok=7)  # all experts: no near-tie can choose another
    ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(3))
    exact = filled(shape, checkpoint).logits(ids).log_softmax(-1)
    rounded = filled(shape, checkpoint, torch.bfloat16).logits(ids).log_softmax(-1)
    assert (exact - rounded).abs().mean() < 0.1


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("overflow", [(0.0, 0.0), (50.0, 1.0), (1e12, 1.0)], ids=["all", "some", "none"])
def test_every_expert_path_equals_a_loop_over_tokens(
    uneven: bool, overflow: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    residual, x = torch.randn(2, 40, 12, generator=generator)
    w13 = torch.randn(6, 2 * 5, 12, generator=generator)
    w2 = torch.randn(12, 6, 5, generator=generator).transpose(0, 1)
    scores = torch.rand(40, 6, generator=generator)
    scores[:, 2] += 2.0 * uneven
    weights, chosen = scores.topk(2, dim=-1)

    expected = residual.double()
    for token in range(40):
        for weight, expert in zip(weights[token].double(), chosen[token], strict=True):
            gate, up = (w13[expert].double() @ x[token].double()).split(5)
            expected[token] += weight * (w2[expert].double() @ (gate * gate.sigmoid() * up))

    monkeypatch.setattr(experts, "OVERFLOW_FLOPS", overflow[0])
    monkeypatch.setattr(experts, "OVERFLOW_SLOWDOWN", overflow[1])
    routed = (residual, x, chosen, weights, w13, w2)
    for packed in (None, PackedExperts(w13, w2)):
        torch.testing.assert_close(grouped_experts(*routed, packed).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(all_experts(*routed).double(), expected, rtol=1e-5, atol=1e-5)
    assert (chosen.flatten().bincount(minlength=6).max() > 30) == uneven


@pytest.mark.parametrize(("num_experts", "k", "rows"), [(64, 8, 64), (64, 4, 512), (8, 2, 2048)])
def test_experts_that_have_all_the_tokens_give_what_dense_products_give(num_experts: int, k: int, rows: int) -> None:
    """As when a group of equal prompts is decoded: every row chooses the same experts, and a loop over them alone is
    cheapest. The dense products are compared with a loop over tokens above."""
    generator = torch.Generator().manual_seed(4)
    residual, x = torch.randn(2, rows, 12, generator=generator)
    w13 = torch.randn(num_experts, 2 * 5, 12, generator=generator) / 4
    w2 = torch.randn(12, num_experts, 5, generator=generator).transpose(0, 1)
    chosen = torch.arange(1, k + 1).expand(rows, k).contiguous()
    weights = torch.rand(rows, k, generator=generator)
    routed = (residual, x, chosen, weights, w13, w2)
    cost = 2 * (w13[0].numel() + w2[0].numel())
    experts_few = [rows if 1 <= e <= k else 0 for e in range(num_experts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "OVERFLOW_FLOPS", 0.0)  # as of experts much wider than these
        assert experts._capacity(experts_few, cost) == 0
        for packed in (None, PackedExperts(w13, w2)):
            torch.testing.assert_close(grouped_experts(*routed, packed), all_experts(*routed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [2, 4, 48])
def test_ring_cache_equals_full_attention_across_wraps_moves_and_late_rows(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different ages in a ring that wraps three times, against attention over each row's own history."""
    monkeypatch.setattr(kv_cache, "BLOCK_COLUMNS", block)
    shape = ModelShape(
        num_layers=1, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=4, num_experts=1, experts_per_token=1,
        expert_width=1, vocab_size=1, rope_theta=1.0, norm_eps=1.0, normalize_top_k=True, tie_embeddings=True,
        max_positions=64,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    cache = KVCache(shape, rows=3, columns=9, dtype=torch.float64, device=torch.device("cpu"))
    nothing = DeltaStates.zeros(shape, 1, torch.float64, torch.device("cpu"))
    history: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each active row: its (key, value) so far
    for clock in range(5, 35):
        if len(history) == 3 and clock % 2:  # the oldest row (by age) leaves; the last takes its place
            history.pop(oldest := max(range(3), key=lambda row: len(history[row])))
            if oldest < 2:
                history.insert(oldest, history.pop())
                cache.move(torch.tensor([2]), torch.tensor([oldest]))
        if len(history) < 3:
            length = clock % 4
            prefix = torch.zeros(2, 1, 3, 2, 4, dtype=torch.float64)
            prefix[:, :, 3 - length :] = torch.randn(2, 1, length, 2, 4, generator=generator, dtype=torch.float64)
            cache.insert(len(history), clock, Prefix(prefix, nothing), torch.tensor([length]))
            history.append([(prefix[0, 0, i], prefix[1, 0, i]) for i in range(3 - length, 3)])
        num = len(history)
        query = torch.randn(num, 4, 4, generator=generator, dtype=torch.float64)
        key, value = torch.randn(2, num, 2, 4, generator=generator, dtype=torch.float64)
        cache.open_column(clock, active=num, oldest=clock - max(map(len, history)))
        mixed = cache.attend(0, query, key, value)
        for row, past in enumerate(history):
            past.append((key[row], value[row]))
            keys, values = (torch.stack(x).repeat_interleave(2, 1) for x in zip(*past, strict=True))  # [L, 4, 4]
            weights = (torch.einsum("hd,lhd->hl", query[row], keys) / 2).softmax(-1)
            expected = torch.einsum("hl,lhd->hd", weights, values).flatten()
            torch.testing.assert_close(mixed[row], expected)
            assert len(past) <= 9
