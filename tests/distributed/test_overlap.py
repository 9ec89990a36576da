"""Communication that overlaps with computation, and dispatchers of tokens to experts: results are those without."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from rl_megatron.learner.keywords import keywords
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import Batch, SkippedStep
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples, run_ranks, worlds
from tests.family_models import save_model
from tests.rows import policy_loss
from tests.samples import share_of

STEPS, SEQUENCES, VOCABULARY, PUSHING = 3, 12, 61, 2
LOSS = policy_loss(objective="cispo", aggregation="token_mean")
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {"dp": 2}, "ep2": {"ep": 2}, "pp2-vpp2-dp2": {"pp": 2, "vpp": 2, "dp": 2}}
BUCKET = 3000  # parameters, where a case is to have several buckets
SEVERAL_BUCKETS = ("gradients", "both")
OVERLAPS: dict[str, dict[str, Any]] = {
    "none": {},
    "gradients": {"overlap": {"gradients": True}},
    "both, one bucket": {"overlap": {"gradients": True, "parameters": True}},
    "both": {"overlap": {"gradients": True, "parameters": True}},  # the last: it goes on with the weights of none
}
HEAD = {"head_dtype": "float32", "dtype": "bfloat16", "gradient_dtype": "bfloat16"}


def kinds(layout: str, **keys: Any) -> list[str]:
    """The kinds of overlap of a case; all of them only for data-parallel experts."""
    return list(OVERLAPS) if layout == "dp2" and not keys else ["none", "both"]


def section(layout: str, **keys: Any) -> LearnerSection:
    """Without clipping, which would multiply weights by a norm that buckets sum in another order."""
    return LearnerSection.model_validate({**LAYOUTS[layout], "optimizer": {"clip_grad": 0.0}, **keys})


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


@contextmanager
def buckets_of(name: str) -> Iterator[None]:
    """What is made inside has small buckets in the cases of several."""
    from rl_megatron.learner import trained

    size = BUCKET if name in SEVERAL_BUCKETS else None
    made = partial(trained.DistributedDataParallelConfig, bucket_size=size)
    with patch.object(trained, "DistributedDataParallelConfig", made):
        yield


def train(policy: Any, batch: Batch, dp: int, *, scored: bool) -> list[Any]:
    """Loss, norm and, if ``scored``, log-probs after each step. The last step leaves weights to be gathered."""
    seen: list[Any] = []
    counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    for _ in range(STEPS):
        said = policy.backward(batch.micro_batches[dp], LOSS, **counts)
        seen.append([said["loss"].value if said else None, policy.step(1e-2).grad_norm])
        if scored:
            found = policy.score(batch.micro_batches[dp], frozenset({"logprobs"}))
            seen[-1].append([x.tolist() for x in found["logprobs"]] if found else None)
    said = policy.backward(batch.micro_batches[dp], LOSS, **counts)
    seen.append([said["loss"].value if said else None, policy.step(1e-2).grad_norm])
    return seen


def differing(policy: Any, other: Any) -> int:
    theirs = other.tensors
    return sum(not torch.equal(tensor, theirs[name]) for name, tensor in policy.tensors.items())


def compare(
    model: Path, layout: str, keys: dict[str, Any], rank: int, device: torch.device, to: Path | None = None
) -> Any:
    """What each kind of overlap says of the same steps, and how its weights differ from those without; with a folder
    ``to`` to save in, what `after` says."""
    found: dict[str, Any] = {}
    plain: Any = None
    for name, overlap in OVERLAPS.items():
        if name not in kinds(layout, **keys):
            continue
        learner = section(layout, **keys, **overlap)
        with buckets_of(name):
            batch, policy = make_batch(learner), make(model, learner, rank, device)
        groups = [g for c in policy._trained for g in (*c.bucket_groups, *c.expert_parallel_bucket_groups)]
        gathers = [counted(group, "start_param_sync") for group in groups]
        scored = name in ("none", "both, one bucket")
        one: dict[str, Any] = {"steps": train(policy, batch, learner.dims.dp_rank(rank), scored=scored)}
        plain = plain or policy
        one |= {"buckets": len(groups), "gathers": [len(calls) for calls in gathers]}
        one["differ before"] = differing(policy, plain)
        policy.gather()
        one["differ"] = differing(policy, plain)
        if name == "both" and to is not None:
            one |= after(policy, plain, batch, learner.dims.dp_rank(rank), to)
        found[name] = one
    return found


def counted(owner: Any, name: str) -> list[int]:
    """Gets an entry at each call of the owner's method."""
    original, calls = getattr(owner, name), list[int]()

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(len(calls))
        return original(*arguments, **named)

    setattr(owner, name, call)
    return calls


def after(policy: Any, plain: Any, batch: Batch, dp: int, to: Path) -> dict[str, Any]:
    """A checkpoint right after a step, which the other loads; a skipped step; a pass whose gradients are dropped while
    they may still be reduced; two passes in a step."""
    row, counts = batch.micro_batches[dp], {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    for one in (policy, plain):
        one.backward(row, LOSS, **counts)
        one.step(1e-2)
    policy.save(to)
    wanted = {name: tensor.clone() for name, tensor in plain.tensors.items()}
    plain.load(to)
    held = plain.tensors
    loaded = sum(not torch.equal(tensor, held[name]) for name, tensor in wanted.items())
    bad = [replace(m, advantages=torch.full_like(m.advantages, torch.inf)) if not n else m for n, m in enumerate(row)]
    culprits = []
    for one in (policy, plain):
        one.backward(bad if dp == 0 else row, LOSS, **counts)
        skipped = one.step(1e-2)
        assert isinstance(skipped, SkippedStep)
        culprits.append([(c.data_rank, c.micro_batch) for c in skipped.culprits])
    dropped = []
    for one in (policy, plain):
        one.gather()
        kept = {name: tensor.clone() for name, tensor in one.tensors.items()}
        one.backward(row, LOSS, **counts)
        one.drop()
        one.gather()
        dropped.append(sum(not torch.equal(tensor, kept[name]) for name, tensor in one.tensors.items()))
    for one in (policy, plain):
        one.backward(row, LOSS, **counts)
    with pytest.raises(RLMegatronError, match="a step takes one backward pass"):
        policy.backward(row, LOSS, **counts)
    norms = [one.step(1e-2).grad_norm for one in (policy, plain)]
    policy.gather()
    later = {"norms": norms, "differ later": differing(policy, plain)}
    return {"loaded": loaded, "culprits": culprits, "dropped": dropped, **later}


def rank_main(rank: int, root: Path) -> None:
    for layout, _, device in worlds(rank, root, {layout: section(layout) for layout in LAYOUTS}):
        found = {"experts": compare(root / "experts", layout, {}, rank, device, root / f"saved-{layout}")}
        if layout == "dp2":
            for model in ("tied", "untied"):
                found[model] = compare(root / model, layout, HEAD, rank, device)
        (root / f"{layout}-{rank}.json").write_text(json.dumps(found))
    for name in ("none", "both") if rank < PUSHING else ():
        (root / f"pushed-{name}-{rank}.json").write_text(json.dumps(pushed(root, name, rank)))


def pushed(root: Path, name: str, rank: int) -> dict[str, int]:
    """Checksums of what the in-process engine of a rank holds after a push right after the third step."""
    from launcher.wire import Setup
    from launcher.worker.learner_rank import Worker

    learner = section("dp2", **OVERLAPS[name])
    config = load_config("tiny_cpu", ["rollout.slots=8"]).model_copy(update={"learner": learner})
    setup = Setup(
        config=config,
        model_folder=root / "experts",
        run_folder=root / f"run-{name}",
        rendezvous=f"file://{root}/rendezvous-{name}",
    )
    with buckets_of(name):
        worker, batch = Worker(setup, rank, None), make_batch(learner)
    for _ in range(STEPS):
        row = batch.micro_batches[learner.dims.dp_rank(rank)]
        share = share_of(row, learner.dims, rank, to_score=False)
        worker.backward("policy", share, LOSS, batch.num_tokens, batch.num_sequences)
        worker.step("policy", 1e-2)
    worker.stage(1)
    worker.commit(1)
    sums = worker.checksums()
    worker.close()
    return sums


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank of a layout says of every model."""
    root = tmp_path_factory.mktemp("overlap")
    (root / "made").mkdir()
    made = make_tiny_model(TinySizes(num_layers=4), root / "made", seed=3)
    made.rename(root / "experts")
    save_model("qwen2", root / "tied")
    save_model("qwen3", root / "untied")
    for layout in LAYOUTS:
        (root / f"saved-{layout}").mkdir()
    run_ranks(rank_main, 4, root)
    layouts = [*LAYOUTS, "pushed-none", "pushed-both"]
    return {layout: [json.loads(p.read_text()) for p in sorted(root.glob(f"{layout}-?.json"))] for layout in layouts}


CASES = [(layout, "experts", name) for layout in LAYOUTS for name in kinds(layout) if name != "none"]
CASES += [("dp2", model, "both") for model in ("tied", "untied")]


@pytest.mark.parametrize(("layout", "model", "name"), CASES)
def test_it_changes_no_bit(layout: str, model: str, name: str, seen: Any) -> None:
    for rank in seen[layout]:
        plain, ours = rank[model]["none"], rank[model][name]
        for (loss, norm, *scores), (wanted, wanted_norm, *wanted_scores) in zip(
            ours["steps"], plain["steps"], strict=True
        ):
            assert loss == wanted
            assert scores in ([], wanted_scores)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)
        assert ours["differ"] == 0


def test_buckets_end_where_they_are_told_to(seen: Any) -> None:
    for rank in seen["dp2"]:
        counts = {name: one["buckets"] for name, one in rank["experts"].items()}
        assert counts["none"] == counts["both, one bucket"] == 2  # of experts and of the others
        assert counts["both"] == counts["gradients"] > 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_overlap_a_step_gathers_each_bucket_once(layout: str, seen: Any) -> None:
    """Dense parameters and experts have an optimizer each, and in megatron both gather all buckets."""
    for rank in seen[layout]:
        gathers = rank["experts"]["none"]["gathers"]
        assert len(gathers) > 1
        assert set(gathers) == {STEPS + 1}


def test_weights_wait_for_the_next_pass_or_a_push(seen: Any) -> None:
    for rank in seen["dp2"]:
        assert rank["experts"]["gradients"]["differ before"] == 0
        assert rank["experts"]["both"]["differ before"] > 20
    assert seen["pushed-both"] == seen["pushed-none"]
    assert seen["pushed-both"][0] == seen["pushed-both"][1] != {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_and_skipped_and_dropped_steps_are_those_without_it(layout: str, seen: Any) -> None:
    """A checkpoint of many buckets is loaded into one."""
    for number, rank in enumerate(seen[layout]):
        one = rank["experts"]["both"]
        assert one["loaded"] == one["differ later"] == 0
        assert one["dropped"] == [0, 0]
        assert one["norms"][0] == pytest.approx(one["norms"][1], rel=1e-5)
        assert one["culprits"][0] == one["culprits"][1], number
    blamed = [place for rank in seen[layout] for place in rank["experts"]["both"]["culprits"][0]]
    assert [0, 0] in blamed


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
    return {"steps": train(policy, batch, learner.dims.dp_rank(rank), scored=True), "kinds": sorted(kinds)}


def dispatch_main(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron as megatron
    from rl_megatron.learner import world

    degrees = {"ep": 2}
    learner = LearnerSection.model_validate(degrees)
    device = world.join(learner, rank=rank, rendezvous=f"file://{root}/rendezvous", seed=1)
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
    world.leave()
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
