"""A push of weights whose gather overlaps the next pass, and dispatchers of tokens to experts; tests/matrix steps with
overlap."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.config.io import load_config
from rl_megatron.config.learner_checks import problems
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.features.overlap.feature import Reducing
from rl_megatron.learner.keywords import keywords
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import Batch
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples, run_ranks
from tests.rows import policy_loss
from tests.samples import share_of

STEPS, SEQUENCES, VOCABULARY = 3, 12, 61
LOSS = policy_loss(objective="cispo", aggregation="token_mean")
BUCKET = 3000  # parameters: several buckets


def make_batch(learner: LearnerSection) -> Batch:
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(SEQUENCES, g)
    ids, targets = samples.input_ids % VOCABULARY, samples.targets % VOCABULARY
    advantages = torch.repeat_interleave(torch.randn(SEQUENCES, generator=g), samples.cu_seqlens.diff())
    samples = replace(samples, input_ids=ids, targets=targets, advantages=advantages)
    return Packer(dims=learner.dims, max_tokens=120).pack(samples)


def make(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> Any:
    from rl_megatron.learner.megatron import make_policy

    policy = make_policy(read_shape(folder), learner, device, temperature=0.7)
    fill(policy, learner, rank, folder)
    return policy


def train(policy: Any, batch: Batch, dp: int) -> list[Any]:
    """Loss, norm and log-probs after each step."""
    seen: list[Any] = []
    counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    for _ in range(STEPS):
        said = policy.backward(batch.micro_batches[dp], LOSS, **counts)
        seen.append([said["loss"].value if said else None, policy.step(1e-2).grad_norm])
        found = policy.score(batch.micro_batches[dp], frozenset({"logprobs"}))
        seen[-1].append([x.tolist() for x in found["logprobs"]] if found else None)
    return seen


def pushes_main(rank: int, root: Path) -> None:
    """Checksums of what this rank's engine holds after a push right after a step, and after another behind a pass, for
    which weights are gathered."""
    torch.set_num_threads(1)
    from launcher.wire import Setup
    from launcher.worker.learner_rank import LearnerRank
    from rl_megatron.learner import trained

    learner = LearnerSection.model_validate({"dp": 2, "overlap": {"gradients": True, "parameters": True}})
    config = load_config("tiny_cpu", ["rollout.slots=8"]).model_copy(update={"learner": learner})
    rendezvous = f"file://{root}/rendezvous"
    setup = Setup(config=config, model_folder=root / "experts", run_folder=root / "run", rendezvous=rendezvous)
    small = partial(trained.DistributedDataParallelConfig, bucket_size=BUCKET)
    with patch.object(trained, "DistributedDataParallelConfig", small):
        worker, batch = LearnerRank(setup, rank, None), make_batch(learner)
    row, seen = batch.micro_batches[learner.dims.dp_rank(rank)], [worker.checksums()]
    share = share_of(row, learner.dims, rank, to_score=False)
    worker.backward("policy", share, LOSS, batch.num_tokens, batch.num_sequences)
    worker.step("policy", 1e-2)
    for version in (1, 2):
        worker.stage(version)
        worker.commit(version)
        seen.append(worker.checksums())
        worker._learners["policy"].score(row, frozenset({"logprobs"}))
    (root / f"pushed-{rank}.json").write_text(json.dumps(seen))
    worker.close()


def test_weights_that_wait_for_the_next_pass_are_in_a_push(tmp_path: Path) -> None:
    make_tiny_model(TinySizes(num_layers=2), tmp_path, seed=3).rename(tmp_path / "experts")
    run_ranks(pushes_main, 2, tmp_path)
    (before, at_once, later), other = (json.loads((tmp_path / f"pushed-{rank}.json").read_text()) for rank in (0, 1))
    assert at_once == later != before
    assert other[1:] == [at_once, later]


def test_gradients_that_are_being_reduced_are_waited_for_and_the_step_can_wait_again() -> None:
    """A step's bucket whose reduction has not begun is left to the step."""
    from rl_megatron.learner.optimizer import wait_for_gradients

    waited: list[str] = []

    def group(name: str, *, begun: bool) -> SimpleNamespace:
        handle = SimpleNamespace(wait=lambda: waited.append(name)) if begun else None
        return SimpleNamespace(grad_reduce_handle=handle)

    dense, experts = [group("dense", begun=True), group("late", begun=False)], [group("experts", begun=True)]
    wait_for_gradients(cast(Any, [SimpleNamespace(bucket_groups=dense, expert_parallel_bucket_groups=experts)]))
    assert waited == ["dense", "experts"]
    assert [one.grad_reduce_handle is not None for one in (*dense, *experts)] == [True, False, True]


def test_a_parameter_without_a_gradient_is_named() -> None:
    """megatron would wait for it for ever."""
    module = torch.nn.ModuleDict({"dense": torch.nn.Linear(1, 1, bias=False), "expert": torch.nn.Linear(1, 1)})
    dense, *experts = module.parameters()
    groups = [SimpleNamespace(params={p}, per_param_grad_ready_counts={}) for p in (dense, *experts)]
    groups[0].per_param_grad_ready_counts[dense] = 1
    config = SimpleNamespace()
    chunk = SimpleNamespace(config=config, no_sync=None, module=module, bucket_groups=groups[:1])
    chunk.expert_parallel_bucket_groups = groups[1:]
    hooks = Reducing(cast(Any, SimpleNamespace(chunks=[chunk])))
    config.no_sync_func = contextlib.nullcontext
    with (
        pytest.raises(RLMegatronError, match=r"2 parameters got no .* \(expert.weight, expert.bias\)"),
        hooks.around_pass(),
    ):
        pass


# Sending tokens to experts; DeepEP and HybridEP need GPUs, so the package ``deep_ep`` here sends for them over gloo.
# Shapes and meanings are those of its ``Buffer`` (https://github.com/deepseek-ai/DeepEP, deep_ep/buffer.py).
GPUS = {"device": "cuda", "dtype": "bfloat16", "ep": 2}
ONE_SIZE: dict[str, Any] = {"max_tokens_per_micro_batch": 128, "padding": {"tokens": "128"}}


def steps(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> dict[str, Any]:
    """Loss, norm and log-probs of some steps, and the classes of dispatchers."""
    policy, batch = make(folder, learner, rank, device), make_batch(learner)
    used = [m.token_dispatcher for m in policy._models[0].modules() if hasattr(m, "token_dispatcher")]
    used += [d._comm_manager for d in used if hasattr(d, "_comm_manager")]
    kinds = {type(part).__name__ for part in used}
    return {"steps": train(policy, batch, learner.dims.dp_rank(rank)), "kinds": sorted(kinds)}


def dispatch_main(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron as megatron
    from rl_megatron.learner import world

    degrees = {"ep": 2}
    learner = LearnerSection.model_validate(degrees)
    device = world.init_process_groups(learner, rank=rank, rendezvous=f"file://{root}/rendezvous", seed=1)
    found = {"alltoall": steps(root / "experts", learner, rank, device)}
    install_deep_ep()
    original, shape = megatron.make_config, read_shape(root / "experts")
    for name, more in (("deepep", {}), ("hybridep", ONE_SIZE)):
        on_gpus = LearnerSection.model_validate({**GPUS, **more, "dispatcher": name})
        kernels = keywords(on_gpus, shape).model
        chosen = {key: kernels[key] for key in ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")}

        def with_kernels(*given: Any, chosen: Any = chosen) -> Any:
            config = original(*given)
            for key, value in chosen.items():
                setattr(config, key, value)
            return config

        megatron.make_config = with_kernels
        found[name] = steps(root / "experts", LearnerSection.model_validate({**degrees, **more}), rank, device)
    world.destroy_process_groups()
    (root / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def dispatched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says."""
    root = tmp_path_factory.mktemp("dispatchers")
    (root / "made").mkdir()
    make_tiny_model(TinySizes(num_layers=2), root / "made", seed=3).rename(root / "experts")
    run_ranks(dispatch_main, 2, root)
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for (loss, norm, *said), (other, other_norm, *also) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(other, rel=1e-5, abs=1e-7)
        assert norm == pytest.approx(other_norm, rel=1e-4)
        for mine, theirs in zip(said, also, strict=True):
            for one, another in zip(mine or [], theirs or [], strict=True):
                assert one == pytest.approx(another, abs=2e-4)


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_kernels_train_as_all_to_all_does(name: str, dispatched: Any) -> None:
    manager = {"deepep": "_DeepepManager", "hybridep": "_HybridEPManager"}[name]
    for rank in dispatched:
        assert rank[name]["kinds"] == ["MoEFlexTokenDispatcher", manager]
        assert rank["alltoall"]["kinds"] == ["MoEAlltoAllTokenDispatcher"]
        assert_same(rank[name]["steps"], rank["alltoall"]["steps"])


def test_hybridep_takes_chunks_of_a_ranks_tokens() -> None:
    keys = {**GPUS, **ONE_SIZE, "tp": 4, "dispatcher": "hybridep"}
    (said,) = problems(LearnerSection.model_validate(keys))
    assert "learner.padding.tokens=128, learner.tp=4 and learner.cp=1: its kernels take chunks of 64 tokens" in said
    assert said.endswith("round it up to a multiple of 256")


def test_hybridep_takes_groups_that_deepep_has_no_settings_for() -> None:
    assert not [*problems(LearnerSection.model_validate({**GPUS, **ONE_SIZE, "ep": 6, "dispatcher": "hybridep"}))]


def test_the_package_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_shape(make_tiny_model(TinySizes(), tmp_path, seed=3))
    learner = LearnerSection.model_validate({**GPUS, "dispatcher": "deepep", "layers": "torch"})
    with pytest.raises(ConfigError, match="deep_ep is not installed here"):
        keywords(learner, shape)
    hybrid = learner.model_copy(update={"dispatcher": "hybridep"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "deep_ep" or None)
    assert keywords(learner, shape).model["moe_flex_dispatcher_backend"] == "deepep"
    with pytest.raises(ConfigError, match="deep_ep here has no hybrid_ep_cpp; install that of the branch hybrid-ep"):
        keywords(hybrid, shape)


def test_the_one_of_equal_lengths_is_no_choice() -> None:
    with pytest.raises(ValueError, match="'alltoall', 'deepep' or 'hybridep'"):
        LearnerSection.model_validate({"dispatcher": "allgather"})


class Event:
    """No stream, so nothing to wait for."""

    def __init__(self, *_: object) -> None: ...

    def current_stream_wait(self) -> None: ...


class Buffer:
    """Every rank of ``group`` calls each method."""

    def __init__(self, group: dist.ProcessGroup, *_: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, 0, 0

    @staticmethod
    def set_num_sms(count: int) -> None: ...

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 0, get_rdma_buffer_size_hint=lambda *_: 0)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, chosen: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Of ``chosen`` [t, k] experts: tokens by rank, by node and by expert, and whether a token goes to a rank."""
        ranks = self.group.size()
        goes = torch.stack([(chosen // (num_experts // ranks) == rank).any(1) for rank in range(ranks)], 1)
        return goes.sum(0), None, torch.bincount(chosen.flatten(), minlength=num_experts), goes, Event()

    def dispatch(
        self,
        x: Tensor,
        *,
        handle: Any = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Rows [n, h] that other ranks sent here, with the places among this rank's experts (-1: not here)."""
        if handle is not None:
            return self._exchanged([x[rows] for rows in handle[0]])[0], None, None, None, None, Event()
        rows = [column.nonzero()[:, 0] for column in is_token_in_rank.T]
        own = len(num_tokens_per_expert) // self.group.size()
        here = [topk_idx[each] // own == rank for rank, each in enumerate(rows)]
        found, counts = self._exchanged([x[each] for each in rows])
        places = [torch.where(mine, topk_idx[each] % own, -1) for mine, each in zip(here, rows, strict=True)]
        weights = [torch.where(mine, topk_weights[each], 0.0) for mine, each in zip(here, rows, strict=True)]
        got = self._exchanged(places)[0]
        numbers = [int((got == expert).sum()) for expert in range(own)]
        return found, got, self._exchanged(weights)[0], numbers, (rows, counts, len(x)), Event()

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **_: Any) -> tuple[Any, ...]:
        """The sum [t, h] of what the ranks made of each token."""
        return self._summed(x, handle), None if topk_weights is None else self._summed(topk_weights, handle), Event()

    def _summed(self, x: Tensor, handle: Any) -> Tensor:
        rows, counts, total = handle
        back = self._exchanged(x.split(counts))[0].split([len(each) for each in rows])
        out = x.new_zeros(total, *x.shape[1:])
        for each, part in zip(rows, back, strict=True):
            out.index_add_(0, each, part)
        return out

    def _exchanged(self, parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Sends the i-th part to the i-th rank; what all ranks sent here, and how many rows each."""
        sizes = torch.tensor([len(part) for part in parts])
        got = torch.empty_like(sizes)
        dist.all_to_all_single(got, sizes, group=self.group)
        counts = got.tolist()
        out = parts[0].new_empty(sum(counts), *parts[0].shape[1:])
        dist.all_to_all_single(out, torch.cat(list(parts)), counts, sizes.tolist(), group=self.group)
        return out, counts


class HybridEPBuffer:
    """DeepEP's of its branch hybrid-ep (deep_ep/hybrid_ep_buffer.py). Every rank of ``group`` calls each method, with
    as many tokens. A handle is the rows [n] of all ranks' tokens, their experts [n], and the tokens of a rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        **_: Any,
    ) -> None:
        self.group, self.width, self.most, self.own = group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        handle: Any = None,
        **given: Any,
    ) -> tuple[Any, ...]:
        """Rows [n, h] that this rank's experts take, expert by expert, with their probabilities [n] and counts."""
        assert given["scaling_factor"] is None
        assert hidden.shape == (self.most, self.width)  # no rank has a buffer for more, or sends less
        if handle is None:
            assert routing_map.dtype == torch.bool
            assert probs.dtype == torch.float32
            assert num_of_experts_per_rank == self.own
            mine = slice(self.group.rank() * self.own, (self.group.rank() + 1) * self.own)
            experts, rows = self._gathered(routing_map)[:, mine].T.nonzero(as_tuple=True)
            handle = (rows, experts + mine.start, routing_map.shape[1])
        rows, experts, _ = handle
        counts = torch.bincount(experts - self.group.rank() * self.own, minlength=self.own)
        weights = None if probs is None else self._gathered(probs)[rows, experts]
        return self._gathered(hidden)[rows], weights, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: Any, probs: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The sum [t, h] of what the ranks made of each token, and its experts' probabilities [t, E]."""
        rows, experts, total = handle
        out = hidden.new_zeros(self.group.size() * self.most, self.width).index_add(0, rows, hidden)
        if probs is None:
            return self._share(out), None
        return self._share(out), self._share(probs.new_zeros(len(out), total).index_put((rows, experts), probs))

    def _gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out

    def _share(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x.chunk(self.group.size())[self.group.rank()]


def install_deep_ep() -> None:
    """Make this process find the package, and megatron, which has been imported, use it."""
    import megatron.core.transformer.moe.fused_a2a as fused
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    for name in ("deep_ep", "deep_ep.utils", "hybrid_ep_cpp"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["deep_ep"].__dict__.update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer)
    sys.modules["deep_ep.utils"].__dict__.update(EventHandle=Event, EventOverlap=Event)
    importlib.reload(fused)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(dispatcher, name, getattr(fused, name))
