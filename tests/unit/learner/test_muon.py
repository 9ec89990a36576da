"""Muon beside torch's own and by singular values, and the state that a fresh optimizer is given before a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.features.muon import learner
from rl_megatron.features.muon.learner import WHOLE, LayerWise, Matrices, Muon, find_matrices, orthogonalized, share_out
from rl_megatron.learner.model.experts import FusedExperts
from rl_megatron.learner.optimizer import create_state, step
from rl_megatron.models.named import NAMED
from rl_megatron.weights.layouts.families import hf_layout
from tests.tools.planner.test_time import IDEAL, work
from tools.planner.time import step_terms

SHAPES = [(48, 32), (32, 48), (16, 16), (3, 70)]
SETTINGS = [{"weight_decay": 0.1, "scale": "match_rms_adamw"}, {"weight_decay": 0.0, "scale": "original"}]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_both(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    settings: Mapping[str, Any],
    matrices: Mapping[Tensor, Matrices],
    dtype: torch.dtype,
) -> None:
    """Make three steps of ``ours``, by Muon here, and of ``theirs``, the matrices in them, by torch's."""
    muon = Muon(ours, dtype=dtype, lr=0.02, **settings)
    muon.matrices = {**matrices}
    parameters = [torch.nn.Parameter(x) for x in theirs]
    given = {"adjust_lr_fn": settings["scale"], "weight_decay": settings["weight_decay"]}
    torches = torch.optim.Muon(parameters, lr=0.02, **given)
    for number in range(3):
        for place, parameter in enumerate(ours):
            parameter.grad = drawn(*parameter.shape, seed=100 * number + place)
        grads = [g for p in ours for g in muon.matrices.get(p, WHOLE).parts(p.grad)]  # type: ignore[arg-type]
        for matrix, grad in zip(parameters, grads, strict=True):
            matrix.grad = grad.clone()
        muon.step()
        with pytest.MonkeyPatch.context() as patch:
            if dtype is not torch.bfloat16:
                patch.setattr(torch.Tensor, "bfloat16", lambda x: x.to(dtype, copy=True))
            torches.step()


@pytest.mark.parametrize("settings", SETTINGS, ids=["defaults", "others"])
def test_whole_matrices_step_as_torch_steps_them_to_the_bit(settings: Mapping[str, Any]) -> None:
    ours = [drawn(*shape) for shape in SHAPES]
    theirs = [x.clone() for x in ours]
    step_both(ours, theirs, settings, {}, torch.bfloat16)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(mine, wanted)
        assert not torch.equal(mine, drawn(*mine.shape))


def test_fused_experts_step_as_the_matrices_that_their_forward_pass_multiplies_by() -> None:
    experts = FusedExperts.__new__(FusedExperts)
    torch.nn.Module.__init__(experts)
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(drawn(2, 6, 10)), torch.nn.Parameter(drawn(2, 5, 6))
    experts.gate_up_proj_bias = torch.nn.Parameter(drawn(2, 10))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([experts])})
    model.config = SimpleNamespace()  # type: ignore[assignment]
    matrices = dict(find_matrices(model))
    assert matrices.pop(experts.gate_up_proj_bias) is None
    fused, down = (p.detach() for p in matrices)
    theirs = [fused[e, :, first::2].T.clone() for e in (0, 1) for first in (0, 1)] + [down[e].T.clone() for e in (0, 1)]
    found = dict(zip((fused, down), matrices.values(), strict=True))
    step_both([fused, down], theirs, SETTINGS[0], found, torch.float64)  # type: ignore[arg-type]
    for e in (0, 1):
        assert torch.allclose(fused[e, :, ::2].T, theirs[2 * e], atol=1e-6)
        assert torch.allclose(fused[e, :, 1::2].T, theirs[2 * e + 1], atol=1e-6)
        assert torch.allclose(down[e].T, theirs[4 + e], atol=1e-6)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40)])
def test_an_update_is_orthogonal_and_keeps_the_singular_vectors(shape: tuple[int, int]) -> None:
    u, values, v = torch.linalg.svd(drawn(*shape).double(), full_matrices=False)
    values = values.clamp(min=0.2 * float(values[0]))
    around = u.T @ orthogonalized(u @ torch.diag(values) @ v, torch.float64) @ v.T
    found = around.diagonal()
    assert 0.65 < float(found.min()) < float(found.max()) < 1.2
    assert float((around - torch.diag(found)).abs().max()) < 1e-12
    wanted = values / values.norm()
    for _ in range(5):
        wanted = 3.4445 * wanted - 4.7750 * wanted**3 + 2.0315 * wanted**5
    assert torch.allclose(found, wanted, atol=1e-12)


def test_a_gradient_of_zero_moves_nothing() -> None:
    assert torch.equal(orthogonalized(torch.zeros(4, 6), torch.float32), torch.zeros(4, 6))


def test_ranks_get_equal_shares_of_the_state_and_each_parameter_once() -> None:
    sizes = [700, 500, 40, 40, 30, 30, 20, 10, 10, 5, 1]
    parameters = [torch.zeros(size) for size in sizes]
    owners = share_out([(p, WHOLE) for p in parameters[:-1]] + [(parameters[-1], None)], 3)
    assert sorted(p.numel() for rank in owners for p in rank) == sorted(sizes)
    assert [sum(p.numel() for p in rank) for rank in owners] == [700, 500, 186]
    assert {id(p) for rank in owners for p in rank} == {id(p) for p in parameters}
    moments = share_out([(torch.zeros(45), WHOLE), (torch.zeros(40), WHOLE), (torch.zeros(30), None)], 2)
    assert [[p.numel() for p in rank] for rank in moments] == [[45, 40], [30]]  # AdamW's state is twice Muon's
    half = torch.empty(learner._BUCKET // 8, device="meta")
    small = torch.empty(3, dtype=torch.bfloat16, device="meta")
    assert [len(bucket) for bucket in learner._buckets([half, half, half, small, small])] == [2, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_float32_copies_are_stepped_with_products_in_the_models_dtype(dtype: torch.dtype) -> None:
    matrix = torch.nn.Parameter(drawn(4, 6).to(dtype))
    config = OptimizerConfig(bf16=dtype is torch.bfloat16, lr=1e-3, use_precision_aware_optimizer=False)
    config.muon_scale_mode = "original"
    inner: Any = learner._muon(config, {matrix: WHOLE}).optimizer
    ((stepped, found),) = inner.matrices.items()
    assert (inner.dtype, stepped.dtype, found) == (dtype, torch.float32, WHOLE)


def test_the_count_of_adamws_steps_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 saves it, and may have nothing to step with AdamW."""
    most = learner.dist.ReduceOp.MAX
    monkeypatch.setattr(learner.dist, "all_reduce", lambda count, op: count.fill_(3.0 if op == most else 0.0))
    optimizer = LayerWise.__new__(LayerWise)
    optimizer.chained_optimizers = [None, SimpleNamespace(optimizer=torch.optim.AdamW([{"params": []}]))]
    optimizer._device = torch.device("cpu")
    assert optimizer._adam_steps() == 3


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize(
    ("degrees", "shared", "of_experts"),
    [({}, 1, 1), ({"tp": 4, "dp": 2, "ep": 8}, 2, 8), ({"pp": 2, "dp": 8, "ep": 2}, 16, 16)],
)
def test_the_planner_counts_the_products(name: str, degrees: dict[str, int], shared: int, of_experts: int) -> None:
    """As torch counts them of the iteration itself, over the matrices of the checkpoint on disk; stages and
    data-parallel ranks share them out, dense ones ``shared`` ways, experts, with ``ep``, ``of_experts``."""
    layout, flops = hf_layout(NAMED[name]), {False: 0.0, True: 0.0}
    for spec in layout.rows():
        size, is_expert = layout.first_chunk(spec)[0].shape, "{expert}" in spec.name
        if "{layer}" in spec.name and len(size) == 2:
            with FlopCounterMode(display=False) as counted:
                orthogonalized(torch.empty(size, device="meta"), torch.bfloat16)
            each = layout.shape.num_experts if is_expert else 1
            flops[is_expert] += counted.get_total_flops() * each * len(layout.layer_stages(spec))
    given = replace(work(name, **degrees), muon=True)
    found, without = step_terms(given, IDEAL), step_terms(replace(given, muon=False), IDEAL)
    expected = (flops[False] / shared + flops[True] / of_experts) / 989.5e12
    assert found.pop("orthogonalization") == pytest.approx(expected, rel=1e-6)
    assert found == without


# The state that a fresh optimizer is given so that a checkpoint can be loaded into it.
class FusedAdam(torch.optim.Optimizer):
    """As TransformerEngine's 2.11: its state is known by name, and ``step`` is the group's, if it has parameters."""

    def step(self, closure: Any = None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        out = super().state_dict()
        known = ("exp_avg", "exp_avg_sq", "master_param")
        for state in out["state"].values():
            for name in state:
                if name not in known:
                    raise KeyError(name)
        return out


@pytest.mark.parametrize(("kind", "counts"), [(FusedAdam, False), (torch.optim.AdamW, True)])
def test_it_is_what_the_optimizer_can_say_again(kind: Any, counts: bool) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], {"lr": 0.0}) if kind is FusedAdam else kind([torch.ones(3)])
    create_state(SimpleNamespace(optimizer=optimizer))  # type: ignore[arg-type]
    (state,) = optimizer.state_dict()["state"].values()
    expected = {"exp_avg": [0.0] * 3, "exp_avg_sq": [0.0] * 3}
    assert {name: tensor.tolist() for name, tensor in state.items() if name != "step"} == expected
    assert ("step" in state) is counts


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW, HybridDeviceOptimizer])
def test_steps_of_a_stage_without_parameters_are_counted(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint holds the count of rank 0, whose stage may have no adapters. The count goes on after a load."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    named = {"cpu_optimizer_cls": torch.optim.AdamW, "overlap_cpu_optimizer_d2h_h2d": False}
    given = {FusedAdam: {"defaults": {"lr": 0.0}}, HybridDeviceOptimizer: named}
    optimizer = kind([{"params": []}], **given.get(kind, {}))
    part: Any = SimpleNamespace(
        optimizer=optimizer,
        param_groups=optimizer.param_groups,
        config=SimpleNamespace(clip_grad=0.0),
        get_parameters=list,
        step_with_ready_grads=optimizer.step,
    )
    for made in (1, 2, 3):
        step(part, 1e-3, 1.0)
        create_state(part)
        counts = optimizer.param_groups if kind is FusedAdam else optimizer.state.values()
        assert [float(count["step"]) for count in counts] == [made]
        optimizer.load_state_dict(optimizer.state_dict())
        part.param_groups = optimizer.param_groups
