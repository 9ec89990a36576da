"""Memory of a step of four layers of Qwen3-30B-A3B beside the plan's, at 8,192 tokens. 60 seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB
from rl_megatron.training.flops import find_peak, training_flops
from tests.gpu import branch, sizes
from tests.gpu.machine import Machine, note, versions
from tools.planner.memory import footprints

pytestmark = pytest.mark.gpu
SHORT = {"max_prompt_tokens": 8, "max_new_tokens": 8}  # of an engine that is not there
TE = {"layers": "transformer_engine"}
CASES: Mapping[str, Mapping[str, Any]] = {
    "all kept": {},
    "layers recomputed": {"recompute": {"uniform": 1}},
    "TransformerEngine's layers": TE,
    "TransformerEngine's layers, activations on the host": {**TE, "offload": {"activations": ["attention", "moe"]}},
    "TransformerEngine's layers, float8 by block": {**TE, "fp8": "blockwise"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_holds_what_is_planned(name: str, machine: Machine, tmp_path: Path) -> None:
    if "layers" in CASES[name] and (machine.pretended or importlib.util.find_spec("transformer_engine") is None):
        pytest.skip("no TransformerEngine here")
    tokens = 256 if machine.pretended else 8192
    keys: dict[str, Any] = {**branch.BFLOAT16, **CASES[name], "max_tokens_per_micro_batch": tokens}
    seen = machine.seen(tmp_path, {"step": (sizes.step_main, keys, tokens, tokens, machine.pretended)})["step"]
    shape = sizes.shape_of(machine.pretended)
    (planned,) = footprints(RunConfig.model_validate({"learner": keys, "rollout": SHORT}), shape)
    terms = {term: held for term, held in planned.terms.items() if term not in ("reserved", "weight push", "engine")}
    told = ", ".join(f"{term} {held / GB:.2f}" for term, held in terms.items() if held > 1e7)
    found, wanted = seen["bytes"], sum(terms.values())
    note(f"memory of a step of {tokens} tokens, {name}", f"{found / GB:.2f} GB; planned {wanted / GB:.2f} ({told})")
    note(f"reserved by torch's allocator, {name}", f"{seen['reserved'] / GB:.2f} GB")
    for kernel, milliseconds in seen["kernels"].items():
        note(f"kernel, {name}: {kernel}", f"{milliseconds:.1f} ms")
    speed, peak = training_flops(shape, [tokens]) / seen["step"], find_peak(versions()[0])
    share = "" if peak is None else f", {speed / peak.bfloat16 / 1e12:.1%} of the peak"
    note(
        f"step of {tokens} tokens, {name}", f"{seen['step'] * 1e3:.0f} ms{share}; forward {seen['score'] * 1e3:.0f} ms"
    )
    if not machine.pretended:
        assert 0.8 * wanted < found < 1.1 * wanted
