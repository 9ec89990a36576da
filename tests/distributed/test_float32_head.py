"""A float32 output layer in every layout: equal to the plain one where that computes in float32, and closer to float64
where that computes in half precision. All layouts run in two processes that are started once.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.types import Loss, Samples
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples, run_ranks, worlds
from tests.family_models import save_model
from tests.rows import policy_loss

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

VOCABULARY, SEQUENCES = 61, 6
WITH_ENTROPY = policy_loss(objective="reinforce", aggregation="token_mean", entropy_coefficient=0.5)
MODELS = {"qwen2": "tied", "qwen3": "untied"}
LAYOUTS: dict[str, dict[str, Any]] = {"one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
HALF = ("one", "tp2")  # also computed in bfloat16


def make_samples() -> Samples:
    samples = ragged_samples(SEQUENCES, torch.Generator().manual_seed(5))
    ids, targets = samples.input_ids % VOCABULARY, samples.targets % VOCABULARY
    return replace(samples, input_ids=ids, targets=targets, advantages=torch.ones(len(ids)))


def section(layout: str, head: str | None, dtype: str = "float32") -> LearnerSection:
    keys = {"head_dtype": head, "dtype": dtype}
    return LearnerSection.model_validate({**LAYOUTS[layout], **keys})


def make(folder: Path, learner: LearnerSection, rank: int, device: torch.device, *, frozen: bool = False) -> Any:
    """A policy, or a frozen one, with the folder's weights."""
    from rl_megatron.learner.megatron import make_frozen, make_policy

    policy = (make_frozen if frozen else make_policy)(read_shape(folder), learner, device, temperature=0.7)
    fill(policy, learner, rank, folder)
    return policy


def gradients(policy: MegatronLearner) -> dict[str, Tensor]:
    trained = (p for chunk in policy._trained for p in chunk.named_parameters())
    return {name: parameter.main_grad.clone() for name, parameter in trained}


def backward(policy: MegatronLearner, samples: Samples, loss: Loss) -> list[float]:
    """Two micro-batches of equal content, so that gradients add up; the loss and the entropy."""
    count = 2 * int(samples.mask.sum())
    said = policy.backward([samples] * 2, loss, num_tokens=count, num_sequences=2 * SEQUENCES)
    return [float(said[name].value) for name in ("loss", "entropy")] if said else []  # type: ignore[arg-type]


def gap(found: Any, wanted: Any) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(found or [], wanted or [], strict=True)), default=0.0)


def compare(folder: Path, layout: str, rank: int, device: torch.device, to: Path) -> dict[str, float]:
    """Greatest differences between both heads in float32, and of a checkpoint of one that the other reads."""
    samples, both = make_samples(), frozenset({"logprobs", "logits", "logit_norms"})
    policies = [make(folder, section(layout, head), rank, device) for head in (None, "float32")]
    said = [policy.score([samples], both) or {} for policy in policies]
    frozen = make(folder, section(layout, "float32"), rank, device, frozen=True).score([samples], both) or {}
    losses = [backward(policy, samples, WITH_ENTROPY) for policy in policies]
    plain, ours = (gradients(policy) for policy in policies)
    assert plain.keys() == ours.keys()
    norms = [policy.step(1e-2).grad_norm for policy in policies]
    policies[1].save(to)
    policies[0].load(to)
    loaded = policies[0].tensors
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in policies[1].tensors.items())
    return {
        **{
            f"{name} of {who}": gap(one.get(name), said[0].get(name))
            for name in both
            for who, one in (("a policy", said[1]), ("a reference", frozen))
        },
        "loss and entropy": gap(*([torch.tensor(x) for x in loss] for loss in losses)),
        "norm": abs(norms[1] / norms[0] - 1),
        "gradient": max(float((ours[name] - x).norm() / (x.norm() + 1e-3)) for name, x in plain.items()),
    }


def half(folder: Path, layout: str, rank: int, device: torch.device, *, head: str | None) -> dict[str, float]:
    """Differences in bfloat16 from float64: log-probs of the hidden states, and the gradient of an untied weight."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    policy, samples = make(folder, section(layout, head, "bfloat16"), rank, device), make_samples()
    layer, seen = policy._models[-1].output_layer, []
    layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    said = policy.score([samples], frozenset({"logprobs"}))
    backward(policy, samples, CrossEntropy())
    hidden = gather_from_sequence_parallel_region(seen[0]) if layout == "tp2" else seen[0]
    tied = policy._models[-1].share_embeddings_and_output_weights
    weight = policy._models[-1].shared_embedding_or_output_weight() if tied else layer.weight
    shards = [torch.empty_like(weight) for _ in range(policy._dims.tp)]
    torch.distributed.all_gather(shards, weight.detach(), group=parallel_state.get_tensor_model_parallel_group())
    rows, count = hidden.flatten(0, -2)[: len(samples.targets)].double(), len(weight)
    log_p = (rows @ torch.cat(shards)[:VOCABULARY].double().T / 0.7).log_softmax(-1)
    wanted = log_p.gather(1, samples.targets[:, None])[:, 0]
    found = {} if said is None else {"logprobs": float((said["logprobs"][0] - wanted).abs().max())}
    if tied:  # the embedding's gradient is in the same buffer
        return found
    residual = log_p.exp() - torch.nn.functional.one_hot(samples.targets, VOCABULARY)
    exact = (residual[samples.mask].T @ rows[samples.mask]) / (0.7 * int(samples.mask.sum()))
    first = rank % policy._dims.tp * count
    mine = exact[first : first + count]
    return found | {"gradient": float((weight.main_grad[: len(mine)] - mine).norm() / mine.norm())}


def rank_main(rank: int, root: Path) -> None:
    from rl_megatron.learner import megatron

    megatron.LOGITS_TOKENS = 16  # several chunks; in this process alone
    for layout, _, device in worlds(rank, root, {layout: section(layout, None) for layout in LAYOUTS}):
        for model in MODELS:
            found = {"float32": compare(root / model, layout, rank, device, root / f"saved-{layout}-{model}")}
            for head in (None, "float32") if layout in HALF else ():
                found[f"bfloat16, {head}"] = half(root / model, layout, rank, device, head=head)
            (root / f"{layout}-{model}-{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("head")
    for model in MODELS:
        save_model(model, root / model)
        for layout in LAYOUTS:
            (root / f"saved-{layout}-{model}").mkdir()
    run_ranks(rank_main, 2, root)
    return root


def ranks_of(seen: Path, layout: str, model: str) -> list[dict[str, dict[str, float]]]:
    return [json.loads(path.read_text()) for path in sorted(seen.glob(f"{layout}-{model}-*.json"))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_it_is_the_plain_head_in_float32_and_shares_its_checkpoints(model: str, layout: str, seen: Path) -> None:
    for rank in ranks_of(seen, layout, model):
        assert all(difference < 2e-6 for difference in rank["float32"].values()), rank["float32"]


@pytest.mark.parametrize("layout", HALF)
@pytest.mark.parametrize("model", MODELS)
def test_in_half_precision_it_is_float64s_where_the_plain_head_is_not(model: str, layout: str, seen: Path) -> None:
    ranks = ranks_of(seen, layout, model)
    assert any("logprobs" in rank["bfloat16, float32"] for rank in ranks)
    for rank in ranks:
        ours, plain = rank["bfloat16, float32"], rank["bfloat16, None"]
        for name, difference in ours.items():
            assert difference < 5e-6, name
            assert plain[name] > 1e-3, name
