"""Moments in bfloat16 by TransformerEngine's own FusedAdam, whose kernels are in torch, on a pretended GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl_megatron.config.run import RunConfig
from rl_megatron.scaling.memory import footprints
from tests.distributed import low_moments
from tests.distributed.pretended import te
from tests.distributed.pretended.ranks import World, run_worlds
from tests.distributed.test_kept import MOE

pytestmark = pytest.mark.skipif(not (te.FOLDER / ".installed").exists(), reason="needs `make .venv/te/.installed`")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("moments")
    run_worlds([World(main=low_moments.rank_main, size=1, arguments=(root,))], before=te.load)
    found: dict[str, Any] = json.loads((root / "rank0.json").read_text())
    return found


@pytest.mark.parametrize("moments", ["bfloat16", "float32"])
def test_it_steps_as_torchs_adamw_whose_moments_are_rounded_after_each_step(moments: str, seen: Any) -> None:
    apart = seen[moments]["apart"]
    assert apart["moved"] > low_moments.RATE
    assert apart["apart"] < {"bfloat16": 2**-9, "float32": 1e-5}[moments]  # where a sum rounds otherwise
    assert apart["unequal"] < 1e-3  # of the model's, in bfloat16


def test_written_weights_are_adopted(seen: Any) -> None:
    assert seen["adopted"] == [True] * len(seen["adopted"])


def test_its_state_has_the_planned_bytes(seen: Any) -> None:
    for moments in ("bfloat16", "float32"):
        config = RunConfig(learner=low_moments.learner(moments))
        (planned,) = {m.terms["optimizer"] for m in footprints(config, MOE)}
        assert sum(seen[moments]["held"].values()) == pytest.approx(planned, rel=0.02)
    assert seen["bfloat16"]["held"] == {
        "torch.float32": seen["float32"]["held"]["torch.float32"] // 3,
        "torch.bfloat16": seen["float32"]["held"]["torch.float32"] // 3,
    }


def test_a_resume_continues_and_may_change_the_dtype(seen: Any) -> None:
    same, to_float32, to_bfloat16 = seen["resumed"]
    assert same == seen["bfloat16"]["next"]
    assert to_float32[0] == seen["bfloat16"]["next"][0]
    assert to_float32[1] == pytest.approx(seen["bfloat16"]["next"][1], rel=1e-3)
    assert to_bfloat16[0] == seen["float32"]["next"][0]
    assert to_bfloat16[1] == pytest.approx(seen["float32"]["next"][1], rel=1e-3)


def test_it_steps_in_pieces_and_leaves_the_gpu_and_is_saved_meanwhile_to_the_same_bits(seen: Any) -> None:
    assert seen["parked"] == seen["bfloat16"]["next"]
