"""The plain-torch decoder and the tiny model against transformers; products by the faster of two libraries."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl_megatron.errors import ConfigError
from rl_megatron.models import experts, indexer, kv_cache, operations
from rl_megatron.models.delta import DeltaStates
from rl_megatron.models.experts import PackedExperts, all_experts, grouped_experts
from rl_megatron.models.kv_cache import KVCache, PrefixCache, index_key_zeros
from rl_megatron.models.reference import DecoderModel
from rl_megatron.models.rotary import inverse_frequencies
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import TinySizes, _publish, make_tiny_model
from rl_megatron.weights.layouts.families import read_shape
from tests.family_models import config_of

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


def filled(shape: ModelShape, checkpoint: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> DecoderModel:
    model = DecoderModel(shape, dtype=dtype, device="cpu", max_length=64)
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
    ids=["gqa", "tied", "unnormalized", "mha", "mqa"],
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    theirs, shape, checkpoint = saved(tmp_path, **changes)
    ids = torch.randint(0, 67, (5, 33), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids).logits
    torch.testing.assert_close(filled(shape, checkpoint).logits(ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("room", [2**22, 90], ids=["whole", "blocks"])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_chooses_the_keys_of_transformers(
    name: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sequences, each query its ``index_topk`` of those before it, in whole and in blocks of few scores."""
    monkeypatch.setattr(indexer, "_SCORES", room)
    config = config_of(name, index_topk=7, index_n_heads=8)
    config.save_pretrained(tmp_path)
    shape, module = read_shape(tmp_path), import_module(f"transformers.models.{name}.modeling_{name}")
    prefix = config.__class__.__name__.removesuffix("Config")
    theirs, turns = getattr(module, f"{prefix}Indexer")(config, 0), getattr(module, f"{prefix}RotaryEmbedding")(config)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(generator=generator)
    hidden = torch.randn(2, 30, shape.hidden_size, generator=generator)
    latent = torch.randn(2, 30, shape.latent.query_rank, generator=generator)
    visible = torch.ones(30, 30, dtype=torch.bool).tril()
    angles = turns(hidden, torch.arange(30)[None])
    expected = theirs(hidden, latent, angles, visible[None], None)
    turned = torch.arange(30)[:, None] * inverse_frequencies(
        shape.rope_theta, shape.rotary_dim, shape.rope, hidden.device
    )
    ours = tuple((table * shape.rope.attention_factor).repeat(2, 1) for table in (turned.cos(), turned.sin()))
    held = dict(theirs.named_parameters())
    query, weights = indexer.index_queries(
        shape.indexer,
        latent.flatten(0, 1),
        hidden.flatten(0, 1),
        held["wq_b.weight"],
        held["weights_proj.weight"],
        ours,
    )
    norm = held["k_norm.weight"], held["k_norm.bias"]
    key = indexer.index_keys(shape.indexer, hidden.flatten(0, 1), held["wk.weight"], *norm, ours)
    query, weights, key = (x.unflatten(0, (2, 30)) for x in (query, weights, key))
    found = indexer.choose_keys(query, weights, key, visible[None], 7)
    for row, at in itertools.product(range(2), range(30)):
        chosen = [place for place in found[row, at].tolist() if place >= 0]
        assert sorted(chosen) == sorted(place for place in expected[row, at].tolist() if place <= at)


@given(st.data())
def test_an_indexer_takes_the_first_of_equal_scores(data: st.DataObject) -> None:
    """As a stable sort does, whatever follows; scores are below 0 where a head's weight is."""
    length, top_k, more = (data.draw(st.integers(1, most)) for most in (12, 12, 5))
    few = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 3.0])
    scores = data.draw(st.lists(few, min_size=length, max_size=length))
    seen = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    key = torch.tensor([*scores, *[9.0] * more])[None, :, None]
    query, weights = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1), torch.tensor([[[1.0, -1.0]]])  # relu(x) - relu(-x)
    found = indexer.choose_keys(query, weights, key, torch.tensor([*seen, *[False] * more])[None, None], top_k)[0, 0]
    places = sorted((place for place in range(length) if seen[place]), key=lambda place: -scores[place])[:top_k]
    assert len(found) == min(top_k, length + more)
    assert sorted(found.tolist()) == sorted([*places, *[-1] * (len(found) - len(places))])


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    _, shape, checkpoint = saved(tmp_path, num_experts_per_tok=7)  # all experts: no near-tie can choose another
    ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(3))
    exact = filled(shape, checkpoint).logits(ids).log_softmax(-1)
    assert (exact - filled(shape, checkpoint, torch.bfloat16).logits(ids).log_softmax(-1)).abs().mean() < 0.1


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("overflow", [(0.0, 0.0), (50.0, 1.0), (1e12, 1.0)], ids=["all", "some", "none"])
def test_experts_equal_a_loop(uneven: bool, overflow: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
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
    routed = (residual, x, chosen, torch.rand(rows, k, generator=generator), w13, w2)
    cost = 2 * (w13[0].numel() + w2[0].numel())
    experts_few = [rows if 1 <= e <= k else 0 for e in range(num_experts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "OVERFLOW_FLOPS", 0.0)  # as of experts much wider than these
        assert experts._capacity(experts_few, cost) == 0
        for packed in (None, PackedExperts(w13, w2)):
            torch.testing.assert_close(grouped_experts(*routed, packed), all_experts(*routed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [2, 4, 48])
def test_ring_cache_equals_full_attention_over_wraps_and_late_rows(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
            length, prefix = clock % 4, torch.zeros(2, 1, 3, 2, 4, dtype=torch.float64)
            prefix[:, :, 3 - length :] = torch.randn(2, 1, length, 2, 4, generator=generator, dtype=torch.float64)
            cache.insert(
                len(history),
                clock,
                PrefixCache(prefix, nothing, index_key_zeros(None, 1, length, None, prefix.device)),
                torch.tensor([length]),
            )
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
            torch.testing.assert_close(mixed[row], torch.einsum("hl,lhd->hd", weights, values).flatten())
            assert len(past) <= 9


def test_a_ring_that_wraps_chooses_the_oldest_of_equal_scores(tmp_path: Path) -> None:
    """As the learner does, whose positions do not wrap."""
    config_of("deepseek_v32", index_topk=4).save_pretrained(tmp_path)
    shape, cpu = read_shape(tmp_path), torch.device("cpu")
    assert shape.indexer is not None
    cache = KVCache(shape, rows=1, columns=9, dtype=torch.float32, device=cpu)
    columns = torch.zeros(2 * shape.num_layers, 1, 0, shape.num_kv_heads, shape.widest_head)
    nothing = PrefixCache(columns, DeltaStates.zeros(shape, 1, None, cpu), index_key_zeros(shape, 1, 0, None, cpu))
    cache.insert(0, 5, nothing, torch.tensor([0]))
    heads, size = shape.indexer.heads, shape.indexer.head_dim
    for clock in range(5, 14):
        cache.open_column(clock, active=1, oldest=5)
        cache.choose(0, torch.ones(1, size), lambda: (torch.ones(1, heads, size), torch.ones(1, heads)))
        if clock >= 9:
            assert sorted(cache._chosen[0].tolist()) == [5, 6, 7, 8]


# The tiny model is a true Hugging Face folder, made once, whole.
SPEC = TinySizes(hidden_size=16, num_heads=2, head_dim=8, num_experts=4, expert_width=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(SPEC, tmp_path_factory.mktemp("cache"), 3)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_it_loads_with_transformers_and_has_the_sizes_asked_for(folder: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    shape = read_shape(folder)
    assert (shape.hidden_size, shape.num_experts, shape.expert_width, shape.vocab_size) == (16, 4, 8, 259)
    assert model.generation_config.eos_token_id == 257
    # The norm behind it would make 1 / sqrt(eps) = 1,000 of the gradient of the first that is sampled.
    sizes = weights(folder)["model.embed_tokens.weight"].norm(dim=1)
    assert sizes.min() > 0.3 * sizes.mean()


def test_it_is_made_once_and_its_name_tells_seed_sizes_and_vocabulary_apart(folder: Path) -> None:
    cache, written = folder.parent, (folder / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_model(SPEC, cache, 3) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    others = {
        make_tiny_model(SPEC, cache, 4),
        make_tiny_model(replace(SPEC, num_layers=1), cache, 3),
        make_tiny_model(SPEC, cache, 3, vocab_size=512),
    }
    assert len(others | {folder}) == 4
    assert sorted(cache.iterdir()) == sorted(others | {folder}), "nothing half-made is left"


def test_weights_follow_the_seed_and_a_larger_vocabulary_is_never_used(folder: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    again, other = make_tiny_model(SPEC, tmp_path, 3), make_tiny_model(SPEC, tmp_path, 4)
    assert torch.equal(before, torch.get_rng_state())
    first = weights(folder)
    assert all(torch.equal(value, first[name]) for name, value in weights(again).items())
    assert any(not torch.equal(value, first[name]) for name, value in weights(other).items())
    folder = make_tiny_model(SPEC, tmp_path, 0, vocab_size=512)
    assert read_shape(folder).vocab_size == 512
    assert len(AutoTokenizer.from_pretrained(folder)) == 259
    with pytest.raises(ConfigError, match="vocab_size=258 is less than the tokenizer's 259"):
        make_tiny_model(SPEC, tmp_path, 0, vocab_size=258)


def make_at_once(start: Any, cache: Path, said: Path) -> None:
    start.wait()
    said.write_text(str(make_tiny_model(TinySizes(), cache, 0)))


def test_the_folder_of_a_faster_process_stands(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    _publish(tmp_path / "mine", tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["theirs"]
    with pytest.raises(FileNotFoundError):
        _publish(tmp_path / "mine", tmp_path / "no_parent" / "theirs")


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_is_its_utf8_bytes_and_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["<eos>", " a  b ", "e\u0301", "a .", "\r\n", "don 't", "<pad><bos>"])
def test_text_that_others_change_stays(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_follow_the_bytes_and_the_chat_template_marks_roles(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (256, 257, 258)
    assert len(tokenizer) == 259
    assert tokenizer.decode([*b"ok", 257, 256], skip_special_tokens=True) == "ok"
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "user: hi\nassistant: "


# Products by the faster of two libraries, which this processor decides.
def test_a_library_leads_where_it_uses_avx_512() -> None:
    found = torch.cpu.get_capabilities()  # of the library cpuinfo
    of_intel, wide = str(found.get("cpu_name")).startswith("Intel"), bool(found.get("avx512_f"))
    mkl = torch.backends.mkl.is_available()
    assert operations.ONEDNN_LEADS is (operations.HAS_ONEDNN and not (mkl and (of_intel or not wide)))
    assert operations.MKL_IS_WIDE is (mkl and of_intel and wide)


@pytest.mark.parametrize("leads", [False, True])
def test_a_product_is_the_same_by_both(leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "ONEDNN_LEADS", leads and operations.HAS_ONEDNN)
    draw = torch.Generator().manual_seed(0)
    for rows in (3, 200):  # a small product goes through torch's own library in any case
        x, weight = (torch.randn(n, 128, generator=draw) for n in (rows, 96))
        wanted = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(operations.linear(x, weight), wanted, rtol=1e-5, atol=1e-4)
    assert operations.through_onednn(x) is (leads and operations.HAS_ONEDNN)
    assert not operations.through_onednn(x.bfloat16())


def test_small_experts_are_packed_where_onednn_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.zeros(8, 64, 64), torch.zeros(experts.MIN_PACKED).view(8, 256, -1)
    for leads in (False, True):
        monkeypatch.setattr(experts, "ONEDNN_LEADS", leads)
        assert PackedExperts.usable(small) is (leads and operations.HAS_ONEDNN)
        assert PackedExperts.usable(large) is operations.HAS_ONEDNN
        assert not PackedExperts.usable(large.bfloat16())
