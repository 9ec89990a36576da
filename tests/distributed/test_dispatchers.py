"""Sending tokens to experts: `learner.dispatcher`, and shared experts that compute meanwhile.

DeepEP and HybridEP need GPUs; `in_place_of_deep_ep` sends for them over gloo, behind megatron's own calls.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.options.dispatcher import Dispatcher
from rl_megatron.options.table import problems
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import run_ranks
from tests.distributed.test_overlap import make, make_batch, train
from tests.family_models import save_model

GPUS = {"device": "cuda", "dtype": "bfloat16", "ep": 2}
ONE_SIZE: dict[str, Any] = {"max_tokens_per_micro_batch": 128, "padding": {"tokens": "128"}}
SHARED: dict[str, dict[str, Any]] = {"ep2": {"ep": 2}, "tp2-ep2": {"tp": 2, "ep": 2}, "tp2-etp2": {"tp": 2, "etp": 2}}


def steps(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> dict[str, Any]:
    """Loss, norm and log-probs of some steps, and the classes of dispatchers."""
    policy, batch = make(folder, learner, rank, device), make_batch(learner)
    used = [m.token_dispatcher for m in policy._models[0].modules() if hasattr(m, "token_dispatcher")]
    used += [d._comm_manager for d in used if hasattr(d, "_comm_manager")]
    kinds = {type(part).__name__ for part in used}
    return {"steps": train(policy, batch, learner.dims.dp_rank(rank), scored=True), "kinds": sorted(kinds)}


def rank_main(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron as megatron
    from rl_megatron.learner import world
    from tests.distributed import in_place_of_deep_ep

    found: dict[str, Any] = {}
    for layout, degrees in SHARED.items():
        learner = LearnerSection.model_validate(degrees)
        device = world.join(learner, rank=rank, rendezvous=f"file://{root}/rendezvous-{layout}", seed=1)
        for overlaps in (False, True):
            keys = {**degrees, "overlap": {"shared_experts": overlaps}}
            found[f"{layout}, {overlaps}"] = steps(root / "shared", LearnerSection.model_validate(keys), rank, device)
        if layout == "ep2":
            found["alltoall"] = steps(root / "experts", learner, rank, device)
            in_place_of_deep_ep.install()
            original, shape = megatron.make_config, read_shape(root / "experts")
            for name, more in (("deepep", {}), ("hybridep", ONE_SIZE)):
                on_gpus = LearnerSection.model_validate({**GPUS, **more, "dispatcher": name})
                keywords = Dispatcher().megatron(on_gpus, shape).model

                def with_kernels(*given: Any, make: Any = original, keywords: Any = keywords) -> Any:
                    config = make(*given)
                    for key, value in keywords.items():
                        setattr(config, key, value)
                    return config

                megatron.make_config = with_kernels
                found[name] = steps(root / "experts", LearnerSection.model_validate({**degrees, **more}), rank, device)
            megatron.make_config = original
        world.leave()
    (root / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says."""
    root = tmp_path_factory.mktemp("dispatchers")
    (root / "made").mkdir()
    make_tiny_model(TinySizes(num_layers=2), root / "made", seed=3).rename(root / "experts")
    save_model("glm4_moe", root / "shared", num_hidden_layers=2)
    run_ranks(rank_main, 2, root)
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for (loss, norm, *said), (other, other_norm, *also) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(other, rel=1e-5, abs=1e-7)
        assert norm == pytest.approx(other_norm, rel=1e-4)
        for mine, theirs in zip(said, also, strict=True):
            for one, another in zip(mine or [], theirs or [], strict=True):
                assert one == pytest.approx(another, abs=2e-4)


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_kernels_train_as_all_to_all_does(name: str, seen: Any) -> None:
    manager = {"deepep": "_DeepepManager", "hybridep": "_HybridEPManager"}[name]
    for rank in seen:
        assert rank[name]["kinds"] == ["MoEFlexTokenDispatcher", manager]
        assert rank["alltoall"]["kinds"] == ["MoEAlltoAllTokenDispatcher"]
        assert_same(rank[name]["steps"], rank["alltoall"]["steps"])


@pytest.mark.parametrize("layout", SHARED)
def test_shared_experts_that_overlap_are_the_same(layout: str, seen: Any) -> None:
    for rank in seen:
        assert_same(rank[f"{layout}, True"]["steps"], rank[f"{layout}, False"]["steps"])


@pytest.mark.parametrize(
    ("name", "keys", "why"),
    [
        ("deepep", {"dtype": "bfloat16", "ep": 2}, "its kernels need GPUs; set learner.dispatcher=alltoall"),
        ("deepep", {"device": "cuda", "ep": 2}, "its kernels send bfloat16"),
        ("deepep", {"device": "cuda", "dtype": "bfloat16"}, "no token leaves its rank; leave it out"),
        ("deepep", {**GPUS, "ep": 6}, "DeepEP has no settings for 6 ranks, only for 2, 4, 8, 16"),
        ("hybridep", {"dtype": "bfloat16", "ep": 2, **ONE_SIZE}, "its kernels need GPUs"),
        ("hybridep", GPUS, "null: its ranks exchange routing maps of equal length; set it to one size"),
        (
            "hybridep",
            {**GPUS, **ONE_SIZE, "padding": {"tokens": "64,128"}},
            "learner.padding.tokens=64,128: its ranks exchange routing maps",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(name: str, keys: dict[str, Any], why: str) -> None:
    (said,) = problems(LearnerSection.model_validate({**keys, "dispatcher": name}))
    assert said.startswith(f"learner.dispatcher={name}")
    assert why in said


def test_hybridep_takes_chunks_of_a_ranks_tokens() -> None:
    keys = {**GPUS, **ONE_SIZE, "tp": 4, "dispatcher": "hybridep"}
    (said,) = problems(LearnerSection.model_validate(keys))
    assert "learner.padding.tokens=128, learner.tp=4 and learner.cp=1: its kernels take chunks of 64 tokens" in said
    assert said.endswith("round it up to a multiple of 256")


def test_hybridep_takes_groups_that_deepep_has_no_settings_for() -> None:
    assert not [*problems(LearnerSection.model_validate({**GPUS, **ONE_SIZE, "ep": 6, "dispatcher": "hybridep"}))]


def test_the_package_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_shape(make_tiny_model(TinySizes(), tmp_path, seed=3))
    learner = LearnerSection.model_validate({**GPUS, "dispatcher": "deepep"})
    with pytest.raises(ConfigError, match="deep_ep is not installed here"):
        Dispatcher().megatron(learner, shape)
    hybrid = learner.model_copy(update={"dispatcher": "hybridep"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "deep_ep" or None)
    assert Dispatcher().megatron(learner, shape).model["moe_flex_dispatcher_backend"] == "deepep"
    with pytest.raises(ConfigError, match="deep_ep here has no hybrid_ep_cpp; install that of the branch hybrid-ep"):
        Dispatcher().megatron(hybrid, shape)


def test_the_one_of_equal_lengths_is_no_choice() -> None:
    with pytest.raises(ValueError, match="'alltoall', 'deepep' or 'hybridep'"):
        LearnerSection.model_validate({"dispatcher": "allgather"})
