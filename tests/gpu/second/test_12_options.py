"""Options that GPUs alone have, or that take another way there, beside plain steps of the same layers. 2 minutes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.gpu import branch
from tests.gpu.differences import largest, worst
from tests.gpu.machine import Machine, note

pytestmark = pytest.mark.gpu
WIDE = replace(branch.SHAPE, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, expert_width=128)
DENSE = replace(WIDE, family="qwen3", num_experts=0, experts_per_token=0, expert_width=0, dense_width=512)
TE = {**branch.BFLOAT16, "layers": "transformer_engine"}
PADDED = {"max_tokens_per_micro_batch": 128, "padding": {"tokens": "128", "sequences": 16}}
STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Keys beside those of ``beside``, whose numbers it must find: log-probs, losses, and the first norm, within these.
    Without ``later`` the first loss alone: the next ones have reason to be others."""

    keys: Mapping[str, Any]
    beside: str = "torch"
    logprobs: float = 0.05
    losses: float = 2e-3
    norm: float = 0.03
    later: bool = True


EXACT: Mapping[str, Any] = {"logprobs": 0.0, "losses": 0.0, "norm": 0.0}
FLOAT8: Mapping[str, Any] = {"logprobs": 1.0, "losses": 0.05, "norm": 0.3}
PLAIN: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "torch": (branch.BFLOAT16, WIDE),
    "deterministic": ({**branch.BFLOAT16, "deterministic": True}, WIDE),
    "TE": (TE, WIDE),
    "TE, deterministic": ({**TE, "deterministic": True}, WIDE),
    "dense, padded": ({**TE, **PADDED}, DENSE),
}
CASES: Mapping[str, Case] = {
    "deterministic": Case(keys={"deterministic": True}),
    "deterministic again": Case(keys={}, beside="deterministic", **EXACT),
    "parked gradients": Case(keys={"offload": {"while_sampling": "gradients"}}, beside="deterministic", **EXACT),
    "parked optimizer": Case(keys={"offload": {"while_sampling": "optimizer"}}, beside="deterministic", **EXACT),
    "float32 head": Case(keys={"head_dtype": "float32"}),
    "recomputed attention and activation": Case(
        keys={"recompute": {"parts": ["core_attn", "moe_act"]}}, beside="deterministic", **EXACT
    ),
    "muon": Case(keys={"optimizer": {"name": "muon"}}, later=False),
    "adapters": Case(keys={"lora": {"rank": 8}}, norm=1e9, later=False),
    "TE beside torch": Case(keys={"layers": "transformer_engine"}, losses=5e-3),
    "TE, deterministic": Case(keys={"deterministic": True}, beside="TE"),
    "TE, deterministic again": Case(keys={}, beside="TE, deterministic", **EXACT),
    "TE, norms and activation recomputed": Case(keys={"recompute": {"parts": ["layernorm", "moe_act"]}}, beside="TE"),
    "TE, parked optimizer": Case(keys={"offload": {"while_sampling": "optimizer"}}, beside="TE"),
    "TE, moments in bfloat16": Case(keys={"optimizer": {"moments_dtype": "bfloat16"}}, beside="TE", losses=0.01),
    "TE, float8 by tensor": Case(keys={"fp8": "tensorwise"}, beside="TE", **FLOAT8),
    "TE, float8 by block": Case(keys={"fp8": "blockwise"}, beside="TE", **FLOAT8),
    "CUDA graphs": Case(keys={"cuda_graphs": True}, beside="dense, padded"),
}
THERE = importlib.util.find_spec("transformer_engine") is not None


def _wants_te(keys: Mapping[str, Any]) -> bool:
    return keys["layers"] == "transformer_engine"


def _keys(name: str) -> tuple[Mapping[str, Any], Any]:
    """A case's keys and shape."""
    keys, shape = PLAIN[CASES[name].beside]
    return {**keys, **CASES[name].keys}, shape


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> dict[str, Any]:
    calls = {f"plain {name}": given for name, given in PLAIN.items()} | {name: _keys(name) for name in CASES}
    runs = {
        name: (branch.policy_main, keys, STEPS, shape)
        for name, (keys, shape) in calls.items()
        if THERE or not _wants_te(keys)
    }
    return machine.tried(tmp_path_factory.mktemp("options"), runs)


@pytest.mark.parametrize("name", CASES)
def test_its_numbers_are_those_of_plain_steps(name: str, seen: Any) -> None:
    if _wants_te(_keys(name)[0]) and not THERE:
        pytest.skip("no TransformerEngine here")
    case = CASES[name]
    found, wanted = seen[name], seen[f"plain {case.beside}"]
    for said in (found, wanted):
        assert isinstance(said, dict), said
    pairs = list(zip(found["steps"], wanted["steps"], strict=True))[: None if case.later else 1]
    logprobs = worst(found["logprobs"], wanted["logprobs"])
    losses = largest(a[0] - b[0] for a, b in pairs)
    norm = largest([pairs[0][0][1] / pairs[0][1][1] - 1])
    note(f"{name}, beside {case.beside}", f"log-probs {logprobs:.1e}, losses {losses:.1e}, first norm {norm:.1e}")
    assert logprobs <= case.logprobs
    assert losses <= case.losses
    assert norm <= case.norm
