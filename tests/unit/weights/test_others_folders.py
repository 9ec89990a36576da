"""Folders that are not ours to the letter: which checkpoint in them is read, and what is refused of another model."""

from __future__ import annotations

import enum
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_megatron.errors import CheckpointError, RLMegatronError, WeightError
from rl_megatron.models.tiny import TinySizes, make_tiny_model, tiny_shape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.kind import newest_in
from rl_megatron.weights.checkpoints.megatron import copies_between
from rl_megatron.weights.checkpoints.megatron_names import find_homes
from rl_megatron.weights.checkpoints.torch_dist import Chunk, read_index, write_index, write_tensor
from rl_megatron.weights.checkpoints.verify import verify
from rl_megatron.weights.layouts.families import megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Piece

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
    assert newest_in(saved(tmp_path / "lm", *steps, newest="9\n")) == tmp_path / "lm/iter_0000009"
    assert newest_in(saved(tmp_path / "slime", *steps, "release", newest="release")) == tmp_path / "slime/release"
    assert newest_in(saved(tmp_path / "one", steps[1])) == tmp_path / "one/iter_0000010"
    assert newest_in(tmp_path / "lm/iter_0000010") == tmp_path / "lm/iter_0000010"
    assert newest_in(tmp_path) == tmp_path


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
        newest_in(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1}, r"linear_qkv.weight has shape \(2, 128, 32\); it should have \(1, 128, 32\)"),
        (
            {"moe_intermediate_size": 8},
            r"linear_fc1.weight has shape \(2, 2, 32, 32\); it should have \(2, 2, 16, 32\)",
        ),
        ({"vocab_size": 5000}, r"embedding.word_embeddings.weight has shape \(264, 32\); it should have \(5000, 32\)"),
        ({"tie_word_embeddings": True}, r"output_layer.weight \(264, 32\) is unknown; the model has no such tensor"),
        ({"num_hidden_layers": 3}, r"linear_qkv.weight has shape \(2, 128, 32\); it should have \(3, 128, 32\)"),
    ],
)
def test_a_config_of_another_size_is_refused(
    change: dict[str, object], message: str, megatron: Path, tmp_path: Path
) -> None:
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
    homes = find_homes(megatron, layout, {**sizes, **state}, dtypes)
    assert {home.key for found in homes.values() for home in found} == sizes.keys()
    adapter = "decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight"
    with pytest.raises(WeightError, match=rf"{adapter} \(2, 8\) is unknown"):
        find_homes(megatron, layout, {**sizes, adapter: (2, 8)}, dtypes)
    with pytest.raises(WeightError, match=r"is a critic's: one value of a token.* give the policy's, .*/learner in"):
        find_homes(megatron, layout, {**sizes, "output_layer.weight": (1, 32), "output_layer.bias": (1,)}, dtypes)
    norm = "decoder.final_layernorm.weight"
    with pytest.raises(WeightError, match=rf"{norm} is uint8; weights are one of float64, float32"):
        find_homes(megatron, layout, sizes, {**dtypes, norm: DType.U8})
    with pytest.raises(WeightError, match=rf"lacks {norm}; its config.json"):
        find_homes(megatron, layout, {key: size for key, size in sizes.items() if key != norm}, dtypes)
    other = replace(layout, vocab_multiple=128)
    assert find_homes(megatron, other, sizes, dtypes) == homes


@pytest.mark.parametrize("odd", [DType.F16, DType.F32])
def test_parts_of_one_tensor_in_several_dtypes_are_refused(odd: DType, tmp_path: Path) -> None:
    """As a family of one's own may divide it: float16's bits, as wide as bfloat16's, would have been read as those."""

    def row(name: str, start: int, stop: int) -> ParamSpec:
        band = (Piece(hf="fused", start=start, stop=stop),)
        return ParamSpec(name=name, bands=lambda _m, _d: (band,), others=lambda _m: (3,))

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


def test_an_index_of_an_older_python_is_read_and_an_attribute_of_anything_else_refused(
    megatron: Path, tmp_path: Path
) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        OlderPickler(file).dump(pickle.loads((megatron / ".metadata").read_bytes()))
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_index(tmp_path) == read_index(megatron)
    for of in (b"ccollections\nOrderedDict\n", b"cpathlib\nPosixPath\n", b"N"):
        (tmp_path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(" + of + b"V__globals__\ntR.")
        with pytest.raises(CheckpointError, match=r"getattr of .*, which is no enumeration"):
            read_index(tmp_path)
