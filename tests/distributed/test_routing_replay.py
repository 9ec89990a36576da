"""Routes that a learner refuses to replay, and engines' that bring log-probs nearer; tests/matrix has the layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.samples import to_samples
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import GenerationRequest, Prompt, Samples, SamplingParams
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples, run_ranks

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


def rank_main(rank: int, model: Path, folder: Path) -> None:
    """One rank: bad routes raise, and how far log-probs are from the engine's, with its routes and without."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy

    shape, learner = read_shape(model), LearnerSection()
    device = world.join(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
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
    for sampled in (rollouts(shape, model), free(rollouts(shape, model))):
        said: Any = policy.score([sampled], frozenset({"logprobs"}))
        found.append((said["logprobs"][0] - sampled.rollout_logprobs)[sampled.mask].abs())
    torch.save(found, folder / "found.pt")
    world.leave()


def rollouts(shape: ModelShape, model: Path) -> Samples:
    """What the in-process engine samples with weights rounded to bfloat16, and the routes it took."""
    from safetensors.torch import load_file

    from rl_megatron.engines.local.engine import LocalEngine

    engine = LocalEngine(shape, slots=64, dtype=torch.float32, device="cpu", max_length=64)
    weights = load_file(model / "model.safetensors")
    for name, tensor in engine.tensors.items():
        tensor.copy_(weights[name].bfloat16())
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=30, stop_token_ids=(), seed=0)
    prompts = [Prompt(id=str(i), text="", token_ids=tuple(range(i, i + 9)), answer="") for i in range(40)]
    asked = [
        GenerationRequest(id=p.id, token_ids=p.token_ids, num_completions=2, params=params, columns=("routes",))
        for p in prompts
    ]
    return to_samples(
        [single_turns(prompt, completions) for prompt, completions in zip(prompts, engine.generate(asked), strict=True)]
    )


def test_bad_routes_raise_and_the_engines_bring_its_log_probs_nearer(tmp_path: Path) -> None:
    run_ranks(rank_main, 1, make_tiny_model(TINY, tmp_path / "models", seed=3), tmp_path)
    replayed, unreplayed = torch.load(tmp_path / "found.pt")
    assert 0 < replayed.mean() < 0.7 * unreplayed.mean()
    assert replayed.max() < 0.3 * unreplayed.max()  # what is left is the weights' rounding
