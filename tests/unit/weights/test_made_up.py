"""Random weights instead of a checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_megatron.models.tiny import TinySizes, tiny_shape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.checkpoints.made_up import STD, MadeUp
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import family_of, hf_layout
from rl_megatron.weights.layouts.layout import Layout

SHAPE = (48, 96, 160)


def test_values_are_uniform_and_of_the_deviation_that_models_start_with() -> None:
    whole = MadeUp(Path("m"), {"w.weight": (1200, 1000)}, 3).read("w.weight", ((0, 1200), (0, 1000)))
    assert float(whole.mean()) == pytest.approx(0, abs=4 * STD / 1200_000**0.5)
    assert float(whole.std()) == pytest.approx(STD, rel=2e-3)
    shares = torch.histc(whole, 20) / whole.numel()
    assert shares.tolist() == pytest.approx([0.05] * 20, abs=2e-3)
    beside = torch.corrcoef(torch.stack([whole[:, :-1].reshape(-1), whole[:, 1:].reshape(-1)]))
    below = torch.corrcoef(torch.stack([whole[:-1].reshape(-1), whole[1:].reshape(-1)]))
    assert float(beside[0, 1]) == pytest.approx(0, abs=4e-3)
    assert float(below[0, 1]) == pytest.approx(0, abs=4e-3)


def test_a_box_is_that_part_of_the_whole_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MadeUp(Path("m"), {"e.weight": SHAPE}, 3)
    whole = made.read("e.weight", whole_box(SHAPE))
    monkeypatch.setattr("rl_megatron.weights.checkpoints.made_up._BAND", 1000)
    for box in (((3, 17), (0, 96), (5, 160)), ((47, 48), (95, 96), (159, 160)), whole_box(SHAPE)):
        assert torch.equal(made.read("e.weight", box), whole[tuple(slice(*edge) for edge in box)])


def test_another_seed_or_name_gives_other_values_and_a_place_past_32_bits_has_its_own() -> None:
    shapes = {"a": (2**18, 2**15), "b": (2**18, 2**15)}
    low, high = ((0, 4), (0, 64)), ((2**17, 2**17 + 4), (0, 64))
    one, other = MadeUp(Path("m"), shapes, 3), MadeUp(Path("m"), shapes, 4)
    drawn = [one.read("a", low), one.read("b", low), other.read("a", low), one.read("a", high)]
    assert len({tuple(values.view(-1).tolist()) for values in drawn}) == 4


def test_norms_are_one_and_biases_zero() -> None:
    made = MadeUp(Path("m"), {"model.norm.weight": (8,), "q_proj.bias": (8,)}, 0)
    assert made.read("model.norm.weight", ((2, 5),)).tolist() == [1, 1, 1]
    assert made.read("q_proj.bias", ((2, 5),)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dims", [ParallelDims(tp=2, dp=2, ep=2, etp=2), ParallelDims(pp=2, dp=2, ep=2)])
def test_every_rank_holds_what_it_would_read_from_a_file_of_the_same_values(tmp_path: Path, dims: ParallelDims) -> None:
    shape = tiny_shape(TinySizes())
    hf, layout = hf_layout(shape), Layout(table=family_of(shape).tables["megatron"], shape=shape, dims=dims)
    made, sizes = MadeUp(tmp_path, hf.local_shapes(0), 0), hf.local_shapes(0)
    save_file({name: made.read(name, whole_box(size)) for name, size in sizes.items()}, tmp_path / "model.safetensors")
    written = HFFolder(tmp_path)
    for rank in range(dims.world_size):
        ours, theirs = ({name: torch.empty(n) for name, n in layout.local_shapes(rank).items()} for _ in range(2))
        read_boxes(made, hf, layout, rank, ours)
        read_boxes(written, hf, layout, rank, theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
