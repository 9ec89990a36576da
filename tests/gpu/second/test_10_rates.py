"""Rates of pushes, checksums and log-probs, and what makes the host wait in a step. 90 seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gpu import branch, experts, sizes
from tests.gpu.machine import Machine, note

pytestmark = pytest.mark.gpu


def test_pushes_checksums_and_log_probs(machine: Machine, tmp_path: Path) -> None:
    seen = machine.seen(tmp_path, {"push": (sizes.push_main, branch.BFLOAT16, machine.pretended)})["push"]
    for what in ("push, verify=false", "push, verify=true", "checksums"):
        note(f"{what}: {seen['tensors']} tensors", f"{seen['bytes'] / seen[what] / 1e9:.3g} GB/s")
    note(f"log-probs of {seen['positions']} positions, forward and backward", f"{seen['log-probs'] * 1e3:.1f} ms")
    assert min(seen[what] for what in ("push, verify=false", "push, verify=true", "checksums", "log-probs")) > 0


@pytest.mark.parametrize("layers", ["torch", "transformer_engine"])
@pytest.mark.parametrize("length", [512, 4096])
def test_steps_of_packed_sequences(length: int, layers: str, machine: Machine, tmp_path: Path) -> None:
    if layers != "torch" and (machine.pretended or importlib.util.find_spec(layers) is None):
        pytest.skip("no TransformerEngine here")
    tokens = 256 if machine.pretended else 16384
    each = length // 64 if machine.pretended else length
    keys = {**branch.BFLOAT16, "layers": layers, "recompute": {"uniform": 1}, "max_tokens_per_micro_batch": tokens}
    seen = machine.seen(tmp_path, {"step": (sizes.step_main, keys, tokens, each, machine.pretended)})["step"]
    what = f"{tokens // each} sequences of {each}, layers={layers}"
    note(f"step of {what}", f"{tokens / seen['step']:.0f} tokens/s")
    note(f"forward of {what}", f"{tokens / seen['score']:.0f} tokens/s")
    waits = ", ".join(f"{line} {count}" for line, count in list(seen["waits"].items())[:8])
    note(f"waits of the host in that step: {sum(seen['waits'].values())}", waits or "none")


def test_experts_in_one_call_are_those_one_by_one(machine: Machine, tmp_path: Path) -> None:
    seen = machine.seen(tmp_path, {"experts": (experts.experts_main, branch.BFLOAT16, machine.pretended)})["experts"]
    assert seen["without rows"] > 0
    for name in experts.NAMES:
        note(f"experts {name}, forward and backward", f"{seen[name]['seconds'] * 1e3:.1f} ms")
        assert seen[name]["far"] < 0.02, name
