"""Upcycling: transformers' logits of the new model are the dense one's; random weights instead of a checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from launcher.__main__ import app
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model, tiny_shape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints.safetensors_io import STD, HFFolder, RandomWeights, read_boxes
from rl_megatron.weights.layouts.families import find_family, hf_layout
from rl_megatron.weights.layouts.layout import Layout
from tests.family_models import save_model
from tools.convert.upcycle import read_upcycling, upcycle

IDS = torch.randint(0, 43, (3, 17), generator=torch.Generator().manual_seed(0))
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Qwen3 of transformers with every weight random."""
    folder = tmp_path_factory.mktemp("dense")
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 24, "vocab_size": 43}
    save_model("qwen3", folder, **sizes, tie_word_embeddings=request.param)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(IDS).logits
    return found


@pytest.mark.parametrize(
    "asked", ["experts=2,topk=1", "experts=8", "experts=8,topk=4,granularity=2", "experts=12,granularity=3"]
)
def test_logits_are_the_dense_models_whatever_the_routers_say(dense: Path, tmp_path: Path, asked: str) -> None:
    assert upcycle(dense, tmp_path / "moe", read_upcycling(asked), shard_bytes=20_000) == []
    new, loading = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = logits(Qwen3ForCausalLM.from_pretrained(dense)), logits(new)
    assert float(before.std()) > 0.5
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


def test_experts_are_copies_or_parts_and_routers_are_random(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", read_upcycling("experts=6,topk=3,granularity=3,seed=4"))
    old, new = tensors(dense), tensors(tmp_path / "moe")
    for layer in range(2):
        given = {part: old[f"model.layers.{layer}.mlp.{part}.weight"] for part in MLP}
        for expert in range(6):
            part = slice(expert % 3 * 8, expert % 3 * 8 + 8)
            found = {name: new[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] for name in MLP}
            assert torch.equal(found["gate_proj"], given["gate_proj"][part])
            assert torch.equal(found["up_proj"], given["up_proj"][part])
            assert torch.equal(found["down_proj"], 3 * given["down_proj"][:, part])
        router = new[f"model.layers.{layer}.mlp.gate.weight"]
        assert torch.equal(router[::3], router[1::3])
        assert torch.equal(router[::3], router[2::3])
        assert not torch.equal(router[0], router[3])
        assert float(router.std()) == pytest.approx(0.02, rel=0.2)
    attention = [name for name in old if "mlp" not in name]
    assert all(torch.equal(old[name], new[name]) for name in attention)
    sizes = json.loads((tmp_path / "moe/config.json").read_text())
    assert [sizes[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")] == [6, 3, 8]


def test_noise_makes_copies_differ_by_its_deviation_and_the_seed_repeats_it(dense: Path, tmp_path: Path) -> None:
    asked = {"a": "noise=0.1,seed=1", "again": "noise=0.1,seed=1", "other": "noise=0.1,seed=2"}
    found = {}
    for name, more in asked.items():
        upcycle(dense, tmp_path / name, read_upcycling(f"experts=4,{more}"))
        found[name] = tensors(tmp_path / name)
    old = tensors(dense)
    added = [
        found["a"][f"model.layers.0.mlp.experts.{e}.up_proj.weight"] - old["model.layers.0.mlp.up_proj.weight"]
        for e in range(4)
    ]
    assert float(torch.stack(added).std()) == pytest.approx(0.1, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack([a.view(-1) for a in added]))[0, 1])) < 0.15
    assert all(torch.equal(found["a"][name], found["again"][name]) for name in found["a"])
    assert not torch.equal(*(found[x]["model.layers.1.mlp.experts.0.gate_proj.weight"] for x in ("a", "other")))


def test_a_model_of_one_expert_is_dense_and_dtypes_are_cast(tmp_path: Path) -> None:
    spec = TinySizes(hidden_size=32, num_layers=1, num_experts=1, experts_per_token=1, expert_width=16)
    one = make_tiny_model(spec, tmp_path, seed=3)
    upcycle(one, tmp_path / "moe", read_upcycling("experts=4"))
    before, after = (logits(Qwen3MoeForCausalLM.from_pretrained(folder)) for folder in (one, tmp_path / "moe"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    upcycle(one, tmp_path / "half", read_upcycling("experts=4"), dtype=DType.BF16)
    wide, half = tensors(tmp_path / "moe"), tensors(tmp_path / "half")
    assert all(torch.equal(half[name], wide[name].bfloat16()) for name in wide)
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "half/tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("experts=1", "experts: be greater than or equal to 2; keys: experts, topk, granularity, noise, seed"),
        ("topk=2", "experts: Field required"),
        ("experts=8,top_k=2", "top_k: Extra inputs are not permitted; keys: experts, topk"),
        ("experts=8,topk=9", "topk=9 of experts=8: a token cannot choose more than there are"),
        ("experts=9,granularity=2", "experts=9 are not a multiple of granularity=2"),
        ("experts=8,topk=3,granularity=2", "topk=3 is not a multiple of granularity=2, .*; set topk=2"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(asked: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_upcycling(asked)


def test_what_is_not_dense_or_has_another_attention_is_refused(dense: Path, tmp_path: Path) -> None:
    asked, out = read_upcycling("experts=4"), tmp_path / "out"
    moe = make_tiny_model(TinySizes(hidden_size=32, num_layers=1), tmp_path, seed=3)
    with pytest.raises(ConfigError, match="has 8 experts; only a dense model, or one of a single expert, is upcycled"):
        upcycle(moe, out, asked)
    with pytest.raises(ConfigError, match="its MLP is 24 wide, which granularity=5 does not divide"):
        upcycle(dense, out, read_upcycling("experts=10,granularity=5"))
    with pytest.raises(ConfigError, match="float8_e4m3fn with --upcycle"):
        upcycle(dense, out, asked, dtype=DType.F8_E4M3)
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((dense / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "qwen2", "use_sliding_window": False}))
    save_file(tensors(dense), other / "model.safetensors")
    with pytest.raises(ConfigError, match="model_type='qwen2' cannot be upcycled; allowed: 'qwen3'"):
        upcycle(other, out, asked)
    assert not out.exists()


def test_the_command_line(dense: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["convert", str(dense), str(tmp_path / "moe"), "--upcycle", "experts=8,topk=2"])
    assert said.exit_code == 0, said.output
    assert f"check it: rl-megatron convert {tmp_path / 'moe'} --verify" in said.output
    assert "--against" not in said.output
    assert logits(Qwen3MoeForCausalLM.from_pretrained(tmp_path / "moe")).isfinite().all()


def test_sizes_that_are_defaults_of_the_dense_family_alone_are_written(dense: Path, tmp_path: Path) -> None:
    """transformers leaves defaults out in some versions; Qwen3-MoE has 4 heads of keys and no head_dim by itself."""
    sizes = {"num_key_value_heads": 32, "head_dim": 128}
    config = Qwen3Config.from_pretrained(dense, num_attention_heads=32, **sizes)
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config)
    folder, out = tmp_path / "dense", tmp_path / "out"
    model.save_pretrained(folder)
    left = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: left[key] for key in left.keys() - sizes.keys()}))
    upcycle(folder, out, read_upcycling("experts=4"))
    torch.testing.assert_close(logits(Qwen3MoeForCausalLM.from_pretrained(out)), logits(model), atol=2e-5, rtol=0)


# Random weights instead of a checkpoint's.
SHAPE = (48, 96, 160)


def test_values_are_uniform_and_of_the_deviation_that_models_start_with() -> None:
    whole = RandomWeights(Path("m"), {"w.weight": (1200, 1000)}, 3).read("w.weight", ((0, 1200), (0, 1000)))
    assert float(whole.mean()) == pytest.approx(0, abs=4 * STD / 1200_000**0.5)
    assert float(whole.std()) == pytest.approx(STD, rel=2e-3)
    assert (torch.histc(whole, 20) / whole.numel()).tolist() == pytest.approx([0.05] * 20, abs=2e-3)
    beside = torch.corrcoef(torch.stack([whole[:, :-1].reshape(-1), whole[:, 1:].reshape(-1)]))
    below = torch.corrcoef(torch.stack([whole[:-1].reshape(-1), whole[1:].reshape(-1)]))
    assert float(beside[0, 1]) == pytest.approx(0, abs=4e-3)
    assert float(below[0, 1]) == pytest.approx(0, abs=4e-3)


def test_a_box_is_that_part_of_the_whole_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RandomWeights(Path("m"), {"e.weight": SHAPE}, 3)
    whole = made.read("e.weight", whole_box(SHAPE))
    monkeypatch.setattr("rl_megatron.weights.checkpoints.safetensors_io._BAND", 1000)
    for box in (((3, 17), (0, 96), (5, 160)), ((47, 48), (95, 96), (159, 160)), whole_box(SHAPE)):
        assert torch.equal(made.read("e.weight", box), whole[tuple(slice(*edge) for edge in box)])


def test_another_seed_or_name_gives_other_values_and_a_place_past_32_bits_has_its_own() -> None:
    shapes = {"a": (2**18, 2**15), "b": (2**18, 2**15)}
    low, high = ((0, 4), (0, 64)), ((2**17, 2**17 + 4), (0, 64))
    one, other = RandomWeights(Path("m"), shapes, 3), RandomWeights(Path("m"), shapes, 4)
    drawn = [one.read("a", low), one.read("b", low), other.read("a", low), one.read("a", high)]
    assert len({tuple(values.view(-1).tolist()) for values in drawn}) == 4


def test_norms_are_one_and_biases_zero() -> None:
    made = RandomWeights(Path("m"), {"model.norm.weight": (8,), "q_proj.bias": (8,)}, 0)
    assert made.read("model.norm.weight", ((2, 5),)).tolist() == [1, 1, 1]
    assert made.read("q_proj.bias", ((2, 5),)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dims", [ParallelDims(tp=2, dp=2, ep=2, etp=2), ParallelDims(pp=2, dp=2, ep=2)])
def test_every_rank_holds_what_it_would_read_from_a_file_of_the_same_values(tmp_path: Path, dims: ParallelDims) -> None:
    shape = tiny_shape(TinySizes())
    hf, layout = hf_layout(shape), Layout(table=find_family(shape).tables["megatron"], shape=shape, dims=dims)
    made, sizes = RandomWeights(tmp_path, hf.local_shapes(0), 0), hf.local_shapes(0)
    save_file({name: made.read(name, whole_box(size)) for name, size in sizes.items()}, tmp_path / "model.safetensors")
    written = HFFolder(tmp_path)
    for rank in range(dims.world_size):
        ours, theirs = ({name: torch.empty(n) for name, n in layout.local_shapes(rank).items()} for _ in range(2))
        read_boxes(made, hf, layout, rank, ours)
        read_boxes(written, hf, layout, rank, theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
