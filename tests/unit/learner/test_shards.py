"""Shards in a world of one: what a checkpoint holds of TransformerEngine's state; and observers of a package."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from rl_megatron import feature
from rl_megatron.algorithms.auxiliary import ValueLoss
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.digests import digests
from rl_megatron.errors import CheckpointError, ConfigError, RLMegatronError, WeightError
from rl_megatron.features.lora.feature import LoraSection
from rl_megatron.features.lora.learner import LoraHooks, MergedPasses
from rl_megatron.features.replay.learner import Routing
from rl_megatron.learner import world
from rl_megatron.learner.checkpoint import loading
from rl_megatron.learner.megatron import make_critic, make_policy
from rl_megatron.learner.model.layers import GroupedColumnLinear, RMSNorm
from rl_megatron.learner.observers import installed_observers
from rl_megatron.learner.optimizer import optimizer_state
from rl_megatron.learner.trained import MegatronLearner
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability.metrics import documented
from rl_megatron.types import Loss, Metric, Samples, SkippedStep, StepResult
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import ragged_samples
from tests.samples import sequences_of
from tests.savings import assert_same_state, held_back, read_back

SECTION = LearnerSection()


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TinySizes(), tmp_path_factory.mktemp("models"), seed=3)


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    world.init_process_groups(
        SECTION, rank=0, rendezvous=f"file://{tmp_path_factory.mktemp('world')}/rendezvous", seed=1
    )
    yield
    world.destroy_process_groups()
    torch.set_num_threads(threads)


@pytest.fixture
def like_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose state has TransformerEngine's names: a norm's ``_extra_state``, a grouped linear's 0 to n - 1, which
    it merges, and refuses in parts (its extensions/transformer_engine.py)."""
    plain, begin = GroupedColumnLinear.sharded_state_dict, GroupedColumnLinear.__init__

    def state(self: Any) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def sharded(self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        out = plain(self, prefix, sharded_offsets, metadata)
        sizes, places = (tuple(offset[i] for offset in sharded_offsets) for i in (2, 1))
        for expert in range(self.num_gemms):
            name = f"{prefix}_extra_state{expert or ''}"
            where = (*sizes, self.num_gemms), (*places, expert)
            out[name] = ShardedObject(f"{prefix}_extra_state", state(self), *where, replica_id=(0, 0, 0))
        return out

    def merge(module: Any, found: dict[str, Any], prefix: str, *_: Any) -> None:
        names = [f"{prefix}_extra_state{expert or ''}" for expert in range(module.num_gemms)]
        held = [name for name in names if found.pop(name, None) is not None]
        assert not held or held == names, f"only {held}"
        if held:
            found[f"{prefix}_extra_state"] = state(module)

    def init(self: Any, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        self.register_load_state_dict_pre_hook(merge)

    monkeypatch.setattr(GroupedColumnLinear, "__init__", init)
    monkeypatch.setattr(GroupedColumnLinear, "sharded_state_dict", sharded)
    for layer in (RMSNorm, GroupedColumnLinear):
        monkeypatch.setattr(layer, "get_extra_state", state)
        monkeypatch.setattr(layer, "set_extra_state", lambda *_: None)


def policy(hf: Path) -> MegatronLearner:
    return make_policy(read_shape(hf), SECTION, torch.device("cpu"), temperature=1.0)


def drawn(hf: Path, seed: int, made: MegatronLearner | None = None) -> MegatronLearner:
    made, generator = made or policy(hf), torch.Generator().manual_seed(seed)
    for tensor in made.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    made.adopt()
    return made


def save(learner: MegatronLearner, folder: Path) -> Path:
    folder.mkdir()
    assert learner.save(folder).keys() == {path.name for path in folder.iterdir()}
    return folder


def train(learner: MegatronLearner, steps: int, loss: Loss = CrossEntropy()) -> None:  # noqa: B008
    samples = ragged_samples(3, torch.Generator().manual_seed(4))
    zeros = torch.zeros(len(samples.input_ids))
    samples = replace(samples, old_values=zeros, returns=zeros + 1)
    for _ in range(steps):
        learner.backward([samples], loss, num_tokens=60, num_sequences=3)
        assert learner.step(1e-2).grad_norm > 0


def state(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """Copies of parameters, of their float32 weights, and of AdamW's state."""
    held = [(f"{name}", tensor) for name, tensor in learner.tensors.items()]
    return {
        name: t.clone()
        for name, t in [*held, *((f"{n}", t) for n, t in enumerate(optimizer_state(learner._optimizer)))]
    }


def test_what_is_written_while_training_goes_on_is_the_state_at_its_start(hf: Path, tmp_path: Path) -> None:
    learner, blocks = drawn(hf, 7), list[int]()
    train(learner, 1)
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        before = state(learner)
        with held_back():
            saving = learner.start_save(folder)
            train(learner, 3)
            assert not saving.is_written
            assert not list(folder.glob("*.distcp"))
        saving.wait()
        assert saving.is_written
        assert list(folder.glob("*.distcp"))
        files = saving.finalize().files
        assert files.keys() == {path.name for path in folder.iterdir()}
        assert files == digests(folder, files)
        blocks.append(learner._staged.num_bytes)
        loaded = policy(hf)
        loaded.load(folder)
        found = state(loaded)
        assert found.keys() == before.keys()
        for key, tensor in before.items():
            assert torch.equal(found[key], tensor), key
        assert any(not torch.equal(tensor, before[key]) for key, tensor in state(learner).items())
        loaded.load_weights(folder)  # of float32 the optimizer's copies, which are loaded last, are the weights
        for key, tensor in loaded.tensors.items():
            assert torch.equal(tensor, before[key]), key
    trained = sum(t.numel() for t in learner.tensors.values())
    assert blocks[0] == blocks[1]  # no save takes more memory than the one before
    assert 16 * trained <= blocks[0] < 16.1 * trained + 256 * 100  # weights, their copy and moments, all float32 here


def written(folder: Path) -> dict[str, bytes]:
    """Its files, but for .metadata, which has the offsets in shards, in the order of a set."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".metadata"}


@pytest.mark.skipif(loading.READS_WITHOUT_COMMON, reason="the megatron-core here has an object among the shards")
def test_a_planned_save_writes_the_bytes_of_one_planned_again_also_if_asynchronous(hf: Path, tmp_path: Path) -> None:
    """After a resume too, whichever kind made the plan; with frozen parameters, which have no state; and a critic's."""
    frozen = LearnerSection.model_validate({"router": {"frozen": True}})
    learners = {
        "policy": drawn(hf, 8),
        "frozen": drawn(hf, 9, make_policy(read_shape(hf), frozen, torch.device("cpu"), temperature=1.0)),
        "critic": drawn(hf, 10, make_critic(read_shape(hf), SECTION, torch.device("cpu"))),
    }
    for name, learner in learners.items():
        loss = ValueLoss(clip=0.2) if name == "critic" else CrossEntropy()
        learner.load(save(learner, tmp_path / f"{name} 0"))
        plan, found = learner._planned.plan, []
        assert plan is not None
        train(learner, 1, loss)
        for kind in ("planned", "apart", "fresh"):
            (folder := tmp_path / f"{name} {kind}").mkdir()
            if kind == "fresh":
                learner._planned.plan = None
            learner.start_save(folder, in_process=kind == "apart").finalize()
            found.append((written(folder), read_back(folder)))
            assert (learner._planned.plan is plan) == (kind != "fresh")
        assert [files for files, _ in found] == [found[0][0]] * 3, name
        assert found[0][0] != written(tmp_path / f"{name} 0")
        for _, tensors in found[1:]:
            assert_same_state(tensors, found[0][1])


@pytest.mark.skipif(loading.READS_WITHOUT_COMMON, reason="the megatron-core here has an object among the shards")
def test_a_plan_is_made_again_where_a_parameter_has_other_memory(hf: Path, tmp_path: Path) -> None:
    learner = drawn(hf, 9)
    save(learner, tmp_path / "first")
    chunk = learner._models[0]
    parameter = next(iter(chunk.parameters()))
    parameter.data = parameter.data.clone() + 1
    found = read_back(save(learner, tmp_path / "second"))
    assert learner._planned.num_created == 2
    name = next(name for name, tensor in chunk.named_parameters() if tensor is parameter)
    assert torch.equal(found[name], parameter)
    save(learner, tmp_path / "third")
    assert learner._planned.num_created == 2


def test_a_disk_that_is_full_while_a_thread_writes_is_named_by_who_waits_for_it(hf: Path, tmp_path: Path) -> None:
    learner, folder = drawn(hf, 9), tmp_path / "full"
    folder.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with held_back():
        saving = learner.start_save(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        saving._thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saving.is_written
    with pytest.raises(CheckpointError) as caught:  # there is room again, but not when it wrote
        saving.finalize()
    assert f"{folder} cannot be written: File too large; free space" in str(caught.value)
    again, fresh = save(learner, tmp_path / "again"), policy(hf)
    fresh.load(again)
    assert_same(fresh, learner)


def test_the_critics_save_waits_for_no_write_of_the_policys(hf: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "policy", tmp_path / "critic"]
    with held_back():
        saves = []
        for seed, folder in enumerate(folders):
            folder.mkdir()
            saves.append(drawn(hf, seed).start_save(folder))
        stuck = folders[0] / "__0_0.distcp"
        os.mkfifo(stuck)  # whoever opens it to write waits for a reader
    try:
        saves[1]._thread.join(30.0)
        assert [save.is_written for save in saves] == [False, True]
        assert saves[1].finalize().files == digests(folders[1], [path.name for path in folders[1].iterdir()])
    finally:
        stuck.read_bytes()
        saves[0].wait()


def assert_same(one: MegatronLearner, other: MegatronLearner) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def test_torch_layers_follow_engines_and_back(hf: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    ours = drawn(hf, 1)
    from_torch = save(ours, tmp_path / "torch")
    request.getfixturevalue("like_transformer_engine")
    theirs = drawn(hf, 2)
    names = theirs._models[0].sharded_state_dict()
    assert sum("_extra_state" in name for name in names) > 2 * 2 * 8  # of each expert's two linears, and of norms
    from_te = save(theirs, tmp_path / "te")
    for folder in (from_torch, from_te):
        assert b"_extra_state" not in (folder / ".metadata").read_bytes()
    fresh = policy(hf)
    fresh.load(from_torch)
    assert_same(fresh, ours)
    request.getfixturevalue("monkeypatch").undo()
    ours.load(from_te)
    assert_same(ours, theirs)


@pytest.mark.usefixtures("like_transformer_engine")
def test_a_converted_checkpoint_starts_layers_of_transformer_engine(hf: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(hf, tmp_path / "megatron")
    learner = drawn(hf, 4)
    learner.load_weights(tmp_path / "megatron")
    plain = policy(hf)
    plain.load_weights(tmp_path / "megatron")
    assert_same(learner, plain)


def test_a_model_does_not_start_from_an_embedding_or_an_output_layer_of_other_rows(hf: Path, tmp_path: Path) -> None:
    """Megatron loads the rows that are there, and leaves the others at 0."""
    shape = read_shape(hf)
    reward = make_policy(replace(shape, has_score_head=True), SECTION, torch.device("cpu"), temperature=1.0)
    convert.hf_to_megatron(hf, tmp_path / "megatron")
    reward.load_weights(tmp_path / "megatron")  # without its output layer
    scores = save(reward, tmp_path / "scores")
    reward.load_weights(scores, scored=True)
    more = replace(shape, vocab_size=2 * shape.vocab_size)
    larger = make_policy(more, SECTION, torch.device("cpu"), temperature=1.0)
    for model, folder, odd in (
        (policy(hf), scores, r"output_layer.weight has shape \(1, "),
        (reward, scores, r"output_layer.weight has shape \(1, "),  # by its config.json the folder is a policy's
        (larger, tmp_path / "megatron", "word_embeddings.weight has shape "),
    ):
        with pytest.raises(WeightError, match=odd):
            model.load_weights(folder)


def test_adapters_are_not_resumed_beside_another_model(hf: Path, tmp_path: Path) -> None:
    learner = make_policy(
        read_shape(hf), LearnerSection(lora=LoraSection(rank=2)), torch.device("cpu"), temperature=1.0
    )
    convert.hf_to_megatron(hf, tmp_path / "megatron")
    learner.load_weights(tmp_path / "megatron")
    (hooks,) = [one for one in learner._hooks if isinstance(one, LoraHooks)]
    hooks._base = "the one"
    saved = save(learner, tmp_path / "saved")
    learner.load(saved)
    hooks._base = "another"
    with pytest.raises(CheckpointError, match=r"saved holds adapters of another model than model.path: .* the one"):
        learner.load(saved)
    hooks._base = None  # random weights
    learner.load(saved)


def test_a_pass_that_fails_leaves_no_merged_weight() -> None:
    module = torch.nn.Linear(2, 2)
    linear: Any = SimpleNamespace(module=module, names=("weight",), merge=lambda: [torch.zeros(2, 2)])
    MergedPasses(module, [linear])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.ones(1, 3))
    assert "weight" not in vars(module)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize(("rank", "room"), [(None, 100_000), (2, 1)])  # the second: no room for lora.json
def test_a_full_disk_is_named_and_not_by_a_traceback(hf: Path, tmp_path: Path, rank: int | None, room: int) -> None:
    """The error is none by which a job comes back without the node: that has nothing to do with it."""
    section = LearnerSection(lora=LoraSection(rank=rank))
    learner = drawn(hf, 5, make_policy(read_shape(hf), section, torch.device("cpu"), temperature=1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        (tmp_path / "full").mkdir()
        with pytest.raises(CheckpointError) as caught:
            learner.save(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path}/full cannot be written: File too large; free space" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(loading.READS_WITHOUT_COMMON, reason="the megatron-core here reads both forms")
def test_a_checkpoint_of_a_newer_megatron_core_is_refused_with_what_reads_it(hf: Path, tmp_path: Path) -> None:
    folder = save(drawn(hf, 6), tmp_path / "newer")
    (folder / "common.pt").unlink()  # which it has among the shards, under this name
    with (folder / ".metadata").open("ab") as file:
        file.write(b"common_state")
    with pytest.raises(CheckpointError, match=r"has no common.pt: a megatron-core wrote it that is newer .* resume"):
        policy(hf).load(folder)


def test_shards_without_a_tensor_are_an_error_of_one_line(hf: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(hf, tmp_path / "weights")
    with pytest.raises(CheckpointError) as caught:
        policy(hf).load(tmp_path / "weights")  # no optimizer
    assert "megatron cannot load these shards into this layout" in str(caught.value)
    assert "optimizer" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# An observer of an installed package: one file outside of this one, which sees every step of a model.
OBSERVER = """
import contextlib
from rl_megatron.types import Metric

class Passes:
    def __init__(self, models, shape, device):
        self.count = 0
        for model in models:
            model.register_forward_pre_hook(self.one_more)

    def one_more(self, *_):
        self.count += 1

    @contextlib.contextmanager
    def unseen(self):
        kept = self.count
        yield
        self.count = kept

    def read(self):
        seen, self.count = self.count, 0
        return {"NAME": Metric(value=float(seen), reduction="sum")}
"""


@pytest.fixture(autouse=True)
def own_packages() -> Iterator[None]:
    """Those that a test installs, and no other."""
    installed_observers.cache_clear()
    yield
    installed_observers.cache_clear()


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    text: str,
    entry: str = "[rl_megatron.observers]\npasses = {}:Passes\n",
) -> None:
    """As pip leaves a package that has the entry point."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry.format(module))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


def observed(hf: Path) -> MegatronLearner:
    learner = make_policy(read_shape(hf), SECTION, torch.device("cpu"), temperature=1.0)
    for tensor in learner.tensors.values():
        tensor.normal_(0, 0.1)
    learner.adopt()
    return learner


# A feature of an installed package: its key turns on a side that acts in a rank's passes and steps.
FEATURE = """
from dataclasses import replace

from rl_megatron.feature import Feature, LearnerHooks
from rl_megatron.section import NonNegative, Section
from rl_megatron.types import Metric

class EchoKeys(Section):
    echo: NonNegative = 0

class Echo(LearnerHooks):
    def __init__(self, built):
        self.factor, self.seen = built.learner.echo, 0

    def pack(self, packed, samples):
        return replace(packed, extras={**packed.extras, "echo": len(samples.input_ids)})

    def after_loss(self, micro_batch, num_tokens):
        self.seen += micro_batch.extras["echo"]
        return {}

    def norm(self):
        return float("nan") if self.seen > 20 else 0.0

    def step(self, learning_rate):
        return {"echo/positions": Metric(value=float(self.factor * self.seen))}

FEATURE = Feature(
    name="echo", active=lambda learner: learner.echo > 0, keys={"learner": EchoKeys}, learner="my_echo:Echo"
)
"""


def test_an_installed_feature_acts_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    install(tmp_path, monkeypatch, "my_echo", FEATURE, "[rl_megatron.features]\necho = {}:FEATURE\n")
    monkeypatch.setattr(feature, "features", cache(feature.features.__wrapped__))
    section = feature.with_features("learner")(LearnerSection.__bases__[-1])
    results = list[Any]()
    for keys in ({}, {"echo": 3}):
        learner = make_policy(read_shape(hf), section.model_validate(keys), torch.device("cpu"), temperature=1.0)
        for tensor in learner.tensors.values():
            tensor.fill_(0.01)
        learner.adopt()
        for _ in range(2):
            learner.backward([samples()], CrossEntropy(), num_tokens=6, num_sequences=1)
            results.append(learner.step(1e-3))
    assert [one.observer_metrics.get("echo/positions") for one in results[:3]] == [None, None, Metric(value=18.0)]
    learner.backward([samples()] * 2, CrossEntropy(), num_tokens=12, num_sequences=2)
    assert isinstance(learner.step(1e-3), SkippedStep), "its norm is not finite"


def samples() -> Samples:
    return sequences_of([6], input_ids=torch.arange(6), targets=torch.arange(6))


def test_it_sees_steps_alone_and_its_number_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    install(tmp_path, monkeypatch, "my_observer", OBSERVER.replace("NAME", "observer/passes"))
    learner = observed(hf)
    for _ in range(2):
        learner.backward([samples()] * 2, CrossEntropy(), num_tokens=12, num_sequences=2)
        learner.score([samples()], frozenset({"logprobs"}))
    result = learner.step(1e-3)
    assert isinstance(result, StepResult)
    assert result.observer_metrics["observer/passes"] == Metric(value=4.0, reduction="sum")
    assert "moe/load_imbalance" in result.observer_metrics
    assert documented("observer/passes") is not None


def test_a_pass_that_fails_leaves_nothing_recorded(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = observed(hf)
    (routing,) = (one for one in learner._hooks if isinstance(one, Routing))
    monkeypatch.setattr(type(learner._head), "scores", Mock(side_effect=RuntimeError("no memory left")))
    with pytest.raises(RuntimeError, match="memory"):
        learner.score([samples()], frozenset({"routes"}))
    assert not routing._recorded
    assert {router.router_replay_action for router in routing._every} == {None}


def test_experts_without_tokens_are_those_of_the_routes(hf: Path) -> None:
    learner = observed(hf)
    said = learner.score([samples()], frozenset({"routes"}))
    assert said is not None
    (routes,) = said["routes"]  # [N, layers, k]
    learner.backward([samples()], CrossEntropy(), num_tokens=6, num_sequences=1)
    result = learner.step(0.0)
    assert isinstance(result, StepResult)
    experts = read_shape(hf).num_experts
    alive = [len(routes[:, layer].unique()) / experts for layer in range(routes.shape[1])]
    assert 0 < result.observer_metrics["moe/dead_experts"].value == pytest.approx(1 - sum(alive) / len(alive))


def test_a_name_that_is_not_an_observers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    install(tmp_path, monkeypatch, "my_liar", OBSERVER.replace("NAME", "grad_norm"))
    learner = observed(hf)
    learner.backward([samples()], CrossEntropy(), num_tokens=6, num_sequences=1)
    with pytest.raises(RLMegatronError, match=r"'passes' of an installed package returned 'grad_norm'.*'observer/'"):
        learner.step(1e-3)


def test_one_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    install(tmp_path, monkeypatch, "my_broken", "raise OSError('no libfoo')")
    with pytest.raises(ConfigError, match=r"'passes' that my_broken brings .*OSError\('no libfoo'\)"):
        observed(hf)


def test_a_step_without_a_backward_pass_is_refused(hf: Path) -> None:
    with pytest.raises(RLMegatronError, match="call backward before step"):
        observed(hf).step(1e-3)


def test_a_model_is_asked_for_what_it_can_say(hf: Path) -> None:
    said = r"\['entropy', 'logit_norms', 'logits', 'logprobs', 'top'\] of a position, not \['values'\]"
    with pytest.raises(RLMegatronError, match=said):
        observed(hf).score([samples()], frozenset({"values", "logprobs"}))
