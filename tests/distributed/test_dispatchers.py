"""Sending tokens to experts: `learner.dispatcher`, and shared experts that compute meanwhile.

DeepEP needs GPUs; `in_place_of_deep_ep` sends for it over gloo, behind megatron's own calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_megatron.config.run import TinyModelSection
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.options.dispatcher import Dispatcher
from rl_megatron.options.table import problems
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import run_ranks
from tests.distributed.test_overlap import make, make_batch, train
from tests.family_models import save_model

GPUS = {"device": "cuda", "dtype": "bfloat16", "ep": 2}
SHARED: dict[str, dict[str, Any]] = {"ep2": {"ep": 2}, "tp2-ep2": {"tp": 2, "ep": 2}, "tp2-etp2": {"tp": 2, "etp": 2}}


def steps(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> dict[str, Any]:
    """Loss, norm and log-probs of some steps, and the classes of dispatchers."""
    policy, batch = make(folder, learner, rank, device), make_batch(learner)
    kinds = {type(m.token_dispatcher).__name__ for m in policy._models[0].modules() if hasattr(m, "token_dispatcher")}
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
            on_gpus = LearnerSection.model_validate({**GPUS, "dispatcher": "deepep"})
            keywords = Dispatcher().megatron(on_gpus, shape).model

            def with_deepep(*given: Any, make: Any = original, keywords: Any = keywords) -> Any:
                config = make(*given)
                for name, value in keywords.items():
                    setattr(config, name, value)
                return config

            megatron.make_config = with_deepep
            found["deepep"] = steps(root / "experts", learner, rank, device)
            megatron.make_config = original
        world.leave()
    (root / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says."""
    root = tmp_path_factory.mktemp("dispatchers")
    (root / "made").mkdir()
    make_tiny_model(TinyModelSection(num_layers=2), root / "made", seed=3).rename(root / "experts")
    save_model("glm4_moe", root / "shared")
    run_ranks(rank_main, 2, root)
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for (loss, norm, *said), (other, other_norm, *also) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(other, rel=1e-5, abs=1e-7)
        assert norm == pytest.approx(other_norm, rel=1e-4)
        for mine, theirs in zip(said, also, strict=True):
            for one, another in zip(mine or [], theirs or [], strict=True):
                assert one == pytest.approx(another, abs=2e-4)


def test_deepep_trains_as_all_to_all_does(seen: Any) -> None:
    for rank in seen:
        assert rank["deepep"]["kinds"] == ["MoEFlexTokenDispatcher"]
        assert rank["alltoall"]["kinds"] == ["MoEAlltoAllTokenDispatcher"]
        assert_same(rank["deepep"]["steps"], rank["alltoall"]["steps"])


@pytest.mark.parametrize("layout", SHARED)
def test_shared_experts_that_overlap_are_the_same(layout: str, seen: Any) -> None:
    for rank in seen:
        assert_same(rank[f"{layout}, True"]["steps"], rank[f"{layout}, False"]["steps"])


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"dtype": "bfloat16", "ep": 2}, "its kernels need GPUs; set learner.dispatcher=alltoall"),
        ({"device": "cuda", "ep": 2}, "its kernels send bfloat16"),
        ({"device": "cuda", "dtype": "bfloat16"}, "no token leaves its rank; leave it out"),
        ({"device": "cuda", "dtype": "bfloat16", "ep": 6}, "DeepEP has no settings for 6 ranks, only for 2, 4, 8, 16"),
    ],
)
def test_what_it_cannot_do_is_refused(keys: dict[str, Any], why: str) -> None:
    (said,) = problems(LearnerSection.model_validate({**keys, "dispatcher": "deepep"}))
    assert said.startswith("learner.dispatcher=deepep")
    assert why in said


def test_the_package_is_asked_for(tmp_path: Path) -> None:
    shape = read_shape(make_tiny_model(TinyModelSection(), tmp_path, seed=3))
    learner = LearnerSection.model_validate({**GPUS, "dispatcher": "deepep"})
    with pytest.raises(ConfigError, match="deep_ep is not installed here"):
        Dispatcher().megatron(learner, shape)


@pytest.mark.parametrize("name", ["allgather", "hybridep"])
def test_those_of_equal_lengths_are_no_choice(name: str) -> None:
    with pytest.raises(ValueError, match="'alltoall' or 'deepep'"):
        LearnerSection.model_validate({"dispatcher": name})
