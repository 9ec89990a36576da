"""TransformerEngine's layers in bfloat16 beside torch's, saved and resumed, and from torch's checkpoint. 60 seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gpu import branch
from tests.gpu.differences import worst
from tests.gpu.machine import Machine, note

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no TransformerEngine here"),
]
TE = {**branch.BFLOAT16, "layers": "transformer_engine"}


def test_they_compute_what_torchs_do_and_resume_from_either(on_gpu: Machine, tmp_path: Path) -> None:
    saved = {name: tmp_path / f"saved-{name}" for name in ("te", "torch")}
    calls = {
        "te": (branch.policy_main, TE),
        "torch": (branch.policy_main, branch.BFLOAT16),
        "te saves": (branch.resumed_main, TE, saved["te"], False),
        "te resumes": (branch.resumed_main, TE, saved["te"], True),
        "torch saves": (branch.resumed_main, branch.BFLOAT16, saved["torch"], False),
        "te resumes torch's": (branch.resumed_main, TE, saved["torch"], True),
    }
    seen = on_gpu.seen(tmp_path, calls)
    error = worst(seen["te"]["logprobs"], seen["torch"]["logprobs"])
    note("TransformerEngine's layers beside torch's, bfloat16, log-probs", f"{error:.1e}")
    assert error < 0.5
    for a, b in zip(seen["te"]["steps"], seen["torch"]["steps"], strict=True):
        assert a == pytest.approx(b, rel=0.1, abs=0.02)
    assert seen["te resumes"]["steps"] == [pytest.approx(step, rel=1e-6) for step in seen["te saves"]["steps"]]
    torchs = seen["torch saves"]["steps"]
    assert seen["te resumes torch's"]["steps"] == [pytest.approx(step, rel=0.1, abs=0.02) for step in torchs]
