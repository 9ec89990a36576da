"""Moments in bfloat16 and float8 by TransformerEngine's own FusedAdam, with kernels in torch, on a pretended GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rl_megatron.config.run import RunConfig
from rl_megatron.scaling.memory import footprints
from tests.distributed import low_moments
from tests.distributed.pretended import te
from tests.distributed.pretended.ranks import World, run_worlds
from tests.distributed.test_kept import MOE

pytestmark = pytest.mark.skipif(not (te.FOLDER / ".installed").exists(), reason="needs `make .venv/te/.installed`")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("moments")
    by_two = World(main=low_moments.two_ranks_main, size=2, arguments=(root,))
    run_worlds([by_two, World(main=low_moments.rank_main, size=1, arguments=(root,))], before=te.load)
    return root


@pytest.fixture(scope="module")
def seen(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "rank0.json").read_text())
    return found


@pytest.mark.parametrize("moments", low_moments.KEPT)
def test_it_steps_as_torchs_adamw_whose_moments_are_rounded_after_each_step(moments: str, seen: Any) -> None:
    """One parameter has no gradient, so its moments are zeros."""
    apart = seen[moments]["apart"]
    assert apart["moved"] > low_moments.RATE
    most = {"bfloat16": 2**-9, "float32": 1e-5, "float8": 2**-5}  # where a sum rounds otherwise
    assert apart["apart"] < most[moments]
    assert apart["further"] < 1e-3
    assert apart["unequal"] < 1e-3  # of the model's, in bfloat16


def test_written_weights_are_adopted(seen: Any) -> None:
    assert seen["adopted"] == [True] * len(seen["adopted"])


def test_its_state_has_the_planned_bytes(seen: Any) -> None:
    for moments in low_moments.KEPT:
        config = RunConfig(learner=low_moments.learner(moments))
        (planned,) = {m.terms["optimizer"] for m in footprints(config, MOE)}
        assert sum(seen[moments]["held"].values()) == pytest.approx(planned, rel=0.02)
    each = seen["float32"]["held"]["torch.float32"] // 12  # parameters
    assert seen["bfloat16"]["held"] == {"torch.float32": 4 * each, "torch.bfloat16": 4 * each}
    float8 = seen["float8"]["held"]
    assert float8["torch.uint8"] == each
    assert float8["torch.bfloat16"] == 2 * each
    assert 0 < float8["torch.float32"] - 4 * each < 0.03 * each  # a scale a tensor


def test_a_resume_continues_and_may_change_the_dtype(seen: Any) -> None:
    same, to_float32, to_bfloat16, same_float8, from_float8 = seen["resumed"]
    assert same_float8 == seen["float8"]["next"]
    assert from_float8[0] == seen["float8"]["next"][0]
    assert from_float8[1] == pytest.approx(seen["float8"]["next"][1], rel=1e-2)
    assert same == seen["bfloat16"]["next"]
    assert to_float32[0] == seen["bfloat16"]["next"][0]
    rounded = 2**-8  # bfloat16 rounds both moments by at most 2^-9, which moves a step by less than that together
    assert to_float32[1] == pytest.approx(seen["bfloat16"]["next"][1], rel=rounded)
    assert to_bfloat16[0] == seen["float32"]["next"][0]
    assert to_bfloat16[1] == pytest.approx(seen["float32"]["next"][1], rel=rounded)


def test_a_resumed_run_has_its_own_settings_and_only_matrices_decay(seen: Any) -> None:
    assert seen["settings"] == [[0.0, 0.7], [0.5, 0.7]]


def test_it_steps_in_pieces_and_leaves_the_gpu_and_is_saved_meanwhile_to_the_same_bits(seen: Any) -> None:
    assert seen["parked"] == {moments: seen[moments]["next"] for moments in ("bfloat16", "float8")}


def test_where_ranks_change_the_least_of_a_float8_tensor_may_become_0_and_nothing_else_changes(root: Path) -> None:
    """Two ranks' parts of a tensor have one scale then, that of the larger."""
    before, again, after = (state(root / folder) for folder in ("by two", "by two again", "by one"))
    assert before.keys() == after.keys()
    assert all(torch.equal(was, again[name]) for name, was in before.items())
    lost = 0
    for name, was in before.items():
        changed = was != after[name]
        if "exp_avg." in name:
            assert not after[name][changed].any()
            assert not changed.any() or was[changed].abs().max() <= was.abs().max() / 14336
            lost += int(changed.sum())
        else:
            assert not changed.any()
    assert lost


def state(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of the optimizer in a checkpoint."""
    found = _load_state_dict_from_keys(checkpoint_id=folder)
    return {name: tensor for name, tensor in found.items() if name.startswith("optimizer.state.")}
