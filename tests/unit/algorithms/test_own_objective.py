"""An objective of the user's own: the page's GMPO beside the row, and what is refused before a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_megatron.algorithms import own
from rl_megatron.algorithms.own import check_own_objective
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.update import Update
from tests.documents import blocks
from tests.property.test_losses_metrics import batch
from tests.rows import changed, policy_loss
from tests.toy_roles import VOCABULARY, Toy, table
from tests.unit.training.test_update_oracle import groups

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
FAULTY = """
import torch

def none(inputs):
    return torch.zeros_like(inputs.mask)

def not_a_function_of(log_ratio, inputs):
    return log_ratio, inputs.mask

def raising(log_ratio, inputs, lengths, row):
    raise KeyError("a key")

def one_number(log_ratio, inputs, lengths, row):
    return -(log_ratio * inputs.advantages).mean(), none(inputs)

def no_limits(log_ratio, inputs, lengths, row):
    return -log_ratio.exp() * inputs.advantages

def wide(log_ratio, inputs, lengths, row):
    return -log_ratio.double(), none(inputs)

def roots(log_ratio, inputs, lengths, row):
    return -log_ratio.square().sqrt() * inputs.advantages, none(inputs)

def logs(log_ratio, inputs, lengths, row):
    return -log_ratio.exp() * inputs.advantages.abs().log(), none(inputs)

def detached(log_ratio, inputs, lengths, row):
    return -log_ratio.detach().exp() * inputs.advantages, none(inputs)

def across(log_ratio, inputs, lengths, row):
    return -(log_ratio - log_ratio.mean()).exp() * inputs.advantages, none(inputs)

def summed(log_ratio, inputs, lengths, row):
    return -inputs.segment_sum(log_ratio)[inputs.segment_ids], none(inputs)

def quadratic(log_ratio, inputs, lengths, row):
    return -inputs.advantages * log_ratio + log_ratio.square() * row.cap_low, none(inputs)

def plain(log_ratio, inputs, lengths, row):
    return -inputs.advantages * inputs.logprobs, none(inputs)

def here(log_ratio, inputs, lengths, row):
    sums = torch.zeros_like(lengths).index_add_(0, inputs.segment_ids, log_ratio.detach())
    return -(log_ratio + sums[inputs.segment_ids]) * inputs.advantages, none(inputs)

def so_far(log_ratio, inputs, lengths, row):
    ids = inputs.segment_ids
    before = torch.cat([ids[:1] - 1, ids[:-1]])
    sums = inputs.segment_sum((ids == before) * log_ratio.detach().roll(1))
    return -(log_ratio + sums[ids]) * inputs.advantages, none(inputs)

def more_often(log_ratio, inputs, lengths, row):
    if len(inputs.mask) < 13 and len(lengths) > 1:
        inputs.segment_sum(log_ratio.detach())
    return -log_ratio * inputs.advantages, none(inputs)

def less_often(log_ratio, inputs, lengths, row):
    if len(inputs.mask) == 13:
        inputs.segment_sum(log_ratio.detach())
    return -log_ratio * inputs.advantages, none(inputs)

number = 1.0
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (documented,) = blocks(PAGE, "python")
    (tmp_path / "gmpo_of_the_page.py").write_text(documented.text)
    (tmp_path / "faulty_objectives.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("clips", [(0.3297, 0.4918), (0.05, 0.1)])
def test_the_documented_gmpo_is_the_row_to_the_bit(clips: tuple[float, float]) -> None:
    """Loss, gradient and metrics, in the dtypes of tests and of runs."""
    keys = {"aggregation": "seq_mean_token_mean", "clip_low": clips[0], "clip_high": clips[1]}
    known = policy_loss(objective="gmpo", **keys)
    for dtype in (torch.float32, torch.float64):
        found = []
        for loss in (known, changed(known, objective="gmpo_of_the_page:gmpo")):
            inputs = batch([5, 9, 1, 3, 7, 4], 3, scale=0.6, dtype=dtype, kept=0.75)
            given = inputs.logprobs.detach().clone().requires_grad_()
            output = loss(replace(inputs, logprobs=given))
            found.append((output, torch.autograd.grad(output.loss, given)[0]))
        (here, slope), (own, its) = found
        assert torch.equal(here.loss, own.loss)
        assert torch.equal(slope, its)
        assert slope.any()
        assert all(torch.equal(here.metrics[name].value, own.metrics[name].value) for name in here.metrics)


def test_updates_by_the_documented_gmpo_are_the_rows_to_the_bit() -> None:
    """Weights after three steps of two epochs, so that ratios are clipped."""
    keys = ["train.minibatches=1", "train.epochs=2", "train.learning_rate=20.0", "learner.ep=1", "train.lr_decay=none"]
    own = "algorithm.objective=gmpo_of_the_page:gmpo"
    found = [trained(load_config("tiny_cpu", ["algorithm=gmpo", *keys, *more])) for more in ([], [own])]
    assert torch.equal(*(weights for weights, _ in found))
    assert found[0][1] == found[1][1]
    assert max(found[0][1]) > 0


def trained(config: RunConfig) -> tuple[torch.Tensor, list[float]]:
    """A toy's weights, and the share of clipped tokens in each step."""
    policy, unused = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = Roles(learners={"policy": policy}, frozen={}, engine=unused, weights=unused)
    update, engine = Update(config=config, roles=roles, attention_cost=0.0), table(VOCABULARY, VOCABULARY, seed=4)
    rows = [asyncio.run(update(groups(step, engine), step, Stopwatch())) for step in (3, 4, 5)]
    return policy.weights, [float(row["clip_fraction"] or 0) for row in rows]


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("faulty_objectives:nothing", {}, "'nothing' of faulty_objectives is not there"),
        ("faulty_objectives:number", {}, "is not a function"),
        ("not_a_module:gmpo", {}, "no module 'not_a_module'; install it or put its folder on PYTHONPATH"),
        ("faulty_objectives:not_a_function_of", {}, r"must take \(log_ratio, inputs, lengths, row\): too many"),
        ("faulty_objectives:raising", {}, "tried before the run, raised KeyError: 'a key'"),
        ("faulty_objectives:one_number", {}, r"13 positions; it returned \[\(torch.Size\(\[\]\)"),
        ("faulty_objectives:no_limits", {}, r"it returned \[\(torch.Size\(\[13\]\), torch.float32\)\]"),
        ("faulty_objectives:wide", {}, r"it returned \[\(torch.Size\(\[13\]\), torch.float64\)"),
        ("faulty_objectives:roots", {}, "gives a gradient of nan at log-ratio 0 and advantage 0.8"),
        ("faulty_objectives:logs", {}, "gives a loss of inf at log-ratio 0 and advantage 0, outside the mask"),
        ("faulty_objectives:detached", {}, "its losses have no gradient"),
        ("gmpo_of_the_page:gmpo", {"ratio_level": "sequence_sum"}, "unless algorithm.ratio_level is sequence_sum"),
        ("faulty_objectives:across", {}, "alone and .* beside others in the micro-batch, so it would change with the"),
        ("faulty_objectives:summed", {}, r"ValueError: a sum over a sequence .* give it values.detach\(\)"),
        ("faulty_objectives:quadratic", {"clip_low": 0.1}, r"clip_low=0.1 does nothing: .*:quadratic does not read it"),
        ("faulty_objectives:plain", {"ratio_level": "sequence"}, "ratio_level=sequence does nothing"),
        ("gmpo_of_the_page:gmpo", {"dual_clip": 3.0}, "dual_clip=3.0 does nothing.*set it to its default, null"),
    ],
)
def test_what_cannot_train_is_refused_before_the_run(name: str, keys: dict[str, object], reason: str) -> None:
    row = AlgorithmSection.model_validate({"objective": name, **keys})
    with pytest.raises(ConfigError, match=rf"(?s)algorithm\..*{reason}"):
        check_own_objective(row)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gmpo_of_the_page:gmpo", {"clip_low": 0.1, "clip_high": 0.5}),
        ("gmpo_of_the_page:gmpo", {"ratio_level": "turn"}),
        ("faulty_objectives:quadratic", {"cap_low": 0.1, "ratio_level": "sequence"}),
        ("faulty_objectives:plain", {}),
    ],
)
def test_what_can_train_is_not_refused(name: str, keys: dict[str, object]) -> None:
    check_own_objective(AlgorithmSection.model_validate({"objective": name, **keys}))


@pytest.mark.parametrize("name", ["here", "so_far", "more_often", "less_often"])
def test_what_would_change_with_the_context_parallel_degree_is_refused_above_one(name: str) -> None:
    row = AlgorithmSection(objective=f"faulty_objectives:{name}")
    check_own_objective(row, cp=1)
    with pytest.raises(ConfigError, match=rf"faulty_objectives:{name}.* with learner\.cp=2.* part of (a|the) sequence"):
        check_own_objective(row, cp=2)


@pytest.mark.parametrize("level", ["token", "sequence", "turn"])
def test_sums_over_ranks_are_taken_for_those_of_the_whole_sequence(level: str) -> None:
    """Of the lengths, of the ratio's level and of the objective itself."""
    row = AlgorithmSection.model_validate(
        {"objective": "gmpo_of_the_page:gmpo", "ratio_level": level, "aggregation": "seq_mean_token_mean"}
    )
    check_own_objective(row, cp=2)


def test_it_is_tried_on_what_a_run_may_give() -> None:
    """Log-probs of an engine are near the old ones, a reference's not far; one of four sequences trains no token,
    and one has the advantage of equal rewards, by which an objective may divide."""
    for inputs in own._made(AlgorithmSection.model_validate({"kl": {"coefficient": 0.1}})):
        assert inputs.ref_logprobs is not None
        assert float((inputs.rollout_logprobs - inputs.old_logprobs).abs().max()) < 0.1
        assert float((inputs.ref_logprobs - inputs.old_logprobs).abs().max()) < 1.5
        assert inputs.segment_ids[inputs.mask].unique().tolist() == [0, 1, 3]
        assert inputs.advantages[inputs.mask].sign().unique().tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("across", [], "so it would change with the packing"),
        ("here", ["learner.cp=2", "learner.ep=1"], "with learner.cp=2: a token's loss"),
    ],
)
def test_it_is_tried_where_the_update_is_made(name: str, keys: list[str], reason: str) -> None:
    config = load_config("tiny_cpu", ["algorithm=grpo", f"algorithm.objective=faulty_objectives:{name}", *keys])
    with pytest.raises(ConfigError, match=reason):
        Update(config=config, roles=Roles(learners={}, frozen={}, engine=None, weights=None), attention_cost=0.0)  # type: ignore[arg-type]


def test_keys_that_are_not_of_an_objective_are_refused_as_before() -> None:
    with pytest.raises(ConfigError, match=r"lam=0.5 does nothing"):
        load_config("tiny_cpu", ["algorithm=grpo", "algorithm.objective=mine:f", "algorithm.lam=0.5"])


def test_what_is_neither_known_nor_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be 'clip', .* or package.module:name of your own code"):
        load_config("tiny_cpu", ["algorithm.objective=clp"])
