"""The recipes of large models: their first, middle and last stage build and step, and hold what the plan says.

Minutes each. `make test` does not run them, `pytest tests/recipes` does; CI runs the smallest.
"""

from __future__ import annotations

from typing import Any

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.models.named import NAMED
from rl_megatron.placement.names import LEARNER
from tests.recipes.collectives import collectives, layers_of, uncounted
from tests.recipes.dry_run import counted_micro_batches, dry_runs
from tests.unit.launcher.test_memory import RECIPES
from tools.planner.memory import footprints

FILES = ["data.train=train.jsonl", "data.eval=test.jsonl", "model.path=/models/given"]

HERE = [
    "learner.offload.optimizer=0",
    "learner.offload.while_sampling=null",
    "learner.layers=torch",
]  # there is no other device


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_stages_build_step_and_hold_what_is_planned(recipe: str) -> None:
    """Takes 1 to 15 minutes on an idle core a stage."""
    config = load_config(recipe, [*FILES, *HERE])
    name = config.model.name
    assert name is not None
    shape, d = NAMED[name], config.learner.dims
    stages = sorted({0, d.pp // 2, d.pp - 1})
    planned = {found.stage: found.terms for found in reversed(footprints(config, shape)) if found.role == LEARNER}
    for run in dry_runs(config, name, [stage * d.world_size // d.pp for stage in stages]):
        terms: dict[str, Any] = dict(planned[run.stage])
        assert run.parameters == terms["parameters"]
        assert run.gradients == pytest.approx(terms["gradients"], rel=1e-6)  # dp 12 pads their buffers
        assert run.optimizer == pytest.approx(terms["optimizer"], rel=1e-4)  # a count of steps for each tensor
        assert run.passes == pytest.approx(terms["activations"] + terms["logits"], rel=0.03)
        learner = config.learner
        layers = layers_of(learner, shape, run.stage)
        micro_batches = counted_micro_batches(learner)
        found = collectives(learner, shape, run.stage, terms, layers=layers, micro_batches=micro_batches)
        counted = {kind: sent for kind, (_, sent) in run.collectives.items()}
        assert not uncounted(learner, shape)
        assert found.keys() <= counted.keys()
        # the form leaves out experts' counts of tokens, which are all that tp 1 reduces
        assert {kind: found.get(kind, 0.0) for kind in counted} == {
            kind: pytest.approx(sent, rel=0.03, abs=1e5) for kind, sent in counted.items()
        }
