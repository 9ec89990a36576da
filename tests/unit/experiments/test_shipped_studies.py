"""The studies of docs/studies: the cells that each has, and that the configuration of every one is accepted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from launcher.preflight.checks import preflight
from rl_megatron.experiments.cells import Cell, cells_of
from rl_megatron.experiments.study import read_study
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.checkpoints.upcycle import read_upcycling, upcycle

STUDIES = Path(__file__).parents[3] / "docs" / "studies"
SIZES = {
    "loss_and_rate": (4, 12),
    "moe_stability": (7, 35),
    "moe_stability_rates": (56, 56),
    "moe_stability_smoke": (4, 8),
    "sizes": (12, 24),
    "staleness": (2, 10),
    "turn_credit": (4, 20),
}


def cells(name: str, *more: str) -> list[Cell]:
    return cells_of(read_study(STUDIES / f"{name}.yaml", more))


def problems(cell: Cell, tmp_path: Path) -> list[str]:
    model = cell.config.model.model_copy(update={"cache_dir": tmp_path})
    return list(preflight(cell.config.model_copy(update={"model": model})).texts("problem"))


def test_every_study_is_listed_and_has_so_many_arms_and_cells() -> None:
    assert {path.stem for path in STUDIES.glob("*.yaml")} == SIZES.keys()
    for name, (arms, count) in SIZES.items():
        found = cells(name)
        assert (len({cell.arm for cell in found}), len(found)) == (arms, count), name


def test_the_arms_of_moe_stability_are_as_its_page_says(tmp_path: Path) -> None:
    found = cells("moe_stability")
    assert Counter(cell.seed for cell in found) == dict.fromkeys(range(5), 7)
    assert [cell.seed for cell in found[:7]] == [0] * 7
    first = {cell.arm: cell.config for cell in found[:7]}
    for arm, config in first.items():
        kind, loss, *replay = arm.split()
        tiny = config.model.tiny
        assert tiny.experts_per_token * tiny.expert_width == 32  # equal active width
        assert (tiny.num_experts, config.rollout.router_noise) == ((16, 0.1) if kind == "moe" else (1, 0.0))
        assert config.algorithm.routing_replay == (replay[0] if replay else "off")
        assert config.algorithm.ratio_level == ("sequence" if loss == "gspo" else "token")
        assert (config.algorithm.objective == "cispo") is (loss == "cispo")
        assert config.train.minibatches == 8
        assert config.train.route_flips
    assert [text for cell in found[:7] for text in problems(cell, tmp_path)] == []


@pytest.mark.parametrize("more", ["train.minibatches=16", "rollout.router_noise=0.3"])
def test_further_degrees_and_levels_are_other_cells_of_the_same_folder(more: str) -> None:
    plain, others = cells("moe_stability"), cells("moe_stability", more)
    same = {cell.folder for cell in plain} & {cell.folder for cell in others}
    dense = {cell.folder for cell in plain if cell.arm.startswith("dense")}
    assert same == (dense if "noise" in more else set())  # arms without experts have no noise in either
    assert {cell.folder.parent for cell in plain} == {cell.folder.parent for cell in others}


def test_sizes_start_from_folders_that_upcycling_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cells("sizes")
    assert {str(cell.config.model.path) for cell in found} == {
        f"runs/sizes_models/w{width}-e{experts}" for width in (32, 48, 64, 96) for experts in (4, 8, 16)
    }
    monkeypatch.chdir(tmp_path)
    spec = TinySizes(hidden_size=32, num_experts=1, experts_per_token=1, expert_width=16)
    dense = make_tiny_model(spec, tmp_path / "cache", seed=0)
    (tmp_path / "runs/sizes_models").mkdir(parents=True)
    upcycle(dense, Path("runs/sizes_models/w32-e4"), read_upcycling("experts=4,topk=2"))
    (smallest,) = (cell for cell in found if cell.arm == "width 32 of 4" and cell.seed == 0)
    assert problems(smallest, tmp_path) == []
