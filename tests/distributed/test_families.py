"""Every family's weights through its table into the learner, in every layout, with transformers as the oracle.

Logits, the loss and the norm of its gradient are transformers'; megatron's checkpoints hold what the tables say, both
ways. All layouts run in two processes that are started once (70 s).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import RLMegatronError
from rl_megatron.training.measures import Made
from rl_megatron.types import Samples
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.formats.hf_folder import is_draft
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import run_ranks, worlds
from tests.family_models import DENSE, MODELS, SPARSE, save_model
from tests.optimizer_step import train_step
from tests.samples import sequences_of

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

pytestmark = pytest.mark.slow
LENGTHS = (13, 22)  # of two packed sequences
LAYOUTS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "one": ({}, [*MODELS]),
    "tp2": ({"tp": 2}, DENSE),
    "tp2-ep2": ({"tp": 2, "ep": 2}, SPARSE),
    "pp2": ({"pp": 2}, [*MODELS]),
    "pp2-uneven": ({"pp": 2, "stage_layers": "1+3"}, ["qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3"]),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, ["glm4_moe"]),
    "cp2": (
        {"cp": 2},
        ["qwen3_moe", "mistral_window", "glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v3", "qwen3_next"],
    ),
}
SAVED_IN = ("tp2", "tp2-ep2")  # and read back by the tools


def make_samples() -> Samples:
    g = torch.Generator().manual_seed(5)
    n = sum(LENGTHS)
    return sequences_of(
        LENGTHS,
        input_ids=torch.randint(0, 61, (n,), generator=g),
        targets=torch.randint(0, 61, (n,), generator=g),
        advantages=torch.randn(n, generator=g),
    )


def check(folder: Path, layout: str, learner: LearnerSection, rank: int, device: torch.device) -> dict[str, float]:
    """Largest difference of logits, and the loss and gradient norm; empty off the last stage."""
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout

    shape = read_shape(folder)
    policy = make_policy(shape, learner, device, temperature=1.0)
    wanted = megatron_layout(shape, learner.dims, stages=learner.stages)
    tensors = dict(policy.tensors)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == wanted.local_shapes(rank)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))  # what the table forgets shows
    read_boxes(HFFolder(folder), hf_layout(shape), wanted, rank, tensors)
    through_table = {name: tensor.clone() for name, tensor in tensors.items()}
    policy.load_weights(folder / "megatron")
    for name, tensor in policy.tensors.items():
        assert torch.equal(tensor, through_table[name]), name
    if layout in SAVED_IN:
        policy.save(folder / "saved")
    error = logits_error(policy, torch.load(folder / "logits.pt"))
    samples, n = make_samples(), sum(LENGTHS)
    micro_batches = [samples] if learner.vpp == 1 else [samples, samples]
    counts = {"num_tokens": n * len(micro_batches), "num_sequences": 2 * len(micro_batches)}
    result = train_step(policy, micro_batches, CrossEntropy(), 0.0, **counts)
    for name, tensor in policy.tensors.items():
        held = "expert_bias" in name or ".indexer." in name
        assert not held or torch.equal(tensor, through_table[name]), f"{name}, which is not trained, moved"
    if shape.indexer is not None:
        refuses_longer(policy, shape.indexer.top_k)
    if error is None or not isinstance(result, Made):
        return {}
    return {"logits": error, "loss": result.loss, "norm": result.step.grad_norm}


def refuses_longer(policy: MegatronLearner, most: int) -> None:
    """Than an indexer chooses whole."""
    samples, n = make_samples(), most + 1
    longer = {name: column.repeat(2)[:n] for name, column in samples.columns.items()}
    with pytest.raises(RLMegatronError, match=f"a sequence = {n} is more than index_topk={most} of model_type="):
        policy.score([Samples(**longer, cu_seqlens=torch.tensor([0, n]))], frozenset({"logits"}))


def logits_error(policy: MegatronLearner, wanted: Tensor) -> float | None:
    """Of all positions; None off the rank that answers."""
    said = policy.score([make_samples()], frozenset({"logits"}))
    return None if said is None else float((said["logits"][0] - wanted).abs().max())


def rank_main(rank: int, root: Path) -> None:
    layouts = {name: LearnerSection.model_validate(options) for name, (options, _) in LAYOUTS.items()}
    for layout, learner, device in worlds(rank, root, layouts):
        found = {name: check(root / name, layout, learner, rank, device) for name in LAYOUTS[layout][1]}
        (root / f"{layout}-{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    samples = make_samples()
    for name in MODELS:
        model = save_model(name, root / name)
        logits = torch.cat([model(x[None]).logits[0] for x in samples.input_ids.split(LENGTHS)])
        loss = F.cross_entropy(logits, samples.targets)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        torch.save(logits.detach(), root / name / "logits.pt")
        (root / name / "wanted.json").write_text(json.dumps({"loss": loss.item(), "norm": norm.item()}))
        convert.hf_to_megatron(root / name, root / name / "megatron")
        (root / name / "saved").mkdir()
    run_ranks(rank_main, 2, root)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_loss_and_gradient_are_those_of_transformers(layout: str, models: Path) -> None:
    seen = [json.loads(path.read_text()) for path in sorted(models.glob(f"{layout}-[01].json"))]
    for name in LAYOUTS[layout][1]:
        found = [rank[name] for rank in seen if rank[name]]
        wanted = json.loads((models / name / "wanted.json").read_text())
        assert found
        print(f"{layout} {name}: logits {max(rank['logits'] for rank in found):.1e}", found[0], wanted)
        for rank in found:
            assert rank["logits"] < 1e-4, name
            assert rank["loss"] == pytest.approx(wanted["loss"], rel=1e-5), name
            assert rank["norm"] == pytest.approx(wanted["norm"], rel=1e-4), name


@pytest.mark.parametrize("name", MODELS)
def test_what_megatron_and_the_tool_wrote_come_back_to_the_bit(name: str, models: Path, tmp_path: Path) -> None:
    held = load_file(models / name / "model.safetensors")
    shape = read_shape(models / name)
    original = {tensor: values for tensor, values in held.items() if not is_draft(tensor, shape)}
    for source in ("megatron", "saved"):
        convert.megatron_to_hf(models / name / source, tmp_path / source, config=models / name)
        back = load_file(tmp_path / source / "model.safetensors")
        assert back.keys() == original.keys()
        for tensor in original:
            assert back[tensor].dtype == original[tensor].dtype
            assert torch.equal(back[tensor], original[tensor]), tensor
