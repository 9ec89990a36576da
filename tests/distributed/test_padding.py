"""CUDA graphs of decoder layers, whose micro-batches are padded to few sizes; tests/matrix compares padded steps."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_megatron.config.learner_checks import problems
from rl_megatron.config.sections.learner import LearnerSection, PaddingSection
from rl_megatron.data.packing import Packer
from rl_megatron.errors import ConfigError
from rl_megatron.feature import drop_captures
from rl_megatron.learner.keywords import keywords
from rl_megatron.models.named import NAMED
from rl_megatron.types import Batch
from rl_megatron.weights.layouts.learner import Elements
from tests.distributed.ranks import ragged_samples, run_ranks
from tests.distributed.test_kept import rank_of
from tests.distributed.test_overlap import make
from tests.family_models import save_model
from tests.rows import policy_loss
from tools.planner.terms import memory

SEQUENCES, VOCABULARY, MOST = 14, 61, 5
LOSS = policy_loss(objective="cispo", aggregation="seq_mean_token_mean")


def make_batch(learner: LearnerSection) -> Batch:
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(SEQUENCES, g)
    advantages = torch.repeat_interleave(torch.randn(SEQUENCES, generator=g), samples.cu_seqlens.diff())
    ids, targets = samples.input_ids % VOCABULARY, samples.targets % VOCABULARY
    samples = replace(samples, input_ids=ids, targets=targets, advantages=advantages)
    return Packer(dims=learner.dims, max_tokens=120, padding=PaddingSection(sequences=MOST)).pack(samples)


# CUDA graphs of decoder layers, on a CPU, over ``torch.cuda``'s graphs below: equal to the bit to the learner without.
LAYERS, STEPS = 4, 3
KEYS: dict[str, Any] = {
    "max_tokens_per_micro_batch": 120,
    "padding": {"tokens": "104,120", "sequences": MOST},
    "layers": "tests.distributed.static_layers:static",
}
GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "padding": {"tokens": "8192", "sequences": 64}}


def trained(policy: Any, row: Any, batch: Any) -> list[Any]:
    """Of each step the loss, the gradients, the norm and log-probs, with the model's weights and with others."""
    graphed = []
    for _ in range(STEPS):
        loss = policy.backward(row, LOSS, num_tokens=batch.num_tokens, num_sequences=batch.num_sequences)["loss"].value
        gradients = {name: p.main_grad.clone() for name, p in policy._trained[0].named_parameters()}
        norm = policy.step(1e-2).grad_norm
        scores = policy.score(row, frozenset({"logprobs"}))["logprobs"]
        halves = {name: t / 2 for name, t in policy.tensors.items()}
        graphed.append((loss, gradients, norm, scores, policy.score(row, frozenset({"logprobs"}), halves)["logprobs"]))
    return graphed


def graphs_main(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    install_graphs()
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here
    from rl_megatron.learner import world
    from rl_megatron.learner.model import build

    install_generators()
    build.refuse = lambda *_: None  # device=cpu
    found: dict[str, Any] = {}
    learner = LearnerSection.model_validate({**KEYS, "cuda_graphs": True})
    device = world.init_process_groups(learner, rank=rank, rendezvous=f"file://{root}/rendezvous", seed=1)
    batch = make_batch(learner)
    row = batch.micro_batches[0]
    for name in ("without", "with"):
        policy = make(root / "dense", learner.model_copy(update={"cuda_graphs": name == "with"}), rank, device)
        found[name] = trained(policy, row, batch)
    found["counts"], found["micro-batches"] = dict(SEEN), len(row)
    found["sizes"] = {len(m.input_ids) for m in policy._pack(row)}
    many = make_batch(LearnerSection()).micro_batches[0]
    found["fits"] = [policy._hooks[0].fit(row), policy._hooks[0].fit([*row, many[0].__class__(**wide(many[0]))])]
    torch.save(found, root / "found.pt")
    world.destroy_process_groups()


def wide(samples: Any) -> dict[str, Any]:
    """The fields of samples whose every position is a sequence of its own."""
    return {**samples.columns, "cu_seqlens": torch.arange(len(samples.input_ids) + 1)}


@pytest.fixture(scope="module")
def graphed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a rank says of steps with graphs and without."""
    import rl_megatron.learner.megatron  # noqa: F401, I001  before megatron is imported
    from megatron.core.transformer import cuda_graphs

    if not hasattr(cuda_graphs, "TensorReusePool"):
        pytest.skip("this megatron-core captures otherwise, and learner.cuda_graphs is refused")
    root = tmp_path_factory.mktemp("graphs")
    save_model("qwen3", root / "dense")
    run_ranks(graphs_main, 1, root)
    return dict(torch.load(root / "found.pt", weights_only=False))


def test_steps_and_scores_are_those_without_to_the_bit(graphed: Any) -> None:
    for with_graphs, without in zip(graphed["with"], graphed["without"], strict=True):
        loss, gradients, norm, scores, others = with_graphs
        assert loss == without[0]
        assert norm == without[2]
        differing = [name for name, gradient in gradients.items() if not torch.equal(gradient, without[1][name])]
        assert not differing
        assert all(torch.equal(*pair) for pair in zip(scores, without[3], strict=True))
        assert all(torch.equal(*pair) for pair in zip(others, without[4], strict=True))
        assert not torch.equal(scores[0], others[0])


def test_each_layer_is_captured_once_for_each_size_and_replayed_from_the_first_step_on(graphed: Any) -> None:
    both_ways, forward = 2, 1
    assert graphed["sizes"] == {104, 120}
    assert graphed["counts"]["captures"] == LAYERS * both_ways * 2
    assert graphed["counts"]["replays"] == STEPS * graphed["micro-batches"] * LAYERS * (both_ways + forward)
    assert graphed["fits"] == [True, False]


def test_experts_latents_windows_and_a_missing_transformer_engine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = LearnerSection.model_validate({**GPU, "cuda_graphs": True})
    sparse = NAMED["qwen3-30b-a3b"]
    dense = replace(sparse, num_experts=0, experts_per_token=0, expert_width=0, dense_width=96)
    latent = replace(dense, latent=NAMED["deepseek-v3"].latent, norm_eps=1e-6)
    for shape, why in (
        (sparse, "dispatcher of experts waits for counts on the host"),
        (replace(dense, windows=(128, 0) * 24), "sliding windows: only torch's layers support that"),
        (latent, "rotary embeddings of latent attention wait for lengths on the host"),
    ):
        (said,) = problems(learner, shape)
        assert why in said
    assert not [*problems(learner, dense)]
    with pytest.raises(ConfigError, match="TransformerEngine is not installed here; install it, or leave it out"):
        keywords(learner, dense)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert keywords(learner, dense).model["cuda_graph_impl"] == "local"
    assert "cuda_graph_impl" not in keywords(drop_captures(learner), dense).model  # of models without gradients


def test_the_plan_keeps_activations_as_the_graphs_own() -> None:
    """Each position of both sizes has an input and a gradient of 2048 columns, and angles of 128 dimensions."""
    keys = {"dtype": "bfloat16", "padding": {"tokens": "4096,8192", "sequences": 64}, "cuda_graphs": True}
    none = Elements(dense=0, experts=0)
    rank = rank_of(none, tokens=8192.0, layers=(0,), inputs=(2048.0,), longest=8192.0)
    plain, graphs = (
        memory(LearnerSection.model_validate({**keys, "cuda_graphs": on}), NAMED["qwen3-30b-a3b"], rank)
        for on in (False, True)
    )
    own = plain["activations"] + (4096 + 8192) * (2 * 2048 * 2 + 128 * 4)
    assert plain["activations"] > 0
    assert graphs == {**plain, "activations": 0.0, "cuda graphs": own}


# ``torch.cuda``'s graphs on a CPU, for megatron's calls of them: what is captured is noted operation by operation, and
# a replay computes it again in the same memory. So a graph knows new inputs only where they were copied into its own.
# An operation for which the host would wait raises an error while a graph is captured, as on a GPU.
SEEN: Counter[str] = Counter()
"""How many captures and replays there were."""
_WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"}


class CUDAGraph:
    """Operations with the tensors that they made; None where they made another thing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.noted: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def register_generator_state(self, state: Any) -> None: ...

    def replay(self) -> None:
        SEEN["replays"] += 1
        with torch.no_grad():
            for operation, given, named, made in self.noted:
                for old, new in zip(made, tree_leaves(operation(*given, **named)), strict=True):
                    if old is not None and old is not new:
                        old.copy_(new)


class Capture(TorchDispatchMode):
    """Notes all operations but those that look at the memory of others."""

    def __init__(self, graph: CUDAGraph, **_: Any) -> None:
        super().__init__()
        self.graph = graph
        SEEN["captures"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func._schema.name.split("::")[1], kwargs or {}
        if name in _WAITING:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        out = func(*args, **named)
        if not any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns):
            kept = [x if isinstance(x, Tensor) else None for x in tree_leaves(out)]
            self.graph.noted.append((func, args, named, kept))
        return out


class Generator:
    """Random numbers of a GPU, which nothing here draws."""

    def manual_seed(self, seed: int) -> None: ...

    def clone_state(self) -> Generator:
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Generator) -> None: ...


def install_graphs() -> None:
    """Make this process find them. Call it before megatron is imported; then `install_generators`."""
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph, cuda.graph_pool_handle = CUDAGraph, Capture, lambda: (0, 1)
    cuda.memory_stats = lambda *_: {"allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}
    cuda.get_device_capability, cuda.set_stream = lambda *_: (9, 0), lambda *_: None


def install_generators() -> None:
    """Call it once megatron is imported."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: Generator()
    random._set_cuda_rng_state = lambda *_, **__: None
