"""What the checks before a run say of a batch and of what is under way for it."""

from __future__ import annotations

import pytest

from launcher.preflight import batches
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("most", "groups", "said"),
    [
        (32, 8, None),
        (
            33,
            7,
            "32 trajectories are under way at once (environment.concurrency=33), but servers have at most 28 turns",
        ),
        (
            30,
            7,
            "30 trajectories are under way at once (environment.concurrency=30), but servers have at most 28 turns",
        ),
        (28, 7, None),
        (
            27,
            7,
            "environment.concurrency=27 trajectories are under way at once, of 32 that there are to sample, though ",
        ),
        (
            31,
            64,
            "environment.concurrency=31 trajectories are under way at once, of 32 that there are to sample, though ",
        ),
        (1024, 64, None),
    ],
)
def test_trajectories_that_wait_for_servers_or_servers_for_them_are_noted(
    most: int, groups: int, said: str | None
) -> None:
    served = ("rollout=vllm", "rollout.server.addresses=http://a:1", f"rollout.server.concurrency={groups}")
    sizes = ("rollout.prompts_per_step=8", "rollout.group_size=4", f"environment.concurrency={most}")
    config = load_config("calculator", [*served, *sizes])
    notes = [found.text for found in batches.check(Subject(config, False)) if "trajectories" in found.text]
    assert len(notes) == (said is not None), notes
    assert all(text.startswith(str(said)) for text in notes)


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        (("algorithm=reinforce",), []),
        (("algorithm=remax", "train.minibatches=3"), ["train.minibatches=3 * train.epochs=1"]),
        (("algorithm=rloo", "train.epochs=2"), ["train.minibatches=1 * train.epochs=2"]),
        (("algorithm=rloo", "train.max_staleness=2"), ["train.max_staleness=2"]),
        (("algorithm=rloo", "train.max_staleness=2", "algorithm.correction.mode=truncate"), []),
        (
            ("algorithm=reinforce", "train.max_staleness=2", "train.minibatches=2"),
            ["train.minibatches=2 * train.epochs=1", "train.max_staleness=2"],
        ),
        (("algorithm=grpo", "train.max_staleness=2", "train.epochs=2"), []),
    ],
)
def test_an_objective_without_a_ratio_on_samples_of_an_older_policy_is_noted(
    more: tuple[str, ...], noted: list[str]
) -> None:
    found = batches.check(Subject(load_config("tiny_cpu", list(more)), False))
    texts = [one.text for one in found if one.text.startswith("algorithm.objective=reinforce has no ratio")]
    assert [given for text, given in zip(texts, noted, strict=True) if given not in text] == []


def test_pairs_are_the_parts_of_minibatches_and_two_sequences_each() -> None:
    """Of groups of 16, of which the other 14 are not trained on."""
    keys = ["algorithm=dpo", "learner.ep=1", "learner.dp=4", "rollout.prompts_per_step=3", "rollout.group_size=16"]
    (idle,) = batches.check(Subject(load_config("tiny_cpu", [*keys, "train.minibatches=3"]), False))
    product = "rollout.prompts_per_step=3 * 2 of a pair / train.minibatches=3"
    assert idle.text.startswith(f"an optimizer step has 2 sequences ({product}) for 4 data-parallel ranks")
    with pytest.raises(ConfigError, match=r"train\.minibatches=4 is more than the 3 pairs of a step"):
        load_config("tiny_cpu", [*keys, "train.minibatches=4"])


def test_the_datas_demonstrations_are_sequences_of_a_step() -> None:
    keys = ["algorithm=luffy", "rollout.prompts_per_step=4", "rollout.group_size=3", "rollout.max_prompt_tokens=16"]
    idle, *_ = batches.check(Subject(load_config("tiny_cpu", [*keys, "learner.ep=1", "learner.dp=32"]), False))
    product = "rollout.prompts_per_step=4 * (rollout.group_size=3 + 1 demonstration) / train.minibatches=2"
    assert idle.text.startswith(f"an optimizer step has 8 sequences ({product}) for 32 data-parallel ranks")
