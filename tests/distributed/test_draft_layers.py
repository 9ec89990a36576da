"""A draft layer trained beside the policy, in every layout: its loss and gradients are those of transformers,
and the policy's gradients and weights to the bit those of a run without. Two processes run them all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.plan import plan
from tests.distributed.ranks import run_ranks, whole_gradients, worlds
from tests.draft_models import WrittenDraft, save_with_drafts, save_with_qwens_draft
from tests.optimizer_step import train_step
from tests.samples import sequences_of

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

pytestmark = pytest.mark.slow
LENGTHS, SKIPPED = (14, 23), (4, 7)  # tokens of two texts, and of their prompts, which are not trained
TEMPERATURE = 0.7
NAMES, QWEN, HUNYUAN = ["deepseek_v3", "glm4_moe"], "qwen3_next", "hy_v3"
IN_STACKS = "qwen3_5_moe_stacked"  # the decoder's experts, not the draft layer's; has no formula here
TIED, DEEP = "glm4_moe_tied", "glm4_moe_deep"
LAYOUTS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "one": ({}, [*NAMES, TIED, QWEN, IN_STACKS, HUNYUAN]),
    "one-head": ({"head_dtype": "float32"}, ["glm4_moe"]),
    "tp2": ({"tp": 2}, NAMES),
    "tp2-ep2": ({"tp": 2, "ep": 2}, [*NAMES, QWEN, HUNYUAN]),
    "ep2": ({"ep": 2}, NAMES),
    "pp2": ({"pp": 2}, NAMES),
    "pp2-tied": ({"pp": 2}, [TIED]),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, [DEEP]),
    "cp2": ({"cp": 2}, NAMES),
    "recompute": ({"recompute": {"uniform": 1}}, ["deepseek_v3"]),
    "overlap": ({"ep": 2, "overlap": {"gradients": True, "parameters": True}}, ["glm4_moe"]),
    "bfloat16": ({"dtype": "bfloat16"}, ["glm4_moe"]),
    "frozen": ({"router": {"frozen": True}}, ["glm4_moe"]),
}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2}  # of all but DEEP: a draft layer sees the last one alone
OF_NAME: dict[str, dict[str, Any]] = {
    TIED: LAYERS | {"tie_word_embeddings": True},
    DEEP: {},
    QWEN: LAYERS | {"layer_types": ["linear_attention", "full_attention"]},
    IN_STACKS: LAYERS | {"layer_types": ["linear_attention", "full_attention"]},
    HUNYUAN: LAYERS | {"mlp_layer_types": ["dense", "sparse"]},
}
STEPS = 3
SAVED_IN = ("tp2-ep2", "pp2")


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


def layouts_of(folder: Path, learner: LearnerSection) -> tuple[Layout, Layout]:
    shape = replace(read_shape(folder), drafts=learner.draft.train)
    ranks = megatron_layout(shape, learner.dims, stages=learner.stages)
    return ranks, hf_layout(shape)


def made(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> MegatronLearner:
    from rl_megatron.learner.megatron import make_policy

    ranks, hf = layouts_of(folder, learner)
    policy = make_policy(hf.shape, learner, device, temperature=TEMPERATURE)
    tensors = dict(policy.tensors)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == ranks.local_shapes(rank)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    read_boxes(HFFolder(folder), hf, ranks, rank, tensors)
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


def check(folder: Path, layout: str, options: Mapping[str, Any], rank: int, device: torch.device) -> dict[str, Any]:
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
    if layout in SAVED_IN:
        resumed(folder, layout, policies[1], drafts, rank, device)
    exact = {**options, "draft": {"train": True}, "optimizer": {"clip_grad": 0.0}}
    exact = {key: value for key, value in exact.items() if key != "overlap"}
    with whole_gradients():
        policy = made(folder, once := LearnerSection.model_validate(exact), rank, device)
    result = step(policy, once, 0.0)
    from rl_megatron.learner.naming import global_parameters

    (draft,) = policy._hooks
    grads = {n: p.main_grad.clone() for n, p in global_parameters([draft.model]) if hasattr(p, "main_grad")}
    torch.save(grads, folder / f"{layout}-{rank}.pt")
    read = {name: tensor.clone() for name, tensor in policy.tensors.items()}
    policy.load_weights(folder / "megatron")
    assert all(torch.equal(tensor, read[name]) for name, tensor in policy.tensors.items())
    if isinstance(result, Made):
        seen |= {"loss": result.of_loss["draft/loss"].value, "norm": result.step.metrics["draft/grad_norm"].value}
    return seen


def resumed(
    folder: Path, layout: str, policy: MegatronLearner, learner: LearnerSection, rank: int, device: torch.device
) -> None:
    """A run goes on from its checkpoint to the bit, and from that of another layout with the weights that it holds."""
    policy.save(folder / f"saved-{layout}")
    again = made(folder, learner, rank, device)
    again.load(folder / f"saved-{layout}")
    for one in (policy, again):
        step(one, learner, 1e-2)
    continued = again.tensors
    assert all(torch.equal(tensor, continued[name]) for name, tensor in policy.tensors.items())
    if layout == SAVED_IN[0]:
        return
    other = folder / f"saved-{SAVED_IN[0]}"
    again.load(other)
    if rank == 0:
        convert.megatron_to_hf(other, folder / "converted", config=folder)
    torch.distributed.barrier()
    ranks, hf = layouts_of(folder, learner)
    held = {name: torch.empty_like(tensor) for name, tensor in again.tensors.items()}
    read_boxes(HFFolder(folder / "converted"), hf, ranks, rank, held)
    assert all(torch.equal(tensor, held[name]) for name, tensor in again.tensors.items())


def rank_main(rank: int, root: Path) -> None:
    layouts = {name: LearnerSection.model_validate(options) for name, (options, _) in LAYOUTS.items()}
    for layout, _, device in worlds(rank, root, layouts):
        options, names = LAYOUTS[layout]
        found = {name: check(root / name, layout, options, rank, device) for name in names}
        (root / f"{layout}-{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drafts")
    for name in (*NAMES, TIED, DEEP, QWEN, IN_STACKS, HUNYUAN):
        folder, changed = root / name, OF_NAME.get(name, LAYERS)
        if name in (QWEN, IN_STACKS):
            save_with_qwens_draft(name, folder, **changed)
        else:
            save_with_drafts(name.removesuffix("_tied").removesuffix("_deep"), folder, **changed)
        convert.hf_to_megatron(folder, folder / "megatron")
        for layout in SAVED_IN:
            (folder / f"saved-{layout}").mkdir()
        if name == IN_STACKS:
            continue
        written = WrittenDraft(folder)
        loss = torch.zeros(())
        for text, skipped in zip(texts(), SKIPPED, strict=True):
            said = (written.logits(text) / TEMPERATURE).log_softmax(-1)
            trained = torch.arange(2, len(text)) >= skipped
            loss = loss - (said.gather(1, text[2:, None])[:, 0] * trained).sum() / NUM_TOKENS
        loss.backward()
        grads = {written.file_name(n): t.grad for n, t in written.held.items() if t.grad is not None}
        torch.save({"loss": loss.item(), "grads": grads}, folder / "wanted.pt")
    run_ranks(rank_main, 2, root)
    return root


def in_files(folder: Path, layout: str, learner: LearnerSection) -> dict[str, Tensor]:
    """The ranks' gradients of the draft layer under the names of files."""
    held = [torch.load(path) for path in sorted(folder.glob(f"{layout}-[01].pt"))]
    ranks, hf = layouts_of(folder, learner)
    out: dict[str, Tensor] = {}
    shapes = hf.local_shapes(0)
    for t in plan(ranks, hf, placement={0: 99}).receives(99):
        if t.src_param in held[t.src_rank]:
            room = out.setdefault(t.dst_param, torch.full(shapes[t.dst_param], torch.nan))
            room[tuple(slice(*e) for e in t.dst_box)] = held[t.src_rank][t.src_param][
                tuple(slice(*e) for e in t.src_box)
            ]
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_learns_to_the_bit_as_without_a_draft_layer(layout: str, models: Path) -> None:
    for path in sorted(models.glob(f"{layout}-[01].json")):
        for name, seen in json.loads(path.read_text()).items():
            assert seen["apart"] == [], (path.name, name)
            assert seen["compared"] > 30
            assert seen["moved"] == ([] if layout == "frozen" else seen["routers"]), "the draft layer's, too"
            if "losses" in seen:
                assert seen["losses"] == sorted(seen["losses"], reverse=True), "the draft layer does not learn"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("bfloat16", "frozen")])
def test_loss_and_gradients_are_those_of_the_formula(layout: str, models: Path) -> None:
    options = LAYOUTS[layout][0]
    learner = LearnerSection.model_validate({**options, "draft": {"train": True}})
    answers = [json.loads(path.read_text()) for path in sorted(models.glob(f"{layout}-[01].json"))]
    for name in LAYOUTS[layout][1]:
        if name == IN_STACKS:
            continue
        wanted, found = torch.load(models / name / "wanted.pt"), in_files(models / name, layout, learner)
        assert found.keys() == wanted["grads"].keys()
        norm = torch.stack([g.norm() for g in wanted["grads"].values()]).norm()
        apart = torch.stack([(found[n] - g).norm() for n, g in wanted["grads"].items()]).norm() / norm
        said = [rank[name] for rank in answers if "loss" in rank[name]]
        print(f"{layout} {name}: {[s['loss'] - wanted['loss'] for s in said]}, gradients {apart:.1e}")
        assert said
        assert apart < 1e-5
        for seen in said:
            assert seen["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert seen["norm"] == pytest.approx(float(norm), rel=1e-5)
