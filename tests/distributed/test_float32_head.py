"""What is nearer to an oracle: in half precision a float32 output layer to float64, and an engine's routes to its
log-probs; and routes that a learner refuses. tests/matrix has both in layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.samples import single_turns, to_samples
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import GenerationRequest, Prompt, Samples, SamplingParams
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples, run_ranks, worlds
from tests.family_models import save_model

VOCABULARY, SEQUENCES = 61, 6
MODELS = {"qwen2": "tied", "qwen3": "untied"}
LAYOUTS: dict[str, dict[str, Any]] = {"one": {}, "tp2": {"tp": 2}}


def make_samples() -> Samples:
    samples = ragged_samples(SEQUENCES, torch.Generator().manual_seed(5))
    ids, targets = samples.input_ids % VOCABULARY, samples.targets % VOCABULARY
    return replace(samples, input_ids=ids, targets=targets, advantages=torch.ones(len(ids)))


def section(layout: str, head: str | None) -> LearnerSection:
    return LearnerSection.model_validate({**LAYOUTS[layout], "head_dtype": head, "dtype": "bfloat16"})


def half(folder: Path, layout: str, rank: int, device: torch.device, *, head: str | None) -> dict[str, float]:
    """Differences in bfloat16 from float64: log-probs of the hidden states, and the gradient of an untied weight."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    from rl_megatron.learner.megatron import make_policy

    learner, samples = section(layout, head), make_samples()
    policy = make_policy(read_shape(folder), learner, device, temperature=0.7)
    fill(policy, learner, rank, folder)
    layer, seen = policy._models[-1].output_layer, []
    layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    said = policy.score([samples], frozenset({"logprobs"}))
    count = 2 * int(samples.mask.sum())
    policy.backward([samples] * 2, CrossEntropy(), num_tokens=count, num_sequences=2 * SEQUENCES)  # which add up
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
            found = {str(head): half(root / model, layout, rank, device, head=head) for head in (None, "float32")}
            (root / f"{layout}-{model}-{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("head")
    for model in MODELS:
        save_model(model, root / model)
    run_ranks(rank_main, 2, root)
    return root


def ranks_of(seen: Path, layout: str, model: str) -> list[dict[str, dict[str, float]]]:
    return [json.loads(path.read_text()) for path in sorted(seen.glob(f"{layout}-{model}-*.json"))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_in_half_precision_it_is_float64s_where_the_plain_head_is_not(model: str, layout: str, seen: Path) -> None:
    ranks = ranks_of(seen, layout, model)
    assert any("logprobs" in rank["float32"] for rank in ranks)
    for rank in ranks:
        ours, plain = rank["float32"], rank["None"]
        for name, difference in ours.items():
            assert difference < 5e-6, name
            assert plain[name] > 1e-3, name


# Routes that a learner refuses to replay, and engines' that bring log-probs nearer; tests/matrix has the layouts.
TINY = TinySizes(num_layers=4)
EXPERTS, TOP_K = TINY.num_experts, TINY.experts_per_token
BAD_ROUTES: Mapping[str, Callable[[Tensor], Tensor]] = {
    r"MoE layers and 2 experts a token, but this rank has \d and 2": lambda routes: routes[:, 1:],
    "MoE layers and 1 experts": lambda routes: routes[..., :1],
    "an expert twice for one token": torch.zeros_like,
    f"or an expert outside of 0 to {EXPERTS - 1}": lambda routes: routes + EXPERTS - 1,
}


def free(samples: Samples) -> Samples:
    """Without routes to replay."""
    return replace(samples, extra={})


KEPT = SamplingParams(temperature=1.0, top_p=0.8, top_k=40, max_new_tokens=30, stop_token_ids=(), seed=0)
PLAIN = replace(KEPT, top_p=1.0, top_k=0)


def routes_main(rank: int, model: Path, folder: Path) -> None:
    """One rank: bad routes raise, and how far log-probs are from the engine's, with its routes and without."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy

    shape, learner = read_shape(model), LearnerSection()
    device = world.init_process_groups(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
    policy = make_policy(shape, learner, device, temperature=1.0)
    fill(policy, learner, rank, model)
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(10, g)
    drawn = torch.rand(len(samples.input_ids), TINY.num_layers, EXPERTS, generator=g).argsort(-1)
    routes = drawn[..., :TOP_K].to(torch.uint8)
    for what, bad in BAD_ROUTES.items():
        with pytest.raises(RLMegatronError, match=what):
            policy.backward(
                [replace(samples, extra={"routes": bad(routes)})], CrossEntropy(), num_tokens=1, num_sequences=1
            )
    found = []
    limited = rollouts(shape, model, torch.float32, KEPT, ("kept", "routes"))
    for sampled in (rollouts(shape, model), free(rollouts(shape, model)), limited, free(limited)):
        said: Any = policy.score([sampled], frozenset({"logprobs"}))
        found.append((said["logprobs"][0] - sampled.rollout_logprobs)[sampled.mask].abs())
    torch.save(found, folder / "found.pt")
    world.destroy_process_groups()


def rollouts(
    shape: ModelShape,
    model: Path,
    dtype: torch.dtype = torch.bfloat16,
    params: SamplingParams = PLAIN,
    columns: tuple[str, ...] = ("routes",),
) -> Samples:
    """What the in-process engine samples with weights rounded to ``dtype``, and the routes it took."""
    from safetensors.torch import load_file

    from rl_megatron.engines.local.engine import LocalEngine

    engine = LocalEngine(shape, slots=64, dtype=torch.float32, device="cpu", max_length=64)
    weights = load_file(model / "model.safetensors")
    for name, tensor in engine.tensors.items():
        tensor.copy_(weights[name].to(dtype))
    prompts = [Prompt(id=str(i), text="", token_ids=tuple(range(i, i + 9)), answer="") for i in range(40)]
    asked = [
        GenerationRequest(id=p.id, token_ids=p.token_ids, num_completions=2, params=params, columns=columns)
        for p in prompts
    ]
    return to_samples(
        [single_turns(prompt, completions) for prompt, completions in zip(prompts, engine.generate(asked), strict=True)]
    )


def test_bad_routes_raise_and_the_engines_bring_its_log_probs_nearer(tmp_path: Path) -> None:
    run_ranks(routes_main, 1, make_tiny_model(TINY, tmp_path / "models", seed=3), tmp_path)
    replayed, unreplayed, kept, whole = torch.load(tmp_path / "found.pt")
    assert 0 < replayed.mean() < 0.7 * unreplayed.mean()
    assert replayed.max() < 0.3 * unreplayed.max()  # what is left is the weights' rounding
    assert kept.max() < 1e-5  # over the tokens that the engine's sampling kept; and over the whole vocabulary:
    assert whole.min() > 1e-2
