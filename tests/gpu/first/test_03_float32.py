"""One process in float32 with torch's layers, beside the CPU's stored numbers. 60 seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.gpu import branch
from tests.gpu.differences import largest, worst
from tests.gpu.machine import Machine, note
from tests.gpu.reference import FILE

pytestmark = pytest.mark.gpu
REFERENCE = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> dict[str, Any]:
    calls = {
        "policy": (branch.policy_main, branch.FLOAT32),
        "recomputed": (branch.policy_main, {**branch.FLOAT32, "recompute": {"uniform": 2}}, 2),
        "critic": (branch.critic_main, branch.FLOAT32),
    }
    return machine.seen(tmp_path_factory.mktemp("float32"), calls, together=True)


@pytest.mark.parametrize("name", ["policy", "recomputed"])
def test_scores_routes_and_five_steps_are_those_of_the_cpu(name: str, seen: Any) -> None:
    found, wanted = seen[name], REFERENCE["policy"]
    assert found["device"] == "cuda:0"
    assert found["inputs"] == pytest.approx(wanted["inputs"], rel=1e-8), "other weights than those of reference.json"
    assert found["routes"] == wanted["routes"]
    error = {part: worst(found[part], wanted[part]) for part in ("logprobs", "logits")}
    for part, most in (("logprobs", 1e-4), ("logits", 1e-3)):
        assert error[part] < most, part
    pairs = list(zip(found["steps"], wanted["steps"], strict=False))
    losses, norms = (largest(a[i] / b[i] - 1 for a, b in pairs) for i in range(2))
    note(
        f"float32, {name}, beside the CPU", f"log-probs {error['logprobs']:.1e}, losses {losses:.1e}, norms {norms:.1e}"
    )
    assert losses < 1e-5
    assert norms < 1e-4


def test_a_critics_values_and_steps_are_those_of_the_cpu(seen: Any) -> None:
    found, wanted = seen["critic"], REFERENCE["critic"]
    assert worst(found["values"], wanted["values"]) < 1e-4
    for a, b in zip(found["steps"], wanted["steps"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_these_are_numbers_of_this_code(machine: Machine) -> None:
    """A change of the learner's numbers must change reference.json: CI computes it again (test_gpu_kit.py)."""
    assert len(REFERENCE["policy"]["steps"]) == branch.STEPS
    assert machine.pretended or torch.cuda.is_available()
