"""Shards in a world of one: what a checkpoint holds of TransformerEngine's state, and what is said where one fails."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from rl_megatron.config.run import TinyModelSection
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import CheckpointError
from rl_megatron.learner import checkpoint, world
from rl_megatron.learner.megatron import make_policy
from rl_megatron.learner.model.layers import GroupedColumnLinear, RMSNorm
from rl_megatron.learner.trained import MegatronLearner
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.layouts.families import read_shape

SECTION = LearnerSection()


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TinyModelSection(), tmp_path_factory.mktemp("models"), seed=3)


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    world.join(SECTION, rank=0, rendezvous=f"file://{tmp_path_factory.mktemp('world')}/rendezvous", seed=1)
    yield
    world.leave()
    torch.set_num_threads(threads)


@pytest.fixture
def like_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose state has TransformerEngine's names: a norm's ``_extra_state``, a grouped linear's 0 to n - 1, which
    it merges, and refuses in parts (its extensions/transformer_engine.py)."""
    plain = GroupedColumnLinear.sharded_state_dict
    begin = GroupedColumnLinear.__init__

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


def drawn(hf: Path, seed: int) -> MegatronLearner:
    made, generator = policy(hf), torch.Generator().manual_seed(seed)
    for tensor in made.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    made.adopt()
    return made


def save(learner: MegatronLearner, folder: Path) -> Path:
    folder.mkdir()
    assert learner.save(folder).keys() == {path.name for path in folder.iterdir()}
    return folder


def assert_same(one: MegatronLearner, other: MegatronLearner) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def test_torch_layers_go_on_from_transformer_engines_and_the_other_way(
    hf: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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


def test_a_full_disk_is_named_and_not_by_a_traceback(hf: Path, tmp_path: Path) -> None:
    learner = drawn(hf, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        (tmp_path / "full").mkdir()
        with pytest.raises(CheckpointError) as caught:
            learner.save(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path}/full cannot be written: File too large; free space" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(checkpoint._READS_WITHOUT_COMMON, reason="the megatron-core here reads both forms")
def test_a_checkpoint_of_a_newer_megatron_core_is_refused_with_what_reads_it(hf: Path, tmp_path: Path) -> None:
    folder = save(drawn(hf, 6), tmp_path / "newer")
    (folder / "common.pt").unlink()  # which it has among the shards, under this name
    with (folder / ".metadata").open("ab") as file:
        file.write(b"common_state")
    with pytest.raises(
        CheckpointError, match=r"has no common.pt: a megatron-core wrote it that is newer .* resume with"
    ):
        policy(hf).load(folder)


def test_shards_without_a_tensor_are_an_error_of_one_line(hf: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(hf, tmp_path / "weights")
    with pytest.raises(CheckpointError) as caught:
        policy(hf).load(tmp_path / "weights")  # no optimizer
    assert "megatron cannot load these shards into this layout" in str(caught.value)
    assert "optimizer" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
