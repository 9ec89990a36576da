"""A run of adapters: what engines get, what checkpoints hold, and a resume, beside the formula and a run left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.weights.adapters.files import held_lora
from rl_megatron.weights.adapters.merging import merge_adapters
from tests.e2e.processes import PORTABLE, Place

GIVEN = (
    *("reward.function=my_rewards:even", "warm_start.steps=0", "eval.every=0", "train.lr_decay=none"),
    *("learner.lora.rank=4", "algorithm.kl.coefficient=0.01", "train.learning_rate=0.02", "checkpoint.every=1"),
)


def test_engines_get_merged_weights_and_a_resume_goes_on_to_the_bit(place: Place, tmp_path: Path) -> None:
    place.environment = PORTABLE
    whole, halves = place.fork("whole", *GIVEN, "train.steps=2"), place.fork("halves", *GIVEN, "train.steps=1")
    whole.finish()
    halves.finish()
    halves = place.fork("halves", *GIVEN, "train.steps=2", "--resume")
    halves.finish()
    rows, again = ([row for row in run.rows() if row["step"]] for run in (whole, halves))
    assert [row["grad_norm"] for row in again] == [row["grad_norm"] for row in rows]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[0]["kl/reference"] == pytest.approx(0, abs=1e-7)  # the reference is the policy without adapters
    assert rows[1]["kl/reference"] > 1e-6
    assert all(
        row["mismatch/logprob_abs_max"] < 1e-4 for row in rows
    )  # the engine samples from what the learner trains
    checkpoint = whole.folder / "checkpoints" / "step_000002" / "learner"
    assert held_lora(checkpoint) is not None
    base = load_file(whole.folder / "hf_start" / "model.safetensors")
    merge_adapters(checkpoint, whole.folder / "hf_start", tmp_path / "merged")
    merged, pushed = (
        load_file(f / "model.safetensors") for f in (tmp_path / "merged", whole.folder / "hf_step_000002")
    )
    assert merged.keys() == pushed.keys() == base.keys()
    for name in base:
        torch.testing.assert_close(merged[name], pushed[name], atol=1e-7, rtol=1e-6)
        assert torch.equal(pushed[name], base[name]) == (not name.endswith("_proj.weight")), name
