"""The recipe of the game of guesses trains: half of its warm start, and four steps of 150."""

from __future__ import annotations

from rl_megatron.observability.samples import read_samples
from tests.e2e.processes import Place


def test_rewards_of_turns_raise_the_reward_from_the_first_steps_on(place: Place) -> None:
    keys = (
        "learner.ep=1",
        "learner.threads=1",
        "log.tensorboard=false",
        "run.name=guess",
        f"model.cache_dir={place.cache}",
    )
    steps = ("warm_start.steps=50", "warm_start.check_every=50", "train.steps=4", "eval.every=0", "data.num_eval=32")
    run = place.call_in_fork("train", "--config", "guess", *keys, *steps)
    run.folder = place.folder / "runs" / "guess"
    run.finish()
    rows = [row for row in run.rows() if row["phase"] == "rl" and row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert 1 < row["environment/turns_mean"] <= 4, row
        assert row["environment/own/found"] <= row["environment/own/kept"] <= row["environment/own/guesses"], row
        assert row["environment/own/guesses"] <= row["environment/turns_mean"], row
        assert row["environment/own/found"] < row["reward/mean"] < 1, row  # found ones get 1, others what they settled
        assert row["mismatch/logprob_abs_max"] < 1e-4, row
        assert row["grad_norm"] > 0, row
    samples = [row for row in read_samples(run.folder / "samples.jsonl") if len(row.turns) > 1]
    assert samples
    for row in samples:
        assert "".join(turn.said for turn in row.turns) == row.completion
        assert row.turns[0].read == ""
        assert all(turn.read.strip() for turn in row.turns[1:])  # the environment's answers
    rewards = [row["reward/mean"] for row in rows]
    assert rewards[3] > rewards[0] + 0.2, rewards  # with train.learning_rate=1e-9 it gains 0.03
