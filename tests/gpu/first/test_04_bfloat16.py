"""Bfloat16, with and without recomputation, and every family's logits beside transformers' own. 60 seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.test_families import LENGTHS, make_samples
from tests.family_models import MODELS, save_model
from tests.gpu import branch
from tests.gpu.differences import largest, worst
from tests.gpu.first.test_03_float32 import REFERENCE
from tests.gpu.machine import Machine, note

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("bfloat16")
    samples = make_samples()
    names = ["qwen3_moe", "deepseek_v3"] if machine.pretended else [*MODELS]
    for name in names:
        model = save_model(name, root / name)
        with torch.no_grad():
            logits = torch.cat([model(x[None]).logits[0] for x in samples.input_ids.split(LENGTHS)])
        torch.save(logits, root / name / "logits.pt")
    again = {**branch.BFLOAT16, "recompute": {"uniform": 1}}
    calls = {
        "kept": (branch.policy_main, branch.BFLOAT16),
        "recomputed": (branch.policy_main, again),
        "families": (branch.family_main, branch.FLOAT32, names),
    }
    return machine.seen(root, calls)


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
    note("logits of families beside transformers, worst", f"{largest(seen['families'].values()):.1e}")
    for name, error in seen["families"].items():
        assert error < 1e-3, name
