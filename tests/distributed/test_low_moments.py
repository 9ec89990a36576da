"""Moments in bfloat16 by TransformerEngine's own FusedAdam, with kernels in torch, on a pretended GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rl_megatron.config.run import RunConfig
from tests.distributed import low_moments
from tests.distributed.pretended import te
from tests.distributed.pretended.ranks import World, run_worlds
from tests.distributed.test_kept import MOE
from tools.planner.memory import footprints

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
    most = {"bfloat16": 2**-9, "float32": 1e-5}  # where a sum rounds otherwise
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


def test_a_resume_continues_and_may_change_the_dtype(seen: Any) -> None:
    same, to_float32, to_bfloat16 = seen["resumed"]
    assert same == seen["bfloat16"]["next"]
    assert to_float32[0] == seen["bfloat16"]["next"][0]
    rounded = 2**-8  # bfloat16 rounds both moments by at most 2^-9, which moves a step by less than that together
    assert to_float32[1] == pytest.approx(seen["bfloat16"]["next"][1], rel=rounded)
    assert to_bfloat16[0] == seen["float32"]["next"][0]
    assert to_bfloat16[1] == pytest.approx(seen["float32"]["next"][1], rel=rounded)


def test_a_resumed_run_has_its_own_settings_and_only_matrices_decay(seen: Any) -> None:
    assert seen["settings"] == [[0.0, 0.7], [0.5, 0.7]]


def test_it_steps_in_pieces_and_leaves_the_gpu_and_is_saved_meanwhile_to_the_same_bits(seen: Any) -> None:
    assert seen["parked"] == seen["bfloat16"]["next"]


def test_where_ranks_change_the_state_stays(root: Path) -> None:
    before, after = state(root / "by two"), state(root / "by one")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def state(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of the optimizer in a checkpoint."""
    found = _load_state_dict_from_keys(checkpoint_id=folder)
    return {name: tensor for name, tensor in found.items() if name.startswith("optimizer.state.")}
