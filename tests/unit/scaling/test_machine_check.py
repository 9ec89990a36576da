"""A run beside its prediction: medians, errors and refusals, from metrics written by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.ranks import layout_said
from rl_megatron.scaling.constants import PRIOR
from rl_megatron.scaling.flops import PASSES, Peak, training_flops
from rl_megatron.scaling.hardware import GPUS
from rl_megatron.scaling.machines.check import CheckedRun, check_run
from tests.unit.scaling.test_machines import ENTRY, SIZES, calibrated

SHAPE: ModelShape = SIZES.shape
RATE = 1e9
"""FLOP/s of a machine that has nothing but products."""
PRODUCTS = replace(
    GPUS["h100"],
    hbm=1e15,
    measured=Peak(names=(), bfloat16=RATE / 1e12, float8=None),
    constants=replace(
        PRIOR, gemm=1, attention=1, power=0, tile=0, passes=0, inside=0, host=0, imbalance=1, fixed=0, adam=0, age=0
    ),
)
LENGTH = 65  # tokens of a sequence, 16 of them the completion's: 64 positions


def config(**keys: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 16},
        "learner": {"threads": 1, "max_tokens_per_micro_batch": 65536},
    }
    for key, value in keys.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return RunConfig.model_validate(tree)


def row(step: int, train: float, **more: Any) -> dict[str, Any]:
    return {
        "phase": "rl",
        "step": step,
        "seconds/train": train,
        "seconds/logprobs": train / 3,
        "seconds/rollout": 1.0,
        "tokens/train": 32 * 64,
        "groups/trained": 8,
        "response/length_mean": 16.0,
        "response/length_max": 16.0,
        "memory/peak": 5e8 + step,
        **more,
    }


ROWS = [row(1, 50.0), row(2, 20.0), *(row(n, train) for n, train in zip(range(3, 8), (3, 5, 4, 9, 4), strict=True))]


def found(rows: list[dict[str, Any]] = ROWS, **keys: Any) -> CheckedRun:
    return check_run(config(**keys), SHAPE, rows, PRODUCTS, None)


def test_training_is_the_counted_flops_over_the_rate_beside_the_median_of_the_steps_after_the_warm_ones() -> None:
    """FLOPs are `flops`', which torch confirms; attention's backward pass has five products for four."""
    checked = found()
    assert (checked.first, checked.last, checked.steps) == (3, 7, 5)
    phases = {each.part: each for each in checked.phases}
    flops = training_flops(SHAPE, [64] * 32) / PASSES
    scores = training_flops(replace(SHAPE, hidden_size=0, num_experts=0, vocab_size=0), [64] * 32) / PASSES
    assert phases["train"].predicted == pytest.approx((3 * flops + scores / 2) / RATE, rel=2e-2)
    assert phases["train"].measured == median((3, 5, 4, 9, 4))
    assert phases["train"].error == pytest.approx(phases["train"].predicted / 4 - 1)
    assert phases["logprobs"].predicted == pytest.approx(flops / RATE, rel=2e-2)
    assert "rollout" not in phases  # without a calibration nothing predicts the embedded engine


def test_groups_that_were_left_out_are_not_predicted() -> None:
    rows = [row(n, 4.0, **{"groups/trained": 2, "tokens/train": 8 * 64}) for n in range(1, 9)]
    few, all_of_them = (next(p for p in found(r).phases if p.part == "train") for r in (rows, ROWS))
    assert few.predicted == pytest.approx(all_of_them.predicted / 4, rel=1e-6)


def test_of_pairs_two_of_each_group_are_predicted() -> None:
    pairs = {"advantage_mean": "none", "advantage_std": "none", "preference": {"beta": 0.1}, "old_logprobs": "rollout"}
    rows = [row(n, 4.0, **{"tokens/train": 8 * 2 * 64}) for n in range(1, 9)]
    base = config()
    of_pairs = base.model_copy(update={"algorithm": base.algorithm.model_validate(pairs)})
    checked = check_run(of_pairs, SHAPE, rows, PRODUCTS, None)
    (trained,) = (each for each in checked.phases if each.part == "train")
    (whole,) = (each for each in found().phases if each.part == "train")
    assert trained.predicted == pytest.approx(whole.predicted / 2, rel=1e-6)


def test_epochs_train_on_the_same_positions_again() -> None:
    rows = [row(n, 4.0, **{"tokens/train": 2 * 32 * 64}) for n in range(1, 9)]
    twice, once = found(rows, train__epochs=2), found()
    assert sum(twice.training.values()) == pytest.approx(2 * sum(once.training.values()), rel=1e-6)


def test_memory_is_the_sum_of_the_terms_and_of_the_process_beside_the_highest_peak() -> None:
    machine = calibrated()
    checked = check_run(config(learner__dp=2), SHAPE, ROWS, machine.gpu(2), machine)
    assert checked.memory["process"] == 4e8
    assert checked.peak is not None
    assert checked.peak.measured == 5e8 + 7
    assert checked.peak.predicted == sum(checked.memory.values())
    h, kept = 64, 2 * 4 * 16 + 2 * 2 * 2 * 16  # attention's columns: queries and output, keys and values
    parameters = 2 * (h * (kept // 2 * 2 // 2) + 2 * h)  # a lower bound: attention and norms alone
    assert checked.memory["parameters"] > 4 * parameters


def test_sampling_is_predicted_from_the_runs_lengths_on_a_calibrated_machine() -> None:
    """16 tokens of equal length: the prompts' pass and 16 tokens of 32 rows, one after the other."""
    from rl_megatron.scaling.machines.embedded import decode_seconds

    machine = calibrated()
    checked = check_run(config(), SHAPE, ROWS, machine.gpu(1), machine)
    sampled = next(p for p in checked.phases if p.part == "rollout").predicted
    low = 16 * decode_seconds(SHAPE, machine.gpu(1), ENTRY, 32, LENGTH - 16)
    high = 16 * decode_seconds(SHAPE, machine.gpu(1), ENTRY, 32, LENGTH)
    prompts = next(p for p in checked.phases if p.part == "logprobs").predicted  # of all tokens, 4 times as many rows
    assert low < sampled < high + prompts
    whole = next(p for p in checked.phases if p.part == "these together")
    assert whole.predicted == pytest.approx(sum(p.predicted for p in checked.phases) - whole.predicted)


def test_proposals_are_accepted_as_the_runs_were() -> None:
    base = load_config(
        "deepseek_v3",
        [
            *("model.path=.", "run.launcher=slurm", "weights.transport=file", "learner.draft.train=true"),
            *("rollout.server.draft_tokens=1", "rollout.prompts_per_step=8", "rollout.group_size=4"),
        ],
    )
    deepseek = replace(NAMED["deepseek-v3"], drafts=True)

    def sampling(*shares: float) -> float:
        rows = [row(n, 4.0, **{"draft/acceptance": share}) for n, share in enumerate(shares, 1)]
        checked = check_run(base, deepseek, rows, GPUS["h100"], None)
        return next(p for p in checked.phases if p.part == "rollout").predicted

    none, half, every = (sampling(0.1, share, share, share) for share in (0.0, 0.5, 1.0))
    assert (none - half) / (none - every) == pytest.approx((1 - 1 / 1.5) / (1 - 1 / 2))  # beside the prompts' seconds


def test_a_run_with_too_few_steps_is_refused() -> None:
    with pytest.raises(DataError, match="2 steps of RL; at least 3"):
        found(ROWS[:2])
    warm = [{**each, "phase": "warm_start", "step": 0} for each in ROWS]
    with pytest.raises(DataError, match="0 steps of RL"):
        found(warm)
    with pytest.raises(DataError, match="trained on no group"):
        found([{**each, "groups/trained": 0, "tokens/train": 0} for each in ROWS])


def test_steps_in_a_layout_before_a_resume_are_left_out() -> None:
    now = layout_said(config())
    before = [{**each, "devices/layout": "learner dp=2"} for each in ROWS]
    after = [{**row(step, 6.0), "devices/layout": now} for step in range(8, 14)]
    checked = found([*before, *after])
    assert (checked.first, checked.last) == (10, 13)
    assert next(p for p in checked.phases if p.part == "train").measured == 6
    assert f"steps up to 7 are left out: their layout was learner dp=2, and it is {now} now" in checked.notes
    assert found(after).notes == found([{**each, "step": each["step"] + 7} for each in ROWS]).notes
    with pytest.raises(
        DataError, match=rf"2 steps of RL in the layout of its config.yaml \({re.escape(now)}\); at least 3"
    ):
        found([*before, *after[:2]])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"learner__recompute": {"uniform": 1}}, "learner.recompute.uniform=1"),
        ({"learner__max_tokens_per_micro_batch": 4096}, "learner.max_tokens_per_micro_batch=4096"),
        ({"learner__logprob_chunk_tokens": 8}, "learner.logprob_chunk_tokens=8"),
        ({"rollout__slots": 4}, "rollout.slots=4"),
        ({"train__minibatches": 4}, "train.minibatches=4"),
    ],
)
def test_steps_before_a_change_of_what_they_take_are_left_out(keys: dict[str, Any], said: str) -> None:
    rows = [{**each, "devices/layout": layout_said(config(**keys))} for each in ROWS]
    rows += [{**row(step, 6.0), "devices/layout": layout_said(config())} for step in range(8, 14)]
    checked = found(rows)
    assert (checked.first, checked.last) == (10, 13)
    (note,) = (note for note in checked.notes if "left out" in note)
    then, now = note.split(", and it is ")
    assert said in then
    assert said not in now


def test_a_change_of_keys_that_a_step_does_not_feel_leaves_its_layout() -> None:
    learner = {"timeout_seconds": 77.0, "optimizer": {"weight_decay": 0.5}, "router": {"z_loss": 0.1}}
    tree = {"learner": learner, "train": {"steps": 7, "learning_rate": 1e-5}}
    assert layout_said(RunConfig.model_validate(tree)) == layout_said(RunConfig()) == "learner dp=1"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"learner__dtype": "bfloat16"}, "learner.dtype=bfloat16 in the run, and dtype=float32"),
        ({"learner__threads": 2}, "learner.threads=2 in the run, and threads=1"),
        ({"learner__dp": 4}, "holds for 2 ranks at once, and 4 compute here"),
    ],
)
def test_a_run_on_other_hardware_is_refused(keys: dict[str, Any], words: str) -> None:
    machine = calibrated()
    with pytest.raises(ConfigError, match=words):
        check_run(config(**keys), SHAPE, ROWS, machine.gpu(1), machine)


def test_what_cannot_be_compared_is_said() -> None:
    machine = calibrated()
    notes = " ".join(check_run(config(learner__threads=None), SHAPE, ROWS, machine.gpu(1), machine).notes)
    assert "learner.threads is not set" in notes
    assert "a push is not compared" in notes
    skipped = [{**each, "steps/skipped": 1} for each in ROWS]
    assert any("skipped" in note for note in found(skipped).notes)
    adapters = " ".join(found(learner__lora={"rank": 4}).notes)
    assert "predicted seconds are of training all weights, and learner.lora.rank=4 trains adapters" in adapters
    turns = " ".join(found(environment__function="calculator").notes)
    assert "predicted seconds are of single completions, and environment.function=calculator has" in turns
