"""Routing replay in the learner: routers take the given experts in every layout, and learn as transformers' would.

The oracle is transformers' own model, its routers made to take the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import pack, unpack
from rl_megatron.data.samples import to_samples
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.options.optimizer import OptimizerSection
from rl_megatron.types import Batch, GenerationRequest, Prompt, Samples, SamplingParams, Want
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples, run_ranks, whole_gradients
from tests.optimizer_step import train_step

TINY = TinySizes(num_layers=4)
EXPERTS, TOP_K = TINY.num_experts, TINY.experts_per_token
MAX_TOKENS = 120  # three micro-batches, or two a rank; an interleaved pipeline of two stages adds a copy to three
OPTIMIZER = OptimizerSection(clip_grad=0.0)  # gradients are seen as they are
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {  # by the number of ranks
    2: {
        "tp2": {"tp": 2},
        "pp2": {"pp": 2},
        "vpp2": {"pp": 2, "vpp": 2},
        "ep2": {"ep": 2},
        "cp2": {"cp": 2},
        "tp2-ep2": {"tp": 2, "ep": 2},
        "vpp2-recompute": {"pp": 2, "vpp": 2, "recompute": {"uniform": 1}},
        "tp2-ep2-recompute": {"tp": 2, "ep": 2, "recompute": {"uniform": 1}},
        "cp2-recompute": {"cp": 2, "recompute": {"uniform": 2}},
    },
    4: {
        "pp2-ep2": {"pp": 2, "ep": 2},
        "tp2-pp2-ep2-recompute": {"tp": 2, "pp": 2, "ep": 2, "recompute": {"uniform": 1}},
    },
}
BAD_ROUTES = {
    r"MoE layers and 2 experts a token, but this rank has \d and 2": lambda routes: routes[:, 1:],
    "MoE layers and 1 experts": lambda routes: routes[..., :1],
    "an expert twice for one token": lambda routes: torch.zeros_like(routes),
    f"or an expert outside of 0 to {EXPERTS - 1}": lambda routes: routes + EXPERTS - 1,
}

LOGPROBS: frozenset[Want] = frozenset({"logprobs"})


def make_samples() -> Samples:
    """10 ragged sequences, with experts drawn at random for each token."""
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(10, g)
    drawn = torch.rand(len(samples.input_ids), TINY.num_layers, EXPERTS, generator=g).argsort(-1)
    return replace(samples, routes=drawn[..., :TOP_K].to(torch.uint8))


def free(samples: Samples) -> Samples:
    """Without routes to replay."""
    return Samples(**{k: v for k, v in samples.columns.items() if k != "routes"}, cu_seqlens=samples.cu_seqlens)


def ranks_main(rank: int, world_size: int, model: Path, folder: Path) -> None:
    """Every layout of ``world_size`` ranks, one after the other, in the same processes; before them, one rank alone."""
    torch.set_num_threads(1)
    layouts = LAYOUTS[world_size] if world_size > 1 else {"alone": {}, "alone-recompute": {"recompute": {"moe": True}}}
    for name, options in layouts.items():
        learner = LearnerSection.model_validate({**options, "optimizer": OPTIMIZER})
        with whole_gradients():
            seen = one_layout(rank, learner, model, folder / f"{name}.rendezvous")
        torch.save(seen, folder / f"{name}.{rank}.pt")


def one_layout(rank: int, learner: LearnerSection, model: Path, rendezvous: Path) -> dict[str, Any]:
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.learner.naming import global_parameters

    shape = read_shape(model)
    device = world.join(learner, rank=rank, rendezvous=f"file://{rendezvous}", seed=0)
    policy = make_policy(shape, learner, device, temperature=1.0)
    fill(policy, learner, rank, model)
    samples = make_samples()
    batch, unrouted = (pack(s, dims=learner.dims, max_tokens=MAX_TOKENS) for s in (samples, free(samples)))
    dp = learner.dims.dp_rank(rank)
    layers = list(policy.routed_layers)
    row = [replace(m, routes=m.routes[:, layers]) for m in batch.micro_batches[dp]]
    seen: dict[str, Any] = {"batch": batch, "dp": dp}
    said = policy.score(unrouted.micro_batches[dp], LOGPROBS | {"routes"})
    seen["recorded"] = said and (said["logprobs"], said["routes"])
    seen["free"] = (policy.score(unrouted.micro_batches[dp], LOGPROBS) or {}).get("logprobs")
    seen["replayed"] = (policy.score(row, LOGPROBS) or {}).get("logprobs")
    counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    with taken_routes(policy) as seen["taken"]:
        seen["result"] = train_step(policy, row, CrossEntropy(), 0.0, **counts)
    seen["wanted"] = wanted_routes(batch.micro_batches[dp], learner)
    seen["router_gradients"] = {
        name: parameter.main_grad.clone()  # type: ignore[attr-defined]
        for name, parameter in global_parameters(policy._models)
        if name.endswith("router.weight")
    }
    for what, routes in BAD_ROUTES.items():
        bad = replace(row[0], routes=routes(row[0].routes))
        with pytest.raises(RLMegatronError, match=what):
            train_step(policy, [bad], CrossEntropy(), 0.0, **counts)
    seen["free_result"] = train_step(policy, unrouted.micro_batches[dp], CrossEntropy(), 0.0, **counts)
    if learner.dims.world_size == 1:
        seen["mismatch"] = [
            (policy.score([s], LOGPROBS)["logprobs"][0] - s.rollout_logprobs)[s.mask].abs()  # type: ignore[index]
            for s in (rollouts(shape, model), free(rollouts(shape, model)))
        ]
    world.leave()
    return seen


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
        GenerationRequest(id=p.id, token_ids=p.token_ids, num_completions=2, params=params, routes=True)
        for p in prompts
    ]
    return to_samples(
        [single_turns(prompt, completions) for prompt, completions in zip(prompts, engine.generate(asked), strict=True)]
    )


@contextmanager
def taken_routes(policy: Any) -> Iterator[dict[int, dict[bool, list[Tensor]]]]:
    """By layer and by whether autograd was on: the maps [t, E] of each call of its router, in order."""
    taken: dict[int, dict[bool, list[Tensor]]] = {}
    hooks = []
    for chunk in policy._models:
        for layer in chunk.decoder.layers:
            calls = taken.setdefault(layer.layer_number - 1, {True: [], False: []})

            def note(_m: Any, _i: Any, output: Any, calls: dict[bool, list[Tensor]] = calls) -> None:
                calls[torch.is_grad_enabled()].append(output[1].clone())

            hooks.append(layer.mlp.router.register_forward_hook(note))
    yield taken
    for hook in hooks:
        hook.remove()


def wanted_routes(micro_batches: Sequence[Samples], learner: LearnerSection) -> list[Tensor]:
    """Of each micro-batch, the maps [t, layers, E] that this rank must take, padding left to all zeros."""
    from megatron.core import parallel_state

    from rl_megatron.learner.packed import pack_micro_batch

    out = []
    for samples in micro_batches:
        share = pack_micro_batch(
            samples,
            tp=learner.tp,
            cp=learner.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            device=torch.device("cpu"),
        )
        hot = torch.zeros(len(samples.routes), TINY.num_layers, EXPERTS, dtype=torch.bool)
        hot.scatter_(2, samples.routes.long(), True)
        hot = hot[share.source] & (share.source >= 0)[:, None, None]
        out.append(hot.chunk(learner.tp)[parallel_state.get_tensor_model_parallel_rank()])
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TINY, tmp_path_factory.mktemp("models"), seed=3)


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every layout saw."""
    folder = tmp_path_factory.mktemp("replay")
    for world_size in (1, *LAYOUTS):
        run_ranks(ranks_main, world_size, world_size, model, folder)
    paths = sorted(folder.glob("*.pt"))
    out: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        out.setdefault(path.name.split(".")[0], []).append(torch.load(path, weights_only=False))
    return out


@dataclass(frozen=True)
class Oracle:
    """transformers' model with its routers made to take the samples' experts; nothing is packed or padded."""

    logprobs: Tensor
    loss: float
    grad_norm: float
    router_gradients: list[Tensor]
    rerouted: float  # share of tokens and layers that would have gone elsewhere


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    samples, logprobs = make_samples(), []
    routers = [layer.mlp.gate for layer in reference.model.layers]
    rerouted: list[Tensor] = []
    for a, b in pairwise(samples.cu_seqlens.tolist()):
        for number, router in enumerate(routers):
            router.forward = partial(take, router, samples.routes[a:b, number].long(), rerouted)
        logits = reference(samples.input_ids[None, a:b]).logits[0]
        logprobs.append(logits.log_softmax(-1).gather(1, samples.targets[a:b, None]).squeeze(1))
    found = torch.cat(logprobs)
    loss = -found[samples.mask].mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm(p.grad for p in reference.parameters() if p.grad is not None)
    gradients = [router.weight.grad for router in routers]
    return Oracle(found.detach(), loss.item(), norm.item(), gradients, torch.cat(rerouted).double().mean().item())


def take(router: Any, chosen: Tensor, rerouted: list[Tensor], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The forward of transformers' router, but for the choice."""
    logits = torch.nn.functional.linear(hidden, router.weight)
    rerouted.append((logits.topk(TOP_K).indices.sort(-1).values != chosen.sort(-1).values).any(-1))
    probs = logits.softmax(-1).gather(1, chosen)
    return logits, probs / probs.sum(-1, keepdim=True), chosen


NAMES = ["alone", "alone-recompute", *(name for layouts in LAYOUTS.values() for name in layouts)]


def joined(ranks: Sequence[dict[str, Any]], name: str, part: int | None = None) -> Tensor:
    """A score of all DP ranks at the positions of `make_samples`."""
    batch: Batch = ranks[0]["batch"]
    answers = {r["dp"]: r[name] if part is None else r[name][part] for r in ranks if r[name] is not None}
    return unpack(batch, [answers[d] for d in range(len(answers))], make_samples())


@pytest.mark.parametrize("name", NAMES)
def test_every_router_takes_the_given_experts_in_forward_and_recomputation(name: str, seen: Any) -> None:
    for rank in seen[name]:
        assert len(rank["wanted"]) > 1
        for layer, calls in rank["taken"].items():
            passes = [calls[True], calls[False]] if "recompute" in name else [calls[True]]
            for maps in passes:
                for found, wanted in zip(maps[: len(rank["wanted"])], rank["wanted"], strict=True):
                    real = wanted[:, layer].any(-1)
                    assert torch.equal(found[real], wanted[real, layer])
                    assert found.sum(-1).eq(TOP_K).all()


@pytest.mark.parametrize("name", NAMES)
def test_layouts_agree_on_scores_loss_and_gradient(name: str, seen: Any, oracle: Oracle) -> None:
    ranks, alone = seen[name], seen["alone"][0]
    assert (joined(ranks, "replayed") - oracle.logprobs).abs().max() < 2e-5
    assert torch.equal(joined(ranks, "recorded", 1), joined(seen["alone"], "recorded", 1))
    assert (joined(ranks, "recorded", 0) - joined(seen["alone"], "free")).abs().max() < 2e-5
    for rank in ranks:
        for which in ("result", "free_result"):
            if rank[which] is not None:
                assert rank[which].loss == pytest.approx(alone[which].loss, rel=1e-6)
                assert rank[which].step.grad_norm == pytest.approx(alone[which].step.grad_norm, rel=1e-4)
        if rank["result"] is not None:
            rerouted = rank["result"].step.metrics["moe/rerouted_fraction"].value
            assert rerouted == pytest.approx(oracle.rerouted, abs=1e-9)
            assert "moe/rerouted_fraction" not in rank["free_result"].step.metrics
    gradients = {n: g for rank in ranks for n, g in rank["router_gradients"].items()}
    assert len(gradients) == TINY.num_layers
    for layer, wanted in enumerate(oracle.router_gradients):
        found = gradients[f"decoder.layers.{layer}.mlp.router.weight"]
        assert (found - wanted).norm() < 1e-4 * wanted.norm()


def test_the_loss_is_that_of_transformers_with_the_same_experts(seen: Any, oracle: Oracle) -> None:
    result, free_result = seen["alone"][0]["result"], seen["alone"][0]["free_result"]
    assert result.loss == pytest.approx(oracle.loss, rel=1e-6)
    assert result.step.grad_norm == pytest.approx(oracle.grad_norm, rel=1e-4)
    assert all(g.norm() > 1e-3 for g in oracle.router_gradients)
    assert abs(result.loss - free_result.loss) > 1e-3
    assert (joined(seen["alone"], "replayed") - joined(seen["alone"], "free")).abs().mean() > 0.01


def test_replaying_the_engines_routes_brings_its_log_probs_nearer(seen: Any) -> None:
    replayed, unreplayed = seen["alone"][0]["mismatch"]
    assert 0 < replayed.mean() < 0.7 * unreplayed.mean()
    assert replayed.max() < 0.3 * unreplayed.max()  # what is left is the weights' rounding


def test_recorded_routes_are_those_of_transformers(seen: Any, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    samples, found = make_samples(), joined(seen["alone"], "recorded", 1)
    assert found.dtype == torch.uint8
    for a, b in pairwise(samples.cu_seqlens.tolist()):
        with torch.no_grad():
            logits = reference(samples.input_ids[None, a:b], output_router_logits=True).router_logits
        wanted = torch.stack([x.topk(TOP_K, -1).indices for x in logits], 1)
        assert torch.equal(found[a:b].long().sort(-1).values, wanted.sort(-1).values)
