"""A policy learns to the bit as without the draft layer beside it; tests/matrix has the draft layer in layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.training.measures import Made
from rl_megatron.types import Samples
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from tests.distributed.ranks import run_ranks, worlds
from tests.draft_models import save_with_drafts, save_with_qwens_draft
from tests.samples import sequences_of, train_step

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

pytestmark = pytest.mark.slow
LENGTHS, SKIPPED = (14, 23), (4, 7)  # tokens of two texts, and of their prompts, which are not trained
TEMPERATURE = 0.7
IN_STACKS = "qwen3_5_moe_stacked"  # the decoder's experts, not the draft layer's; has no formula
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": (IN_STACKS, {}),
    "tp2-ep2": ("deepseek_v3", {"tp": 2, "ep": 2}),
    "overlap": ("glm4_moe", {"ep": 2, "overlap": {"gradients": True, "parameters": True}}),
    "bfloat16": ("glm4_moe", {"dtype": "bfloat16"}),
    "frozen": ("glm4_moe", {"router": {"frozen": True}}),
}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2}  # a draft layer sees the last one alone
STEPS = 3


def texts() -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(0, 61, (length,), generator=g) for length in LENGTHS]


def make_samples() -> Samples:
    parts = texts()
    masks = [torch.arange(len(x) - 1) >= skipped - 1 for x, skipped in zip(parts, SKIPPED, strict=True)]
    return sequences_of(
        [len(x) - 1 for x in parts],
        input_ids=torch.cat([x[:-1] for x in parts]),
        targets=torch.cat([x[1:] for x in parts]),
        mask=torch.cat(masks),
    )


NUM_TOKENS = sum(LENGTHS) - sum(SKIPPED)


def made(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> MegatronLearner:
    from rl_megatron.learner.megatron import make_policy

    shape = replace(read_shape(folder), drafts=learner.draft.train)
    policy = make_policy(shape, learner, device, temperature=TEMPERATURE)
    ranks = megatron_layout(shape, learner.dims, stages=learner.stages)
    read_boxes(HFFolder(folder), hf_layout(shape), ranks, rank, dict(policy.tensors))
    policy.adopt()
    return policy


def gradients(policy: MegatronLearner) -> dict[str, Tensor]:
    from rl_megatron.learner.naming import global_parameters

    found = dict(global_parameters(policy._models))
    return {name: p.main_grad.clone() for name, p in found.items() if hasattr(p, "main_grad")}


def step(policy: MegatronLearner, learner: LearnerSection, rate: float) -> Any:
    copies = learner.dims.dp  # each data-parallel rank has the same; masked copies fill an interleaved pipeline up
    return train_step(
        policy, [make_samples()], CrossEntropy(), rate, num_tokens=NUM_TOKENS * copies, num_sequences=2 * copies
    )


def check(folder: Path, options: Mapping[str, Any], rank: int, device: torch.device) -> dict[str, Any]:
    plain = LearnerSection.model_validate(options)
    drafts = LearnerSection.model_validate({**options, "draft": {"train": True}})
    seen: dict[str, Any] = {}
    policies = made(folder, plain, rank, device), made(folder, drafts, rank, device)
    routers = {name: t.clone() for name, t in policies[1].tensors.items() if name.endswith("router.weight")}
    apart = []
    for _ in range(STEPS):
        results = [step(policy, learner, 3e-3) for policy, learner in zip(policies, (plain, drafts), strict=True)]
        without, beside = map(gradients, policies)
        apart += [name for name in without if not torch.equal(without[name], beside[name])]
        if isinstance(results[0], Made):
            apart += ["loss"] if results[0].loss != results[1].loss else []
            apart += ["norm"] if results[0].step.grad_norm != results[1].step.grad_norm else []
            seen.setdefault("losses", []).append(results[1].of_loss["draft/loss"].value)
    weights = [policy.tensors for policy in policies]
    apart += [name for name, tensor in weights[0].items() if not torch.equal(tensor, weights[1][name])]
    seen["moved"] = [name for name, was in routers.items() if not torch.equal(was, policies[1].tensors[name])]
    seen |= {"apart": apart, "routers": [*routers], "compared": len(weights[0]) + STEPS * len(without)}
    return seen


def rank_main(rank: int, root: Path) -> None:
    layouts = {name: LearnerSection.model_validate(options) for name, (_, options) in LAYOUTS.items()}
    for layout, _, device in worlds(rank, root, layouts):
        model, options = LAYOUTS[layout]
        (root / f"{layout}-{rank}.json").write_text(json.dumps(check(root / model, options, rank, device)))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drafts")
    save_with_qwens_draft(IN_STACKS, root / IN_STACKS, layer_types=["linear_attention", "full_attention"], **LAYERS)
    for name in ("deepseek_v3", "glm4_moe"):
        save_with_drafts(name, root / name, **LAYERS)
    run_ranks(rank_main, 2, root)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_learns_to_the_bit_as_without_a_draft_layer(layout: str, seen: Path) -> None:
    for path in sorted(seen.glob(f"{layout}-[01].json")):
        found = json.loads(path.read_text())
        assert found["apart"] == [], path.name
        assert found["compared"] > 30
        assert found["moved"] == ([] if layout == "frozen" else found["routers"]), "the draft layer's, too"
        if "losses" in found:
            assert found["losses"] == sorted(found["losses"], reverse=True), "the draft layer does not learn"
