"""Versions, megatron-core's import, `doctor`, and a matrix product in each dtype. 20 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.machine import REPO, Machine, note

pytestmark = pytest.mark.gpu
PRODUCT = """
import torch
import megatron.core
print("megatron-core", megatron.core.__version__)
torch.backends.cuda.matmul.allow_tf32 = False
g = torch.Generator().manual_seed(0)
a, b = torch.randn(2, 512, 512, generator=g, dtype=torch.float64)
for dtype, most in ((torch.float32, 1e-3), (torch.bfloat16, 1.0)):
    found = (a.to("cuda", dtype) @ b.to("cuda", dtype)).double().cpu()
    wanted = a.to(dtype).double() @ b.to(dtype).double()
    error = float((found - wanted).abs().max())
    print(dtype, error)
    assert error < most
"""


def test_ranks_import_the_checkouts_tests(machine: Machine, tmp_path: Path) -> None:
    """An installed package named tests, which has an __init__.py, would be theirs: uninstall it."""
    found = machine.command("-c", "import tests; print(*tests.__path__, sep='\\n')", folder=tmp_path)
    assert found.splitlines() == [str(REPO / "tests")]


def test_megatron_is_imported_and_products_are_right(on_gpu: Machine, tmp_path: Path) -> None:
    note("installation", on_gpu.command("-c", PRODUCT, folder=tmp_path).strip().replace("\n", "; "))


def test_doctor_says_what_there_is(machine: Machine, tmp_path: Path) -> None:
    said = machine.command("-m", "launcher", "doctor", folder=tmp_path)
    assert "learner: can be imported" in said
    if not machine.pretended:
        assert torch.cuda.get_device_name(0) in said
