"""Losses of pairs, of the critic and of reward models against their formulas, and what of their keys is refused."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from rl_megatron import algorithms, types
from rl_megatron.algorithms.auxiliary import PAIR_LOSSES, KtoLoss, PreferenceLoss, ScoreLoss, ValueLoss
from rl_megatron.algorithms.losses import LossOutput, policy_loss
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.algorithm import PAIR_LOSS_NAMES, UNPAIRED, AlgorithmSection
from rl_megatron.data import packing
from rl_megatron.errors import ConfigError
from rl_megatron.training import credit
from rl_megatron.types import LossInputs
from tests.property.test_losses_metrics import batch
from tests.rows import PAIR_ROWS, pair_loss
from tests.samples import loss_inputs

BETA = 0.7
LENGTHS = [5, 9, 1, 3, 7, 4]
FREE = {"per_token": True, "reference_free": True}
Equation = Callable[[float, float], float]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def conservative(better: float, worse: float) -> float:
    """Equation 1 of the cDPO note: -(1 - e) log sigmoid(h) - e log sigmoid(-h)."""
    h = BETA * (better - worse)
    return -0.9 * log_sigmoid(h) - 0.1 * log_sigmoid(-h)


def simpo(better: float, worse: float) -> float:
    return -log_sigmoid(BETA * better - BETA * worse - 0.4)


def odds_ratio(better: float, worse: float) -> float:
    first, second = (math.exp(x) / (1 - math.exp(x)) for x in (better, worse))
    return -BETA * math.log(first / (first + second))


CASES: dict[str, tuple[PreferenceLoss, Equation]] = {
    "dpo": (pair_loss(BETA), lambda better, worse: -log_sigmoid(BETA * (better - worse))),
    "dpo beside NLL": (pair_loss(BETA, nll=0.2), lambda better, worse: -log_sigmoid(BETA * (better - worse))),
    "conservative dpo": (pair_loss(BETA, label_smoothing=0.1), conservative),
    "ipo": (pair_loss(BETA, loss="ipo", per_token=True), lambda b, w: (b - w - 1 / (2 * BETA)) ** 2),
    "hinge": (pair_loss(BETA, loss="hinge"), lambda better, worse: max(0.0, 1 - BETA * (better - worse))),
    "simpo": (pair_loss(BETA, **FREE, target_margin=0.4), simpo),
    "orpo": (pair_loss(BETA, loss="orpo", **FREE, nll=1.0), odds_ratio),
}


def evaluate(loss: PreferenceLoss, inputs: LossInputs) -> tuple[float, Tensor]:
    given = inputs.logprobs.detach().clone().requires_grad_()
    ref = None if loss.row.reference_free else inputs.ref_logprobs
    output = loss(replace(inputs, logprobs=given, ref_logprobs=ref))
    return output.loss.item(), torch.autograd.grad(output.loss, given)[0]


def check_equation(loss: PreferenceLoss, equation: Equation) -> None:
    """The loss is its equation, and its gradient the differences of that, over the trained tokens of three pairs, one
    answer of which is one token."""
    inputs, row = batch(LENGTHS, 3, scale=0.6, kept=0.75), loss.row
    inputs = replace(inputs, logprobs=inputs.logprobs - 1.2)  # all below 0, as log-probs are
    assert inputs.logprobs.max() < 0
    now, ref = inputs.logprobs.tolist(), [0.0] * 29 if row.reference_free else inputs.ref_logprobs.tolist()  # type: ignore[union-attr]
    sides = [[t for t in range(29) if inputs.segment_ids[t] == s and inputs.mask[t]] for s in range(6)]
    assert len(sides[2]) == 1

    def plain(logprobs: Sequence[float]) -> float:
        total = 0.0
        for first in range(0, 6, 2):
            sums = [math.fsum(logprobs[t] - ref[t] for t in sides[s]) for s in (first, first + 1)]
            total += equation(*(x / len(sides[first + i]) if row.per_token else x for i, x in enumerate(sums)))
            total -= row.nll * math.fsum(logprobs[t] for t in sides[first]) / len(sides[first])
        return total / 3

    found, gradient = evaluate(loss, inputs)
    assert found == pytest.approx(plain(now), rel=1e-12)
    step = 1e-5
    for t in range(29):
        up, down = (plain([*now[:t], now[t] + sign * step, *now[t + 1 :]]) for sign in (1, -1))
        assert gradient[t].item() == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("loss", "equation"), CASES.values(), ids=CASES)
def test_losses_are_their_equations_and_gradients_their_differences(loss: PreferenceLoss, equation: Equation) -> None:
    check_equation(loss, equation)


LABELS = [True, False, False, True, True, False]
WEIGHTS = {True: 1.5, False: 0.6}


@pytest.mark.parametrize("point", [0.0, 1.3])
@pytest.mark.parametrize("kept", [1.0, 0.75])
def test_kto_is_trls_loss_and_its_gradient_over_answers_with_labels(point: float, kept: float) -> None:
    """As TRL writes it: desirable answers apart from undesirable ones, then the mean over both, in float64."""
    inputs = batch(LENGTHS, 3, scale=0.6, kept=kept)
    ids, mask, returns = inputs.segment_ids, inputs.mask, torch.zeros(29, dtype=torch.float64)
    for number, label in enumerate(LABELS):
        returns[int((mask & (ids == number)).nonzero()[0])] = WEIGHTS[label] if label else -WEIGHTS[label]
    given, plain = (inputs.logprobs.detach().clone().requires_grad_() for _ in range(2))
    output = KtoLoss(beta=BETA, reference_point=point)(replace(inputs, logprobs=given, returns=returns))
    output.loss.backward()
    assert inputs.ref_logprobs is not None
    ratios = [(plain - inputs.ref_logprobs)[mask & (ids == number)].sum() for number in range(6)]
    chosen = torch.stack([r for r, label in zip(ratios, LABELS, strict=True) if label])
    rejected = torch.stack([r for r, label in zip(ratios, LABELS, strict=True) if not label])
    good, bad = 1 - (BETA * (chosen - point)).sigmoid(), 1 - (BETA * (point - rejected)).sigmoid()
    loss = torch.cat([WEIGHTS[True] * good, WEIGHTS[False] * bad]).mean()
    loss.backward()
    assert output.loss.item() == pytest.approx(loss.item(), abs=1e-12)
    assert given.grad is not None
    assert plain.grad is not None
    assert (given.grad - plain.grad).abs().max() < 1e-12
    margins = BETA * torch.cat([chosen - point, point - rejected])
    found = {name: metric.value.item() for name, metric in output.metrics.items()}
    wanted = {"margin": margins.mean().item(), "accuracy": (margins > 0).double().mean().item()}
    assert found["kl/reference"] == pytest.approx(point)
    assert {name: found[f"preference/{name}"] for name in wanted} == pytest.approx(wanted)
    assert 0 < wanted["accuracy"] < 1


def test_an_answer_without_a_trained_token_is_padding_for_kto() -> None:
    logprobs, ref = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True), torch.zeros(3)
    mask, returns = [True, False, True], torch.tensor([2.0, math.nan, -1.0])
    given = loss_inputs([1, 1, 1], mask, num_sequences=2, logprobs=logprobs, ref_logprobs=ref, returns=returns)
    output = KtoLoss(beta=1.0)(given)
    output.loss.backward()
    assert output.loss.item() == pytest.approx((2 / (1 + math.exp(-1)) + 1 / (1 + math.exp(2))) / 2)
    assert logprobs.grad is not None
    assert logprobs.grad[1] == 0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("nll=1",), "dpo.loss=kto with dpo.nll=1: kto has single answers, and nll is"),
        (("per_token=true",), "dpo.loss=kto with dpo.per_token=true: kto compares sums over tokens"),
        (("reference_free=true",), "dpo.loss=kto with dpo.reference_free=true: kto estimates the KL to a frozen model"),
        (("label_smoothing=0.1",), r"dpo.loss=kto with dpo.label_smoothing=0\.1: kto has single"),
        (("target_margin=1",), "dpo.target_margin=1 with dpo.loss=kto: the loss does not read it"),
        (("batch_size=1",), "dpo.loss=kto with dpo.batch_size=1: kto estimates the KL on each prompt with"),
        (("loss=dpo", "desirable_weight=2"), "weight=2 does nothing: with dpo.loss=dpo answers have no labels"),
        (("loss=ipo", "undesirable_weight=2"), "undesirable_weight=2 does nothing: with dpo.loss=ipo"),
        (("undesirable_weight=0",), "dpo.undesirable_weight=0: "),
    ],
)
def test_keys_that_single_answers_or_pairs_do_not_read_are_refused(keys: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("dpo_tiny", [*FILES, "dpo.loss=kto", *(f"dpo.{one}" for one in keys)])


FILES = ("data.type=files", "data.train=a.jsonl", "data.eval=b.jsonl")


@pytest.mark.parametrize(
    ("recipe", "keys", "said"),
    [
        ("tiny_cpu", ("algorithm.preference.loss=kto", "algorithm.preference.beta=1"), "set another loss, or job=dpo"),
        ("dpo_tiny", ("dpo.loss=kto",), "data.type=arithmetic: its problems have no labels; read files"),
        ("dpo_tiny", (*FILES, "dpo.loss=kto", "data.fields.rejected=worse"), "one labeled answer per row; leave it"),
        ("dpo_tiny", (*FILES, "dpo.loss=kto", "learner.draft.train=true"), "answers that the policy should avoid"),
        ("dpo_tiny", (*FILES, "dpo.loss=kto", "dpo.on_long=cut"), "dpo.on_long="),
    ],
)
def test_single_answers_are_refused_where_they_cannot_be(recipe: str, keys: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(recipe, keys)


def one_pair(better: float, worse: float, loss: PreferenceLoss) -> tuple[float, list[float]]:
    """Of answers of one token, under a reference of log-probs of 0."""
    inputs = replace(batch([1, 1], 0), logprobs=torch.tensor([better, worse]), ref_logprobs=torch.zeros(2))
    found, gradient = evaluate(loss, inputs)
    return found, gradient.tolist()


def test_a_margin_at_its_target_is_not_pulled_beyond_it() -> None:
    assert one_pair(-1.0, -3.0, pair_loss(0.25, loss="ipo")) == (0.0, [0.0, 0.0])
    assert one_pair(-1.0, -3.5, pair_loss(0.25, loss="ipo")) == (0.25, [1.0, -1.0])
    assert one_pair(-1.0, -6.0, pair_loss(0.25, loss="hinge")) == (0.0, [0.0, 0.0])
    assert one_pair(-1.0, -3.0, pair_loss(0.25, loss="hinge")) == (0.5, [-0.25, 0.25])
    found, (better, worse) = one_pair(-1.0, -3.0, pair_loss(0.25, target_margin=0.5, **FREE))
    assert found == pytest.approx(math.log(2))
    assert (better, worse) == (-0.125, 0.125)


def test_of_equal_answers_the_odds_ratio_has_the_loss_of_one_half_and_the_likelihood_its_own() -> None:
    """The gradient of log odds is 1/(1 - p)."""
    found, (better, worse) = one_pair(-math.log(4), -math.log(4), pair_loss(0.2, loss="orpo", nll=1.0, **FREE))
    assert found == pytest.approx(math.log(4) + 0.2 * math.log(2))
    assert (better, worse) == (pytest.approx(-1 - 0.2 / 2 / 0.75), pytest.approx(0.2 / 2 / 0.75))


def test_odds_of_certain_answers_are_finite() -> None:
    for better, worse in ((0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-1e-9, -200.0)):
        found, gradient = one_pair(better, worse, pair_loss(0.2, loss="orpo", **FREE))
        assert all(map(math.isfinite, (found, *gradient)))


def test_the_likelihood_term_is_reported_and_is_part_of_the_loss() -> None:
    inputs = replace(batch([1, 1], 0), logprobs=torch.tensor([-3.0, -3.0]), ref_logprobs=torch.tensor([-3.0, -3.0]))
    output = pair_loss(0.1, nll=0.5)(inputs)
    assert output.metrics["loss/nll"].value.item() == pytest.approx(1.5)
    assert output.loss.item() == pytest.approx(1.5 + math.log(2))
    assert "loss/nll" not in pair_loss(0.1)(inputs).metrics


def test_the_names_of_the_configuration_are_those_of_the_table() -> None:
    assert {*PAIR_LOSSES, *UNPAIRED} == set(PAIR_LOSS_NAMES)
    assert {"dpo", "dpo_norm", "ipo", "orpo", "simpo"} == set(PAIR_ROWS)


@pytest.mark.parametrize("key", ["dpo", "algorithm.preference"])
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("loss=ipo", "target_margin=1"), "target_margin=1 with KEY.loss=ipo: the loss does not read it; set it to 0,"),
        (("loss=my:own", "target_margin=1"), "target_margin=1 with KEY.loss=my:own: the loss does not read it"),
        (("loss=orpo", "per_token=true"), "loss=orpo with KEY.reference_free=false: it compares .*; set both to true"),
        (("loss=orpo", "reference_free=true"), "loss=orpo with KEY.per_token=false: it compares .*; set both to true"),
        (("loss=slic",), "loss='slic': must be 'dpo', 'ipo', 'hinge', 'orpo' or 'kto' .*or package.module:name of you"),
        (("label_smoothing=0.5",), "KEY.label_smoothing=0.5: "),
    ],
)
def test_keys_that_a_loss_does_not_read_are_refused(key: str, keys: Sequence[str], said: str) -> None:
    recipe = "dpo_tiny" if key == "dpo" else "tiny_cpu"
    given = [f"{key}.{one}" for one in (*keys, "beta=0.1")]
    with pytest.raises(ConfigError, match=said.replace("KEY", key)):
        load_config(recipe, given)


def test_former_keys_that_were_off_stand_in_an_older_runs_config_and_change_nothing(tmp_path: Path) -> None:
    """A job that comes back after an upgrade goes on by the config.yaml of its run, which names every key."""
    older = tmp_path / "config.yaml"
    older.write_text("defaults: [tiny_cpu]\nalgorithm: {preference_beta: null, preference_per_token: false}\n")
    assert load_config(str(older), []) == load_config("tiny_cpu", [])
    older.write_text("defaults: [tiny_cpu, {algorithm: dpo}]\nalgorithm: {preference_beta: 0.2}\n")
    assert load_config(str(older), []) == load_config("tiny_cpu", ["algorithm=dpo", "algorithm.preference.beta=0.2"])


@pytest.mark.parametrize(
    ("recipe", "keys", "said"),
    [
        ("dpo_tiny", ["dpo.reference_free=true", "algorithm.kl.reference=/given"], "no reference is loaded; keep one"),
        ("dpo_tiny", ["dpo.reference_free=true", "roles.reference=separate"], "the algorithm has no reference"),
        ("tiny_cpu", ["algorithm=simpo", "roles.reference=separate"], "the algorithm has no reference"),
        ("tiny_cpu", ["algorithm=simpo", "algorithm.kl.reference=/given"], "and job=rl no reference is loaded"),
        ("tiny_cpu", ["algorithm=simpo", "algorithm.kl.coefficient=0.1"], "set algorithm.kl.coefficient=0"),
        ("tiny_cpu", ["algorithm.preference.nll=0.1"], "with algorithm.preference.beta=null the run does not train"),
    ],
)
def test_what_has_nothing_to_act_on_is_refused(recipe: str, keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(recipe, keys)


def test_a_column_that_the_batch_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="returns"):
        ValueLoss()(loss_inputs([1], [True], values=torch.ones(1)))
    with pytest.raises(ValueError, match="ref_logprobs"):
        pair_loss(0.1)(loss_inputs([1, 1], [True, True]))


@pytest.mark.parametrize("without", [0, 1], ids=["chosen", "rejected"])
def test_a_pair_without_a_trained_token_on_one_side_is_padding(without: int) -> None:
    sides = [side == without for side in (0, 1)]
    mask = [not sides[0], not sides[0], not sides[1], True, True]
    logprobs, ref = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0], requires_grad=True), torch.zeros(5)
    batch = loss_inputs([2, 1, 1, 1], mask, num_sequences=2, logprobs=logprobs, ref_logprobs=ref)
    output = pair_loss(1.0)(batch)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert output.metrics["preference/margin"].value.item() == pytest.approx(1.0)
    assert logprobs.grad[:3].tolist() == [0.0] * 3


def test_a_policy_that_is_its_own_critic_adds_its_value_loss_by_the_coefficient() -> None:
    """Of two tokens, one has -2 log pi of 2, and of the value loss, whose clip acts on the second, a quarter counts."""
    choices = {"objective": "reinforce", "credit": "gae", "advantage_mean": "none", "advantage_std": "none"}
    critic = {"backbone": "policy", "coefficient": 0.25, "clip": 0.2}
    row = AlgorithmSection.model_validate({**choices, "critic": critic})
    loss = policy_loss(row, kl_coefficient=0.0, max_new_tokens=1)
    logprobs, values = (torch.tensor(x, requires_grad=True) for x in ([-1.0, -3.0], [1.0, 1.0]))
    columns = {"values": values, "old_values": torch.tensor([0.5, 0.5]), "returns": torch.tensor([0.0, 2.0])}
    batch = loss_inputs([2], [True, True], logprobs=logprobs, **columns)
    output = loss(replace(batch, advantages=torch.tensor([2.0, 0.0])))
    output.loss.backward()
    of_values = (1 + 1.69) / 2 / 2
    assert output.loss.item() == pytest.approx(2 / 2 + 0.25 * of_values)
    assert output.metrics["critic/loss"].value.item() == pytest.approx(of_values)
    assert not output.metrics["critic/loss"].value.requires_grad
    assert {"clip_fraction", "critic/value_mean", "critic/clip_fraction"} <= output.metrics.keys()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 0.0])
    assert values.grad.tolist() == pytest.approx([0.25 * 0.5, 0.0])


# A reward model's loss against its formula over pairs, whose gradient autograd takes.
SCORED_LENGTHS = [2, 3, 1, 2, 4, 1]  # three pairs
ENDS = torch.tensor(SCORED_LENGTHS).cumsum(0) - 1
MARGINS = torch.tensor([0.5, 0.0, -0.25])
CENTRING = 0.1


def values() -> Tensor:
    """NaN wherever no score is read."""
    found = torch.full((sum(SCORED_LENGTHS),), math.nan)
    found[ENDS] = torch.tensor([0.3, -0.2, 1.5, 2.0, -1.0, -1.25])
    return found


def score_loss(given: Tensor, kept: list[bool]) -> LossOutput:
    """Of the pairs that are ``kept``; others are masked out, as sequences that fill up a micro-batch are."""
    mask, returns = torch.zeros(len(given), dtype=torch.bool), torch.zeros(len(given))
    mask[ENDS] = torch.tensor(kept).repeat_interleave(2)
    returns[ENDS[::2]] = MARGINS
    return ScoreLoss(centering=CENTRING)(loss_inputs(SCORED_LENGTHS, mask, values=given, returns=returns))


@pytest.mark.parametrize("kept", [[True] * 3, [True, False, True], [False, True, False]], ids=str)
def test_loss_gradient_and_metrics_are_those_of_the_formula(kept: list[bool]) -> None:
    given = values().requires_grad_()
    found = score_loss(given, kept)
    found.loss.backward()

    scores = values()[ENDS].requires_grad_()
    (better, worse), of_pair = scores.view(3, 2).T, torch.tensor(kept) / 3
    losses = torch.log1p(torch.exp(-(better - worse - MARGINS))) + CENTRING * (better + worse) ** 2
    (losses * of_pair).sum().backward()

    assert found.loss.item() == pytest.approx((losses * of_pair).sum().item(), rel=1e-6)
    torch.testing.assert_close(given.grad[ENDS], scores.grad)
    assert given.grad.count_nonzero() == 2 * sum(kept)
    means = {"preference/accuracy": better > worse, "preference/margin": better - worse}
    means["reward_model/score_mean"] = (better + worse) / 2
    for name, of_pairs in means.items():
        assert found.metrics[name].value.item() == pytest.approx((of_pairs * of_pair).sum().item(), abs=1e-6)


# The values that the arithmetic returns cannot be changed, and a misspelled field is refused.
MODULES = [
    importlib.import_module(f"{algorithms.__name__}.{m.name}") for m in pkgutil.iter_modules(algorithms.__path__)
]


def values_of(module: ModuleType) -> Iterator[type]:
    own = (kind for kind in vars(module).values() if getattr(kind, "__module__", None) == module.__name__)
    return (kind for kind in own if isinstance(kind, type) and dataclasses.is_dataclass(kind))


VALUES = [kind for module in (*MODULES, credit, credit, types, packing) for kind in values_of(module)]


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_a_value_is_frozen_has_slots_and_public_ones_are_made_by_keywords(kind: type) -> None:
    fields = dataclasses.fields(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert set(kind.__slots__) >= {field.name for field in fields}  # type: ignore[attr-defined]
    if not kind.__name__.startswith("_"):
        assert all(field.kw_only for field in fields)
