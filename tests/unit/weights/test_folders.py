"""Folders of models and adapters: those that are not ours to the letter, tied heads, and what is refused."""

from __future__ import annotations

import enum
import json
import pickle
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.utils import transformers_weight_conversion as of_peft
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_megatron.errors import CheckpointError, RLMegatronError, WeightError
from rl_megatron.features.lora.feature import Adaptable, LoraSection
from rl_megatron.features.lora.files import stored_lora
from rl_megatron.features.lora.merging import base_digest, merge_adapters
from rl_megatron.features.lora.rows import OF_EXPERTS_ALONE, WITH_EXPERTS, LoraLayouts, hf_adapter_name
from rl_megatron.models.tiny import TinySizes, make_tiny_model, tiny_shape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.megatron import copies_between, find_tensors, is_megatron, newest_checkpoint
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.checkpoints.torch_dist import Chunk, read_index, write_index, write_tensor
from rl_megatron.weights.formats.hf_folder import INDEX, PREFIX, file_names, index_text, raise_misfits, weight_files
from rl_megatron.weights.formats.schemes import Scheme, find_quantized
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Piece
from tests.draft_models import save_with_drafts
from tests.family_models import MODELS, save_model
from tests.saved_adapters import save_adapters
from tools.convert.conversion import run
from tools.convert.inspection import describe, dropped_tensors
from tools.convert.layouts import model_shape
from tools.convert.verify import verify

SPEC = TinySizes(hidden_size=32, expert_width=16, num_layers=2, num_experts=2)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    convert.hf_to_megatron(make_tiny_model(SPEC, folder, seed=3), folder / "megatron")
    return folder / "megatron"


def saved(root: Path, *names: str, newest: str | None = None) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / ".metadata").touch()
        (root / name / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if newest is not None:
        (root / TRACKER).write_text(newest)
    return root


def test_the_newest_checkpoint_of_a_folder_of_several_is_read(tmp_path: Path) -> None:
    steps = ("iter_0000009", "iter_0000010")
    assert newest_checkpoint(saved(tmp_path / "lm", *steps, newest="9\n")) == tmp_path / "lm/iter_0000009"
    assert (
        newest_checkpoint(saved(tmp_path / "slime", *steps, "release", newest="release")) == tmp_path / "slime/release"
    )
    assert newest_checkpoint(saved(tmp_path / "one", steps[1])) == tmp_path / "one/iter_0000010"
    assert newest_checkpoint(tmp_path / "lm/iter_0000010") == tmp_path / "lm/iter_0000010"
    assert newest_checkpoint(tmp_path) == tmp_path


def spoil(name: str, text: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_text(text)


def legacy(root: Path) -> None:
    shutil.rmtree(root / "iter_0000010")
    (root / "iter_0000010" / "mp_rank_00").mkdir(parents=True)


BAD: dict[str, Callable[[Path], None]] = {
    "has 2 checkpoints and no latest_checkpointed_iteration.txt; give one of iter_0000009, iter_0000010": (
        lambda root: (root / TRACKER).unlink()
    ),
    "says 'soon', neither a step nor release": spoil(TRACKER, "soon"),
    "names iter_0000011, which is not there; there are: iter_0000009, iter_0000010": spoil(TRACKER, "11"),
    "is of the format zarr; save it with --ckpt-format torch_dist": spoil(
        "iter_0000010/metadata.json", '{"sharded_backend": "zarr"}'
    ),
    "is of the format torch, a file a rank; Megatron-LM writes it again with": legacy,
}


@pytest.mark.parametrize("message", BAD)
def test_a_folder_without_a_checkpoint_that_is_read_says_why(message: str, tmp_path: Path) -> None:
    root = saved(tmp_path, "iter_0000009", "iter_0000010", newest="10")
    BAD[message](root)
    with pytest.raises(RLMegatronError, match=message):
        newest_checkpoint(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1}, r"linear_qkv.weight has shape \(2, 128, 32\); it should have \(1, 128, 32\)"),
        ({"moe_intermediate_size": 8}, r"fc1.weight has shape \(2, 2, 32, 32\); it should have \(2, 2, 16, 32\)"),
        ({"vocab_size": 5000}, r"embedding.word_embeddings.weight has shape \(264, 32\); it should have \(5000, 32\)"),
        ({"tie_word_embeddings": True}, r"output_layer.weight \(264, 32\) is unknown; the model has no such tensor"),
        ({"num_hidden_layers": 3}, r"linear_qkv.weight has shape \(2, 128, 32\); it should have \(3, 128, 32\)"),
    ],
)
def test_another_size_is_refused(change: dict[str, object], message: str, megatron: Path, tmp_path: Path) -> None:
    """A smaller config would have taken the first rows and layers of the larger model."""
    shutil.copytree(megatron, tmp_path / "wrong")
    config = tmp_path / "wrong" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(WeightError, match=message):
        convert.megatron_to_hf(tmp_path / "wrong", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_tensors_are_listed_that_the_model_lacks_and_state_is_not(megatron: Path) -> None:
    layout = megatron_layout(read_shape(megatron))
    sizes, chunks = read_index(megatron)
    dtypes = {chunk.key: chunk.dtype for chunk in chunks}
    state = {"optimizer.state.exp_avg.x": (1,), "chained_1.optimizer.y": (1,), "mtp.layers.0.eh_proj.weight": (1,)}
    state |= {"decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2": (1,)}
    homes = find_tensors(megatron, layout, {**sizes, **state}, dtypes)
    assert {home.key for found in homes.values() for home in found} == sizes.keys()
    adapter = "decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight"
    with pytest.raises(WeightError, match=rf"{adapter} \(2, 8\) is unknown"):
        find_tensors(megatron, layout, {**sizes, adapter: (2, 8)}, dtypes)
    with pytest.raises(WeightError, match=r"is a critic's: one value of a token.* give the policy's, .*/learner in"):
        find_tensors(megatron, layout, {**sizes, "output_layer.weight": (1, 32), "output_layer.bias": (1,)}, dtypes)
    norm = "decoder.final_layernorm.weight"
    with pytest.raises(WeightError, match=rf"{norm} is uint8; weights are one of float64, float32"):
        find_tensors(megatron, layout, sizes, {**dtypes, norm: DType.U8})
    with pytest.raises(WeightError, match=rf"lacks {norm}; its config.json"):
        find_tensors(megatron, layout, {key: size for key, size in sizes.items() if key != norm}, dtypes)
    assert find_tensors(megatron, replace(layout, vocab_multiple=128), sizes, dtypes) == homes


@pytest.mark.parametrize("odd", [DType.F16, DType.F32])
def test_parts_of_one_tensor_in_several_dtypes_are_refused(odd: DType, tmp_path: Path) -> None:
    """As a family of one's own may divide it: float16's bits, as wide as bfloat16's, would have been read as those."""

    def row(name: str, start: int, stop: int) -> ParamSpec:
        band = (Piece(hf="fused", start=start, stop=stop),)
        return ParamSpec(name=name, bands=lambda _m, _d: (band,), other_axes=lambda _m: (3,))

    shape = tiny_shape(SPEC)
    hf, parts = (Layout(table=rows, shape=shape) for rows in ([row("fused", 0, 4)], [row("a", 0, 2), row("b", 2, 4)]))

    def saved_in(folder: Path, dtypes: dict[str, DType]) -> Path:
        folder.mkdir()
        with (folder / "__0_0.distcp").open("wb") as file:
            chunks = [
                Chunk(
                    key=key,
                    offsets=(0, 0),
                    sizes=(2, 3),
                    dtype=dtype,
                    file="__0_0.distcp",
                    start=file.tell(),
                    length=write_tensor(file, dtype, (2, 3), [np.ones((2, 3), dtype.bits)]),
                )
                for key, dtype in dtypes.items()
            ]
        write_index(folder, chunks, {chunk.key: chunk.sizes for chunk in chunks})
        return folder

    (one,), _ = copies_between(saved_in(tmp_path / "one", {"a": odd, "b": odd}), hf, parts)
    assert (one.name, one.shape, one.dtype) == ("fused", (4, 3), odd)
    for number, dtypes in enumerate([{"a": odd, "b": DType.BF16}, {"a": DType.BF16, "b": odd}]):
        with pytest.raises(WeightError, match=rf"save them again in one:\n  fused: bfloat16 and {odd}$"):
            copies_between(saved_in(tmp_path / f"mixed_{number}", dtypes), hf, parts)


def test_verify_reads_files_that_hold_an_optimizers_state_alone(megatron: Path, tmp_path: Path) -> None:
    """As each data parallel rank but the first writes them."""
    folder = Path(shutil.copytree(megatron, tmp_path / "other"))
    sizes, chunks = read_index(folder)
    key, size, name = "optimizer.state.exp_avg.output_layer.weight", (64, 3), "__1_0.distcp"
    with (folder / name).open("wb") as file:
        length = write_tensor(file, DType.F32, size, [np.ones(size, DType.F32.bits)])
    state = Chunk(key=key, offsets=(0, 0), sizes=size, dtype=DType.F32, file=name, start=0, length=length)
    write_index(folder, [*chunks, state], {**sizes, key: size})
    assert list(verify(folder)) == []
    data = bytearray((folder / name).read_bytes())
    data[length // 2] ^= 1
    (folder / name).write_bytes(data)
    (line,) = verify(folder)
    assert line.startswith(f"{folder / name}, {key} (0, 0): Bad CRC-32")
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"files that should be there are not: {name}"):
        list(verify(folder))


class OlderPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does (Debian 12's; ``Enum.__reduce_ex__`` in its enum.py)."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_an_index_of_an_older_python_is_read_and_other_attributes_refused(megatron: Path, tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        OlderPickler(file).dump(pickle.loads((megatron / ".metadata").read_bytes()))
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_index(tmp_path) == read_index(megatron)
    for of in (b"ccollections\nOrderedDict\n", b"cpathlib\nPosixPath\n", b"N"):
        (tmp_path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(" + of + b"V__globals__\ntR.")
        with pytest.raises(CheckpointError, match=r"getattr of .*, which is no enumeration"):
            read_index(tmp_path)


# Folders that store more than their model has: a tied model's output matrix, and frequencies of rotary angles.
EMBED, HEAD, LOCAL = "model.embed_tokens.weight", "lm_head.weight", "embedding.word_embeddings.weight"
ANGLES = "model.layers.1.self_attn.rotary_emb.inv_freq"
TEXT = torch.arange(24).view(2, 12)
DIMS = ParallelDims(tp=2)


def stored(folder: Path, change: Callable[[Tensor], Tensor], files: int, name: str = "qwen2") -> Path:
    """A tied model with an output matrix, ``change`` of its embedding, that lies in the last of its files."""
    save_model(name, folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert HEAD not in tensors
    parts = [tensors, {HEAD: change(tensors[EMBED].clone()), ANGLES: torch.ones(8)}]
    parts = parts if files == 2 else [parts[0] | parts[1]]
    (folder / "model.safetensors").unlink()
    for file, part in zip(names := file_names(files), parts, strict=True):
        save_file(part, folder / file, {"format": "pt"})
    if files == 2:
        places = {key: file for file, part in zip(names, parts, strict=True) for key in part}
        (folder / INDEX).write_text(index_text(places, 1))
    return folder


def read(folder: Path, rank: int | None = None) -> dict[str, Tensor]:
    """By `read_boxes`: the folder's own tensors, or those of one of two learner ranks."""
    shape = read_shape(folder)
    hf = hf_layout(shape)
    layout = hf if rank is None else megatron_layout(shape, DIMS)
    found = {name: torch.full(size, torch.nan) for name, size in layout.local_shapes(rank or 0).items()}
    read_boxes(HFFolder(folder), hf, layout, rank or 0, found)
    return found


def logits(folder: Path) -> Tensor:
    """Of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found: Tensor = model(TEXT).logits
    return found.detach()


def one_number(at: int) -> Callable[[Tensor], Tensor]:
    def change(weight: Tensor) -> Tensor:
        weight.view(-1)[at] += 1.0
        return weight

    return change


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_copy_of_the_embedding_and_rotary_frequencies_are_left_aside(tmp_path: Path, name: str, files: int) -> None:
    folder = stored(tmp_path / "hf", lambda weight: weight, files, name)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    found = read(folder)
    assert found.keys() == state.keys() - {HEAD}
    assert all(torch.equal(found[key], state[key]) for key in found)
    halves = [read(folder, rank)[LOCAL] for rank in range(DIMS.tp)]
    assert torch.equal(torch.cat(halves)[: len(state[EMBED])], state[EMBED])
    assert list(verify(folder)) == []
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == found.keys()
    assert torch.equal(logits(tmp_path / "back"), logits(folder))


@pytest.mark.parametrize("files", [1, 2])
def test_an_output_matrix_that_differs_is_refused_unless_it_is_its_own(tmp_path: Path, files: int) -> None:
    folder = stored(tmp_path / "hf", one_number(-1), files)
    said = re.escape(f"the stored {HEAD} is no copy of {EMBED}; set tie_word_embeddings=false there")
    for reader in (read, convert.hf_tensors, lambda one: read(one, DIMS.tp - 1)):
        with pytest.raises(WeightError, match=said):
            reader(folder)
    wanted = logits(folder)  # transformers does not tie them then
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    found = read(folder)
    assert torch.equal(found[HEAD], one_number(-1)(found[EMBED].clone()))
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), wanted)


@pytest.mark.parametrize("change", [lambda weight: weight[:-1], lambda weight: weight.double()])
def test_an_output_matrix_of_another_kind_is_no_copy(tmp_path: Path, change: Callable[[Tensor], Tensor]) -> None:
    folder = stored(tmp_path, change, 1)
    for reader in (read, convert.hf_tensors):
        with pytest.raises(WeightError, match="is no copy of"):
            reader(folder)


# The folder of adapters that peft loads, against the same adapters multiplied into the weights.
ALL: tuple[Adaptable, ...] = ("attention", "mlp", "experts")


def log_probs(folder: Path, adapters: Path | None = None) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters is not None:
        model = PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        said: Tensor = model.eval()(input_ids=torch.arange(1, 33)[None]).logits.log_softmax(-1)
    return said


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # experts, where they have none: peft makes some of 0
@pytest.mark.parametrize(
    ("name", "targets", "expert_rank"),
    [
        ("glm4_moe", ("mlp",), None),
        ("glm4_moe_lite", ALL, 2),
        ("deepseek_v3", ALL, None),
        ("qwen3_next", ("mlp",), None),
        ("hy_v3", ("attention", "mlp"), None),
    ],
)
def test_peft_loads_those_of_dense_layers_and_shared_experts(
    name: str, targets: tuple[Adaptable, ...], expert_rank: int | None, tmp_path: Path
) -> None:
    """Measured: 6e-5 apart at most, where the adapters move log-probs by 6.7 to 8."""
    base, out = tmp_path / "base", tmp_path / "adapters"
    save_model(name, base)
    lora, shape = LoraSection(rank=4, expert_rank=expert_rank, alpha=16, targets=targets), read_shape(base)
    torch.manual_seed(0)
    sizes = LoraLayouts(lora).file_layout(megatron_layout(shape), hf_layout(shape)).local_shapes(0)
    adapters = {key: torch.randn(size) * 0.2 for key, size in sizes.items()}
    out.mkdir()
    save_file({PREFIX + key: tensor for key, tensor in adapters.items()}, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(json.dumps(LoraLayouts(lora).described(shape, base)))
    plain, found = log_probs(base), log_probs(base, out)
    weights = load_file(base / "model.safetensors")
    for key in weights:
        if (a := adapters.get(hf_adapter_name(key, "A"))) is not None:
            weights[key] += 16 / len(a) * adapters[hf_adapter_name(key, "B")] @ a
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    merged = log_probs(base)
    assert float((merged - plain).abs().max()) > 1
    assert float((merged - found).abs().max()) < 1e-3


def test_its_families_are_those_of_peft() -> None:
    families = {family for family, _ in MODELS.values()}
    mapped = of_peft._MODEL_TO_CONVERSION_PATTERN
    names = {
        family for family in families if "gate_proj" in of_peft._MOE_TARGET_MODULE_MAPPING.get(mapped.get(family), {})
    }
    assert names == OF_EXPERTS_ALONE & families
    assert families >= OF_EXPERTS_ALONE
    assert families & WITH_EXPERTS == {one for one in families if mapped.get(one) in of_peft._MOE_TARGET_MODULE_MAPPING}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("name", ["hy_v3", "deepseek_v3", "minimax_m2"])
def test_convert_says_what_peft_leaves_out(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save_model(name, base)
    run(save_adapters(tmp_path / "adapters", read_shape(base)), out, config=base)
    said = capsys.readouterr().err
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    taken = any(bool(p.any()) for key, p in loaded.named_parameters() if ".experts." in key and "lora_B" in key)
    assert taken == (name != "hy_v3")
    assert taken is not ("leaves out the adapters of routed experts" in said and "--merge" in said)


# Adapters go with the model that they were trained beside, and with no other of its sizes.
def changed(source: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A copy of the folder with other numbers."""
    folder.mkdir()
    tensors = {name: change(name, tensor) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gpt_oss", "qwen3_5_moe_stacked"])
def test_a_copy_has_the_same_digest_in_other_files_dtypes_or_either_kind(name: str, tmp_path: Path) -> None:
    save_model(name, source := tmp_path / "hf")
    convert.hf_to_megatron(source, tmp_path / "megatron", shard_bytes=30_000)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "half", dtype=DType.BF16, shard_bytes=20_000)
    wanted = base_digest(source)
    assert base_digest(tmp_path / "megatron") == base_digest(tmp_path / "half") == wanted


def test_draft_layers_are_no_part_of_it(tmp_path: Path) -> None:
    save_with_drafts("deepseek_v3", source := tmp_path / "hf")
    draft = f"model.layers.{read_shape(source).num_layers}."
    other = changed(source, tmp_path / "other", lambda name, tensor: tensor + 1 if name.startswith(draft) else tensor)
    assert base_digest(other) == base_digest(source)


@pytest.mark.parametrize("kind", ["q_proj", "down_proj", "embed_tokens", "layernorm"])
def test_a_merge_with_another_model_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model("qwen3_moe", source := tmp_path / "hf")
    other = changed(source, tmp_path / "other", lambda name, tensor: tensor * 1.02 if kind in name else tensor)
    shape, digest = read_shape(source), base_digest(source)
    adapters, older = (save_adapters(tmp_path / "new", shape, digest), save_adapters(tmp_path / "older", shape))
    merge_adapters(adapters, source, tmp_path / "merged")
    with pytest.raises(CheckpointError, match=rf"new holds adapters of another model than {other}: .* {digest}, and"):
        merge_adapters(adapters, other, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    run(older, tmp_path / "taken", config=other, merge=True)
    assert "does not say with which model its adapters were trained" in capsys.readouterr().err


def test_pefts_folder_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of configuration and tokenizer alone is taken, with a note: there is nothing to compare."""
    save_model("qwen3_moe", source := tmp_path / "hf")
    other = changed(source, tmp_path / "other", lambda name, tensor: tensor * 1.02 if "q_proj" in name else tensor)
    (bare := tmp_path / "bare").mkdir()
    (bare / "config.json").write_text((source / "config.json").read_text())
    adapters = save_adapters(tmp_path / "adapters", read_shape(source), base_digest(source))
    run(adapters, tmp_path / "taken", config=source)
    assert "note" not in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=f"adapters holds adapters of another model than {other}: "):
        run(adapters, tmp_path / "refused", config=other)
    assert not (tmp_path / "refused").exists()
    run(adapters, tmp_path / "noted", config=bare)
    assert f"note: {bare} has no weights to compare with" in capsys.readouterr().err


def test_a_checkpoint_of_an_older_version_is_read(tmp_path: Path) -> None:
    tmp_path.joinpath("lora.json").write_text('{"rank":4,"expert_rank":null,"alpha":8.0,"targets":["attention"]}')
    held = stored_lora(tmp_path)
    assert (held.rank, held.base) == (4, None)


# Folders as they are published or fetched: each refusal has what helps.
def test_a_misfit_names_the_key_that_describes_it() -> None:
    wanted = {"lm_head.weight": (61, 8), "model.embed_tokens.weight": (61, 8), "model.layers.0.a": (3,)}
    given = {"model.embed_tokens.weight": (64, 8), "model.layers.0.a": (3,), "model.layers.1.a": (3,), "x": (1,)}
    with pytest.raises(WeightError) as raised:
        raise_misfits("m", given, wanted)
    lines = sorted(str(raised.value).splitlines()[1:])
    keys = "mtp_num_hidden_layers, num_mtp_modules, num_nextn_predict_layers"
    assert [line.strip().partition("; ")[2] for line in lines] == [
        "it should have shape (61, 8); if it is the embedding, set tie_word_embeddings=true in config.json",
        "it should have (61, 8); set vocab_size=64 in config.json to keep all rows",
        f"the model has no such tensor; for a draft layer, config.json has a number of them above 0 ({keys})",
        "the model has no such tensor",
    ]


def test_rows_beyond_the_vocabulary_are_counted_unless_they_are_padding(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert dropped_tensors(tmp_path / "megatron") is None
    key, path = "embedding.word_embeddings.weight", tmp_path / "megatron/config.json"
    config = json.loads(path.read_text())
    size, padded = config["vocab_size"], read_index(tmp_path / "megatron")[0][key][0]
    assert padded > size, "rows of 0"
    path.write_text(json.dumps({**config, "vocab_size": size - 3}))
    said = dropped_tensors(tmp_path / "megatron")
    assert said is not None
    assert said.startswith(f"{key}: 3 of its {padded} rows are not 0 and beyond vocab_size={size - 3}; the new folder ")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    held = {name: len(one) for name, one in load_file(tmp_path / "back/model.safetensors").items()}
    assert held["model.embed_tokens.weight"] == size - 3


def test_scales_of_a_quantised_cache_are_left_aside_and_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    ends = ("self_attn.k_scale", "self_attn.v_proj.output_scale", "self_attn.attn.v_scale", "self_attn.k_proj.k_scale")
    scales = {f"model.layers.{i}.{end}": torch.ones(1) for i in range(4) for end in ends}
    save_file({**tensors, **scales}, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    said = "k_scale, output_scale, v_scale: scales of a quantized KV cache; the new folder has none"
    assert dropped_tensors(tmp_path / "hf") == said
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert not [*verify(tmp_path / "megatron", against=tmp_path / "hf")]


def test_scales_by_another_formats_name_are_named() -> None:
    scheme = Scheme(dtype=DType.BF16, stored=DType.F8_E4M3, scales=(".weight_scale_inv",), edges=(4, 4))
    held = {"a.weight": (DType.F8_E4M3, (8, 8)), "a.weight_scale": (DType.F32, (2, 2))}
    _, _, (line,) = find_quantized(held, scheme)
    assert line.endswith("there is no a.weight_scale_inv; a.weight_scale is there, which the format does not read")


def test_shards_without_their_hidden_index_are_no_other_kind(megatron: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(megatron, tmp_path / "copy", ignore=lambda _, names: [n for n in names if n[0] == "."])
    for reads in (describe, is_megatron, lambda folder: run(folder, tmp_path / "out")):
        with pytest.raises(
            CheckpointError, match=r"it has shards \(\*\.distcp\) and no \.metadata; copy that file too"
        ):
            reads(copy)


def test_a_folder_of_adapters_is_told_how_to_be_merged(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for reads in (read_shape, is_megatron, weight_files):
        with pytest.raises(
            RLMegatronError, match=r"it has peft's adapters alone; give .*, or merge them by peft: Peft"
        ):
            reads(tmp_path)


@pytest.mark.parametrize(
    ("name", "named"),
    [("Qwen/Qwen3-0.6B", True), ("/Qwen/a", False), ("a/b/c", False), ("a", False), ("is/here", False)],
)
def test_a_name_of_the_hub_is_told_how_to_be_fetched(
    name: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "is/here").mkdir(parents=True)
    for reads in (lambda: read_shape(Path(name)), lambda: model_shape(name), lambda: run(Path(name), Path("out"))):
        with pytest.raises(RLMegatronError) as raised:
            reads()
        said, fetch = (
            str(raised.value),
            "to download a model of the hub: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B",
        )
        assert said.endswith(f"; {fetch}") if named else "hf download" not in said


def test_printed_commands_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model("llama", tmp_path / "a model")
    (tmp_path / "a model/tokenizer.json").write_text("{}")
    run(tmp_path / "a model", tmp_path / "it's b")
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    out, source = str(tmp_path / "it's b"), str(tmp_path / "a model")
    assert shlex.split(lines["check it"]) == ["rl-megatron", "convert", out, "--verify", "--against", source]
    assert shlex.split(lines["train it"]) == ["rl-megatron", "train", f"model.path={out}", "..."]
