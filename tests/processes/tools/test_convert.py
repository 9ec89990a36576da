"""Conversion against safetensors' and torch's own readers; plans and layouts as the tools print them."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_megatron.errors import CheckpointError, RLMegatronError, WeightError
from rl_megatron.features.lora.feature import LoraSection
from rl_megatron.features.lora.files import write_lora
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.bytes.bits import to_tensor
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.mapped import MappedFile
from rl_megatron.weights.checkpoints import convert, streaming, torch_dist
from rl_megatron.weights.checkpoints.megatron import stacked_place
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.checkpoints.torch_dist import Chunk, read_index, read_tensor, write_index
from rl_megatron.weights.formats import torch_pickle
from rl_megatron.weights.formats.hf_folder import _TOKENIZERS, companions, has_tokenizer
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.grouped_query import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from tests.family_models import save_model
from tests.unit.launcher.commands import status_of
from tools.convert import conversion
from tools.convert.inspection import _layers
from tools.convert.layouts import model_shape, parse_layout
from tools.convert.verify import print_problems, verify

ROOT = Path(__file__).parents[3]
SPEC = TinySizes(hidden_size=32, expert_width=24, num_layers=3, num_experts=4)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def hf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(replace(SPEC, tie_embeddings=request.param), tmp_path_factory.mktemp("models"), seed=4)


@pytest.fixture(scope="module")
def megatron(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("megatron") / "checkpoint"
    convert.hf_to_megatron(hf, out, shard_bytes=20_000)
    return out


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_torchs_own_reader_finds_the_tensors_that_megatron_holds(hf: Path, megatron: Path) -> None:
    shape = read_shape(hf)
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=shape)
    wanted = {name: torch.full(size, -1.0) for name, size in layout.local_shapes(0).items()}
    read_boxes(HFFolder(hf), Layout(table=HF_QWEN3_MOE, shape=shape), layout, 0, wanted)
    sizes, _ = read_index(megatron)
    state: dict[str, Any] = {key: torch.empty(size) for key, size in sizes.items()}
    dcp.load(state, checkpoint_id=str(megatron), no_dist=True)
    for name, tensor in wanted.items():
        key, index = stacked_place(name, shape)
        assert torch.equal(state[key][index], tensor), name
    assert sum(t.numel() for t in state.values()) == sum(t.numel() for t in wanted.values())
    assert len(list(megatron.glob("*.distcp"))) > 3


def test_there_and_back_is_the_same_checkpoint_to_the_bit(hf: Path, megatron: Path, tmp_path: Path) -> None:
    convert.megatron_to_hf(megatron, tmp_path / "back", shard_bytes=30_000)
    assert_equal(tensors(tmp_path / "back"), tensors(hf))
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(hf).keys()
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((hf / "config.json").read_text())
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (hf / name).read_bytes()


def test_a_dtype_is_converted_on_the_way_and_told_in_the_config(hf: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(hf, tmp_path / "half", dtype=DType.BF16)
    convert.megatron_to_hf(tmp_path / "half", tmp_path / "back")
    assert_equal(tensors(tmp_path / "back"), {name: t.bfloat16() for name, t in tensors(hf).items()})
    assert "bfloat16" in (tmp_path / "back/config.json").read_text()
    assert command(hf, tmp_path / "short", "--dtype", "bf16").returncode == 0
    assert read_index(tmp_path / "short") == read_index(tmp_path / "half")
    assert "'bf8' is unknown; one of: float32, " in command(hf, tmp_path / "other", "--dtype", "bf8").stderr


def test_a_dry_run_tells_what_a_conversion_writes(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (hf, tmp_path / "new/out", "--shard-gb", "0.00003", "--dtype", "bf16")
    told = command(*words, "--dry-run").stdout
    assert not list(tmp_path.iterdir())
    assert command(*words, "--part", "1/2").returncode == 0
    rest = command(*words, "--dry-run").stdout
    assert "holds a conversion with another files, dtype" in command(*words[:-2], "--dry-run").stderr
    monkeypatch.setattr(conversion, "disk_usage", lambda folder: SimpleNamespace(free=9000))
    assert f"{tmp_path / 'new'} has 9,000 bytes free; make room" in command(*words, "--dry-run").stderr
    assert command(*words).returncode == 0
    count = len(list((tmp_path / "new/out").glob("*.distcp")))
    values = sum(prod(size) for size in read_index(tmp_path / "new/out")[0].values())
    wanted = f"would write {words[1]}: megatron torch_dist, {count} files of weights, {values:,} values in bfloat16, "
    assert told.startswith(f"{wanted}{2 * values:,} bytes\n{tmp_path} has ")
    assert f"this command would write {count // 2} of them, " in rest


def test_a_text_models_part_of_the_config_has_the_dtype_that_was_written(tmp_path: Path) -> None:
    save_model("qwen3_5_moe", tmp_path / "hf")
    given = json.loads((tmp_path / "hf/config.json").read_text())
    told = {**given, "dtype": "float32", "text_config": {**given["text_config"], "dtype": "float32"}}
    (tmp_path / "hf/config.json").write_text(json.dumps(told))
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "half", dtype=DType.BF16)
    written = json.loads((tmp_path / "half/config.json").read_text())
    assert written["dtype"] == written["text_config"]["dtype"] == "bfloat16"
    assert {**written, "dtype": 0, "text_config": 0} == {**told, "dtype": 0, "text_config": 0}
    assert "torch_dtype" not in written


@pytest.mark.parametrize(
    ("part", "odd", "widened"),
    [
        ("layers.1.", torch.float32, "layers"),
        ("q_proj", torch.float32, "[qkv]_proj"),
        ("experts.2.up_proj", torch.float32, "(gate|up)_proj"),
        ("layers.0.self_attn.k_proj", torch.float16, "[qkv]_proj"),
    ],
)
def test_a_shared_tensor_is_the_widest(part: str, odd: torch.dtype, widened: str, hf: Path, tmp_path: Path) -> None:
    """Of all layers, and of the matrices that it joins; nothing is rounded. By torch's own reader."""
    mixed, shape = broken(hf, tmp_path / "mixed"), read_shape(hf)
    given = {name: t.to(odd if part in name else torch.bfloat16) for name, t in tensors(hf).items()}
    save_file(given, mixed / "model.safetensors")
    convert.hf_to_megatron(mixed, tmp_path / "megatron")
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=shape)
    wanted = {name: torch.full(size, -1.0) for name, size in layout.local_shapes(0).items()}
    read_boxes(HFFolder(mixed), Layout(table=HF_QWEN3_MOE, shape=shape), layout, 0, wanted)
    sizes, _ = read_index(tmp_path / "megatron")
    state: dict[str, Any] = {key: torch.empty(size) for key, size in sizes.items()}
    dcp.load(state, checkpoint_id=str(tmp_path / "megatron"), no_dist=True)
    for name, tensor in wanted.items():
        key, index = stacked_place(name, shape)
        assert torch.equal(state[key][index], tensor), name
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    wide = {name: t.float() if re.search(widened, name) else t for name, t in given.items()}
    assert_equal(tensors(tmp_path / "back"), wide)


def test_a_part_of_another_width_is_refused_not_cut() -> None:
    """numpy would keep the lower half of float32's bits."""
    fragment = streaming.Fragment(box=((0, 2),), source=lambda: np.zeros(2, "u4"), src_box=((0, 2),))
    one = streaming.Copy(name="w", shape=(3,), dtype=DType.BF16, fragments=(fragment,))
    for whole in (one, replace(one, shape=(2,))):  # in blocks, and straight from the source
        with pytest.raises(WeightError, match="w is bfloat16, but a part of it has 4 bytes an element"):
            list(whole.blocks(lambda n: None))


def broken(hf: Path, folder: Path) -> Path:
    shutil.copytree(hf, folder)
    return folder


def test_bad_input_is_named_and_leaves_nothing_that_looks_whole(hf: Path, tmp_path: Path) -> None:
    cut, wrong, extra = (broken(hf, tmp_path / name) for name in ("cut", "wrong", "extra"))
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    bent = tensors(hf)
    bent["model.norm.weight"] = torch.zeros(3)
    save_file(bent, wrong / "model.safetensors")
    save_file({**tensors(hf), "model.surprise": torch.zeros(1)}, extra / "model.safetensors")
    missing = broken(hf, tmp_path / "missing")
    (missing / "model.safetensors").unlink()
    cases = {
        cut: "model.safetensors is torn",
        wrong: r"model.norm.weight has shape \(3,\); it should have \(32,\)",
        extra: "model.surprise is unknown",
        missing: "it has neither model.safetensors.index.json nor model.safetensors",
    }
    for source, message in cases.items():
        with pytest.raises(RLMegatronError, match=message):
            convert.hf_to_megatron(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists; remove it"):
        convert.hf_to_megatron(hf, tmp_path / "there")


def test_torn_and_incomplete_megatron_checkpoints_are_named(megatron: Path, tmp_path: Path) -> None:
    torn = broken(megatron, tmp_path / "torn")
    largest = max(torn.glob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-3000])
    with pytest.raises(CheckpointError, match="torn"):
        convert.megatron_to_hf(torn, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    largest.unlink()
    with pytest.raises(CheckpointError, match=f"should be there are not: {largest.name}"):
        convert.megatron_to_hf(torn, tmp_path / "out")
    lost = broken(megatron, tmp_path / "lost")
    (lost / ".metadata").write_bytes((lost / ".metadata").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"\.metadata is torn"):
        convert.megatron_to_hf(lost, tmp_path / "out")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo gone",)


def test_a_pickle_that_would_run_code_is_refused(megatron: Path, tmp_path: Path) -> None:
    folder = broken(megatron, tmp_path / "evil")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"names (posix|os)\.system, which no checkpoint needs"):
        convert.megatron_to_hf(folder, tmp_path / "out")


def test_chunks_are_read_in_place(megatron: Path) -> None:
    _, chunks = read_index(megatron)
    chunk = max(chunks, key=lambda c: c.length)
    view = read_tensor(MappedFile(megatron / chunk.file), chunk)
    whole = torch.load(_part(megatron / chunk.file, chunk.start, chunk.length), weights_only=True)
    assert view.ctypes.data % 64 == 0
    assert np.array_equal(view, whole.numpy().view(np.uint32))


def one_index(folder: Path, offsets: list[int]) -> None:
    """Of a stack of so many layers' scalars, in the order of ``offsets``."""
    chunks = [
        Chunk(key="k", offsets=(at,), sizes=(1,), dtype=DType.F32, file="__0_0.distcp", start=0, length=8)
        for at in offsets
    ]
    write_index(folder, chunks, {"k": (max(offsets) + 1,)})


def test_an_index_is_read_in_time_that_grows_with_its_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at once, so a model of 100 layers of 1,000 experts takes seconds, not hours."""
    looked: list[object] = []

    class Counted(list[object]):
        def __iter__(self) -> Iterator[object]:
            for item in super().__iter__():
                looked.append(item)
                yield item

    def read(data: bytes, source: str) -> Any:
        whole = torch_pickle.read(data, source)
        whole.state_dict_metadata["k"].chunks = Counted(whole.state_dict_metadata["k"].chunks)
        return whole

    count = 300
    order = [7 * i % count for i in range(count)]
    one_index(tmp_path, order)
    monkeypatch.setattr(torch_dist, "torch_pickle", SimpleNamespace(read=read))
    assert [chunk.offsets for chunk in read_index(tmp_path)[1]] == [(at,) for at in order]
    assert len(looked) == count


def test_an_index_with_two_chunks_at_one_place_is_refused(tmp_path: Path) -> None:
    one_index(tmp_path, [0, 1, 1])
    with pytest.raises(CheckpointError, match=r"is torn \(3 chunks of k at 2 places\)"):
        read_index(tmp_path)


def _part(path: Path, start: int, length: int) -> Any:
    return io.BytesIO(path.read_bytes()[start : start + length])


def test_what_moves_bytes_needs_no_torch(hf: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tools.convert import conversion; "
        "from tools.convert import verify; "
        "there, back = Path(sys.argv[2]) / 'megatron', Path(sys.argv[2]) / 'back'; "
        "conversion.run(Path(sys.argv[1]), there); conversion.run(there, back); "
        "print(list(verify.verify(back, against=there)), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(hf), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[] False\n")


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``rl-megatron convert`` in this process: an interpreter takes a second to start."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = status_of("convert", *arguments)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def test_a_checkpoint_of_adapters_is_converted_without_a_size_of_files(tmp_path: Path) -> None:
    """Up to the model's config.json, which is none here."""
    learner, model = tmp_path / "learner", tmp_path / "model"
    for folder in (learner, model):
        folder.mkdir()
    (learner / ".metadata").write_bytes(b"")
    (learner / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    write_lora(learner, LoraSection(rank=4))
    (model / "config.json").write_text("{}")
    given = (learner, tmp_path / "out", "--config", model)
    assert "config.json: model_type=None is not supported" in command(*given).stderr
    for option in ("--shard-gb 1.0", "--dtype bfloat16"):
        assert f"{option}: adapters are written as they are stored" in command(*given, *option.split()).stderr


@pytest.mark.parametrize("name", _TOKENIZERS)
def test_a_vocabulary_of_any_kind_goes_with_the_weights_and_its_code(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenization_kimi.py").touch()
    assert not has_tokenizer(tmp_path)
    (tmp_path / name).touch()
    assert has_tokenizer(tmp_path)
    assert companions(tmp_path) == {tmp_path / name, tmp_path / "tokenization_kimi.py"}


def test_a_conversion_there_and_back_keeps_all_files_that_are_no_weights(hf: Path, tmp_path: Path) -> None:
    source = shutil.copytree(hf, tmp_path / "source")
    kept = {"LICENSE", "additional_chat_templates/tool_use.jinja", "encoding/tests/a.json", "1_Pooling/config.json"}
    left = {"pytorch_model.bin.index.json", "onnx/model.onnx", ".git/HEAD", ".cache/x", "__pycache__/a.pyc"}
    left |= {"old/config.json", "old/model.safetensors", "old/README.md", "old/sub/a.txt", "megatron/.metadata"}
    left |= {"runs/x/lock", "runs/x/config.yaml", "runs/x/log.txt", "megatron/README.md"}
    for name in (*kept, *left):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    convert.hf_to_megatron(source, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    before, after = ({str(p.relative_to(at)) for p in at.rglob("*") if p.is_file()} for at in (hf, tmp_path / "back"))
    assert after - {".conversion.json"} == before | kept
    assert all((tmp_path / "back" / name).read_text() == name for name in kept)


def test_a_disk_that_takes_no_more_is_told_and_the_conversion_goes_on_later(hf: Path, tmp_path: Path) -> None:
    """A limit on a file's size stands for the disk's end: the same write fails, with another number."""
    out = tmp_path / "out"
    words = [sys.executable, "-m", "launcher", "convert", str(hf), str(out)]
    limit = 20_000

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    full = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=small_disk)
    assert full.returncode == 1
    assert f"error: {tmp_path}/.out.partial: File too large; complete files stay there" in full.stderr
    assert not out.exists()
    assert subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert_equal(tensors(hf), {one.name: read_whole(one) for one in convert.hf_tensors(out)[0]})


def read_whole(one: streaming.Copy) -> Tensor:
    return torch.cat([to_tensor(block.copy(), one.dtype) for block in one.blocks(lambda n: None)]).view(one.shape)


def test_what_only_one_checkpoint_has_and_other_shapes_are_a_line_each(hf: Path, tmp_path: Path) -> None:
    changed = replace(SPEC, tie_embeddings=read_shape(hf).tie_embeddings, num_layers=2)
    other = make_tiny_model(replace(changed, expert_width=16), tmp_path, seed=4)
    one, two = tensors(hf), tensors(other)
    for folder, against in ((hf, other), (other, hf)):
        assert not print_problems(folder, against=against)
        lines = list(verify(folder, against=against))
        alone = {f"{name} is only in {hf}" for name in one.keys() - two.keys()}
        assert {line for line in lines if "only" in line} == alone
        sizes = {
            f"{name} is float32 {(*tensors(folder)[name].shape,)} here and float32 {(*tensors(against)[name].shape,)} "
            "in the other checkpoint"
            for name in one.keys() & two.keys()
            if one[name].shape != two[name].shape
        }
        assert len(sizes) == 2 * 4 * 3  # layers, experts, matrices
        assert {line for line in lines if "here" in line} == sizes
    assert list(verify(hf, against=hf)) == []
    said = command("--verify", other, "--against", hf).stdout.splitlines()
    assert said[0] == f"{other} and {hf} are different models: layers 2 and 3, expert width 16 and 24"
    assert len(said) == 1 + 4 + 2
    assert said[1].startswith("model.layers.2.input_layernorm.weight is only in ")
    assert re.fullmatch(r"and \d+ more", said[-2])


def test_the_command_converts_verifies_and_names_what_differs(hf: Path, tmp_path: Path) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert command(hf, megatron).returncode == 0
    assert command(megatron, back, "--shard-gb", "0.0001").returncode == 0
    sound = command("--verify", megatron, "--against", back)
    assert (sound.returncode, sound.stdout) == (0, f"{megatron}: no problems, compared with {back}\n")
    wrong = tensors(hf)
    wrong["model.norm.weight"][3] = torch.nan
    bent = broken(hf, tmp_path / "bent")
    save_file(wrong, bent / "model.safetensors")
    found = command("--verify", bent, "--against", megatron)
    assert found.returncode == 1
    assert "model.norm.weight: 1 of 32 values are NaN or infinite" in found.stdout
    assert "model.norm.weight: 2 of 128 bytes differ" in found.stdout
    flipped = broken(megatron, tmp_path / "flipped")
    data = bytearray((flipped / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (flipped / "__0_0.distcp").write_bytes(data)
    assert "Bad CRC-32" in command("--verify", flipped).stdout


LAYOUT = "megatron,tp=2,pp=2,ep=4,dp=2"


def inspect(layout: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command("qwen3-30b-a3b", "--inspect", "--layout", layout, *arguments)


def test_every_rank_and_its_parameters_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    told = inspect(LAYOUT).stdout
    assert "24–47" in told
    assert "96–127" in told
    one = inspect(LAYOUT, "--rank", "5").stdout
    for name, shape in parse_layout("x", LAYOUT, model_shape("qwen3-30b-a3b")).local_shapes(5).items():
        if "experts" not in name:
            assert name in one
            assert " × ".join(map(str, shape)) in one


def test_a_layout_that_a_model_cannot_have_is_refused_and_layers_of_stages_are_those_of_all_rows() -> None:
    refused = inspect("megatron,pp=7")
    assert refused.returncode == 1
    assert "does not divide 48 layers" in refused.stderr
    # Qwen3-Next has attention in each fourth layer alone.
    layout = parse_layout("x", "megatron,pp=24", model_shape("qwen3-next-80b-a3b"))
    assert [_layers(layout, stage) for stage in (0, 1, 23)] == ["0–1", "2–3", "46–47"]


# Plans of public models at cluster scale: balance, volume and cost of the plan itself.
def test_a_trillion_parameters_are_planned_in_few_calls_and_little_memory_without_torch() -> None:
    code = (
        "import resource, sys\n"
        "from tests.unit.weights.test_layout import layouts\n"
        "from rl_megatron.weights.plans.plan import plan\n"
        "learner, engines = layouts('kimi-k2', 'tp8')\n"
        "calls = [0]\n"
        "def count(*_): calls[0] += 1\n"
        "sys.setprofile(count)\n"
        "moves = plan(learner, engines, placement={r: 512 + r for r in range(256)})\n"
        "parts = [*moves.sends(17), *moves.receives(700)]\n"
        "sys.setprofile(None)\n"
        "print(calls[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(parts))\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) < 5e6  # 3.7e6
    assert int(said[1]) < 2 * 2**20  # KiB
