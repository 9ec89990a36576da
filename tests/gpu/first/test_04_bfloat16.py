"""Bfloat16, with and without recomputation, and every family's logits beside transformers' own. 60 seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.types import Samples
from tests.family_models import MODELS, save_model
from tests.gpu import branch
from tests.gpu.differences import largest, worst
from tests.gpu.first.test_03_float32 import REFERENCE
from tests.gpu.machine import Machine, note
from tests.samples import TWO, two_sequences

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bfloat16")


@pytest.fixture(scope="module")
def seen(models: Path, machine: Machine) -> dict[str, Any]:
    root, samples = models, two_sequences()
    names = ["qwen3_moe", "deepseek_v3"] if machine.pretended else [*MODELS]
    rounded = {}
    for name in names:
        model = save_model(name, root / name)
        logits, narrow = (_logits(model.to(dtype), samples) for dtype in (torch.float32, torch.bfloat16))
        torch.save(logits, root / name / "logits.pt")
        rounded[name] = branch.usual(narrow, logits)
    again = {**branch.BFLOAT16, "recompute": {"uniform": 1}}
    calls = {
        "kept": (branch.policy_main, branch.BFLOAT16),
        "recomputed": (branch.policy_main, again),
        "families": (branch.family_main, branch.FLOAT32, names),
        "families in bfloat16": (branch.family_main, {"device": "cuda", "dtype": "bfloat16"}, names),
    }
    return {**machine.seen(root, calls, together=True), "transformers in bfloat16": rounded}


@torch.no_grad()
def _logits(model: Any, samples: Samples) -> Tensor:
    return torch.cat([model(x[None]).logits[0] for x in samples.input_ids.split(TWO)])


def test_bfloat16_is_float32_rounded(seen: Any) -> None:
    found, wanted = seen["kept"], REFERENCE["policy"]
    error = worst(found["logprobs"], wanted["logprobs"])
    losses = largest(a[0] - b[0] for a, b in zip(found["steps"], wanted["steps"], strict=True))
    norms = largest(a[1] / b[1] - 1 for a, b in zip(found["steps"], wanted["steps"], strict=True))
    note("bfloat16 beside float32", f"log-probs {error:.1e}, losses {losses:.1e}, norms {norms:.1e}")
    assert error < 0.3
    assert losses < 5e-3
    assert norms < 0.1


def test_recomputation_changes_nothing(seen: Any) -> None:
    """Atomic additions may round otherwise."""
    for a, b in zip(seen["recomputed"]["steps"], seen["kept"]["steps"], strict=True):
        assert a == pytest.approx(b, rel=1e-2, abs=1e-4)


def test_every_familys_logits_are_transformers_own(seen: Any) -> None:
    errors = seen["families"]["logits"]
    note("logits of families beside transformers, worst", f"{largest(errors.values()):.1e}")
    for name, error in errors.items():
        assert error < 1e-3, name


def test_in_bfloat16_a_familys_logits_are_as_near_as_transformers_own(seen: Any) -> None:
    """By the layers of real runs: TransformerEngine's where they are installed and support the family."""
    found, rounded = seen["families in bfloat16"]["usual"], seen["transformers in bfloat16"]
    ratios = {name: found[name] / rounded[name] for name in found}
    last = max(ratios, key=lambda name: ratios[name])
    note("bfloat16's error of logits beside that of transformers, worst family", f"{ratios[last]:.2f} times, {last}")
    assert all(0 < ratio < 2.5 for ratio in ratios.values()), ratios


def test_a_step_of_a_family_with_selection_biases_has_transformers_loss(models: Path, seen: Any) -> None:
    (name,) = branch.TRAINED
    wanted = torch.nn.functional.cross_entropy(torch.load(models / name / "logits.pt"), two_sequences().targets)
    assert seen["families"]["losses"][name] == pytest.approx(float(wanted), rel=1e-4)
