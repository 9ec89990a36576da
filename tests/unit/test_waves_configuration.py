"""``train.stream_micro_batches``: what cannot be trained in waves is refused with its reason; which algorithms can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from tests.rows import BESIDE, NAMES, WITH_TURNS

ROOT = Path(__file__).parents[2]
SERVED = ["rollout=vllm", "algorithm=grpo", "train.minibatches=1", "train.stream_micro_batches=1"]
SERVED += [
    "learner.ep=1",
    "rollout.prompts_per_step=64",
    "rollout.group_size=4",
    "learner.max_tokens_per_micro_batch=64",
]
R = "algorithm."


def problem(*keys: str) -> str:
    """Of a run in waves that is right but for the keys; empty if it is taken."""
    try:
        load_config("tiny_cpu", [*SERVED, *keys])
    except ConfigError as error:
        return str(error)
    return ""


REFUSED = {
    "algorithm.whiten=true": (["algorithm.whiten=true"], "whitened where the whole batch is"),
    "algorithm.advantage_mean=batch": ([f"{R}advantage_mean=batch", f"{R}advantage_std=none"], "the baseline is the b"),
    "algorithm.advantage_mean=moving": (
        [f"{R}advantage_mean=moving", f"{R}advantage_std=none"],
        "the baseline is at first the batch's",
    ),
    "algorithm.advantage_std=batch": ([f"{R}advantage_std=batch"], "the std of rewards is the batch's"),
    "algorithm.advantage_std=advantages": ([f"{R}advantage_std=advantages"], "the std of rewards is the batch's"),
    "algorithm.whiten_rewards=true": (
        [f"{R}whiten_rewards=true", f"{R}advantage_std=none", f"{R}advantage_mean=none"],
        "moments of rewards take in the batch first",
    ),
    "algorithm.normalise_rewards=batch": (
        [f"{R}normalise_rewards=batch", f"{R}advantage_std=none"],
        "the range of rewards is the batch's",
    ),
    "algorithm.tokens.choose=second_moment": (["algorithm=m2po"], "the tokens to choose are the batch's"),
    "algorithm.tokens.choose=kl_cov": (["algorithm=kl_cov"], "the tokens to choose are the batch's"),
    "algorithm.correction.normalise=true": (
        [f"{R}correction.mode=truncate", f"{R}correction.normalise=true"],
        "the mean of the weights is the batch's",
    ),
    "algorithm.old_kl_limit=0.1": (
        [f"{R}old_kl_limit=0.1", f"{R}old_logprobs=rollout"],
        "KL is known after its last wave",
    ),
    "algorithm.nll_coefficient=0.1": ([f"{R}nll_coefficient=0.1"], "a second denominator beside the loss's"),
    "algorithm.credit=gae": (["algorithm=ppo", f"{R}whiten=false"], "the critic has no waves"),
    "algorithm.preference.beta=0.1": (["algorithm=dpo"], "over the pairs of the batch"),
    "algorithm.routing_replay=r2": ([f"{R}routing_replay=r2"], "are those of the pass that trains"),
    "train.epochs=2": (["train.epochs=2"], "the first pass would end with a step"),
    "train.minibatches=2": (["train.minibatches=2"], "minibatches are drawn from the whole batch"),
    "learner.overlap.gradients=true": (["learner.dp=2", "learner.overlap.gradients=true"], "none is known to be it"),
    "learner.router.aux_loss=0.1": (["learner.router.aux_loss=0.1"], "whose number is not known yet"),
    "learner.router.seq_aux_loss=0.1": (["learner.router.seq_aux_loss=0.1"], "whose number is not known yet"),
    "learner.router.global_aux_loss=0.1": (["learner.router.global_aux_loss=0.1"], "whose number is not known yet"),
    "learner.router.z_loss=0.1": (["learner.router.z_loss=0.1"], "whose number is not known yet"),
    "rollout.engine=local": (["rollout=local"], "compute no gradient meanwhile; set rollout.server.replicas, or"),
    "rollout.server.colocated=true": (["rollout.server.colocated=true"], "servers leave their GPUs while the learner"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_needs_the_whole_batch_is_refused_with_its_reason(key: str) -> None:
    keys, reason = REFUSED[key]
    (line,) = (line for line in problem(*keys).splitlines() if "train.stream_micro_batches=1 with " in line)
    assert f"train.stream_micro_batches=1 with {key}: " in line
    assert reason in line
    assert line.endswith(", or leave train.stream_micro_batches out")


def test_the_keys_alone_are_taken() -> None:
    assert problem() == ""


@pytest.mark.parametrize(("wave", "refused"), [(15, True), (16, False), (31, False)])
def test_a_wave_fills_the_pipeline(wave: int, refused: bool) -> None:
    said = problem("learner.pp=2", f"train.stream_micro_batches={wave}", "rollout.prompts_per_step=4096")
    assert ("raise it to 16 * (learner.pp - 1) = 16 or more" in said) == refused, said


def test_waves_that_are_never_full_are_refused_with_the_numbers() -> None:
    config = load_config("tiny_cpu", SERVED)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    most = 256 * longest // config.learner.max_tokens_per_micro_batch
    assert most > 1
    said = problem(f"train.stream_micro_batches={most}")
    assert f"(rollout.prompts_per_step=64 * rollout.group_size=4 = 256 of {longest} tokens) fills {most} micro" in said
    assert problem(f"train.stream_micro_batches={most - 1}") == ""


def test_the_page_lists_the_algorithms_that_can() -> None:
    turns = ("environment.function=calculator", "environment.template=plain", "environment.max_tokens=32")
    beside = {**BESIDE, "passk": ("algorithm.best_of=2",), **dict.fromkeys(WITH_TURNS, turns)}
    can = {name for name in NAMES if not problem(f"algorithm={name}", *beside.get(name, ()))}
    page = (ROOT / "docs" / "asynchronous.md").read_text(encoding="utf-8")
    section = page.split("## Gradients while others sample")[1].split("\n## ")[0]
    said = dict(re.findall(r"^\| `(\w+)` \| (yes|no)", section, re.MULTILINE))
    assert said == {name: "yes" if name in can else "no" for name in NAMES}
