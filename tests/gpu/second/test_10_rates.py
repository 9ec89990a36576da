"""Rates of pushes, checksums and log-probs, and what makes the host wait in a step. 90 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import branch, sizes
from tests.gpu.machine import Machine, note

pytestmark = pytest.mark.gpu


def test_pushes_checksums_and_log_probs(machine: Machine, tmp_path: Path) -> None:
    calls = {"push": (sizes.push_main, branch.BFLOAT16, machine.pretended)}
    seen = machine.seen(tmp_path, calls)["push"]
    for what in ("push, verify=false", "push, verify=true", "checksums"):
        note(f"{what}: {seen['tensors']} tensors", f"{seen['bytes'] / seen[what] / 1e9:.3g} GB/s")
    note(f"log-probs of {seen['positions']} positions, forward and backward", f"{seen['log-probs'] * 1e3:.1f} ms")
    assert min(seen[what] for what in ("push, verify=false", "push, verify=true", "checksums", "log-probs")) > 0


@pytest.mark.parametrize("length", [512, 4096])
def test_steps_of_packed_sequences(length: int, machine: Machine, tmp_path: Path) -> None:
    tokens = 256 if machine.pretended else 16384
    each = length // 64 if machine.pretended else length
    keys = {**branch.BFLOAT16, "recompute": {"uniform": 1}, "max_tokens_per_micro_batch": tokens}
    calls = {"step": (sizes.step_main, keys, tokens, each, machine.pretended)}
    seen = machine.seen(tmp_path, calls)["step"]
    note(f"step of {tokens // each} sequences of {each}", f"{tokens / seen['step']:.0f} tokens/s")
    note(f"forward of {tokens // each} sequences of {each}", f"{tokens / seen['score']:.0f} tokens/s")
    waits = ", ".join(f"{line} {count}" for line, count in list(seen["waits"].items())[:8])
    note(f"waits of the host in that step: {sum(seen['waits'].values())}", waits or "none")
