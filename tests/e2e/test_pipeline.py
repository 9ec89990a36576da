"""Fine-tuning, a reward model, reinforcement by that, and an evaluation: each from the folder of the one before."""

from __future__ import annotations

from rl_megatron.evaluation.results import read_results
from tests.e2e.processes import Place

EVEN = "eval.sets.sums.reward.function=my_rewards:even"


def test_each_job_goes_on_from_the_folder_of_the_one_before(place: Place) -> None:
    common = ("learner.threads=1", "log.tensorboard=false", "checkpoint.every=0")
    tuned = place.fork_alone("tuned", "--config", "sft_tiny", "train.steps=20", "eval.every=20", *common).finish()
    losses = [row["eval/loss"] for row in tuned.rows() if "eval/loss" in row]
    assert losses[-1] < losses[0] / 2  # of held-out sums: 1.87 nats a token for 5.61
    start = f"model.path={tuned.folder / 'hf_step_000020'}"
    judge = place.fork_alone(
        "judge", "--config", "reward_tiny", start, "train.steps=40", "eval.every=40", *common
    ).finish()
    assert judge.rows()[-1]["eval/preference_accuracy"] > 0.65
    folder = judge.folder / "hf_step_000040"
    keys = ("warm_start.steps=0", "train.steps=6", "train.learning_rate=1e-3", "eval.every=6", EVEN)
    learnt = place.fork_alone("learnt", start, f"reward.function=hf:{folder}", *keys, "learner.threads=1").finish()
    rewards = [row["reward/mean"] for row in learnt.rows() if row["step"]]
    assert sum(rewards[-2:]) > sum(rewards[:2])  # of the reward model's scores
    measured = place.call_in_fork("eval", "runs/learnt")
    assert measured.end() == 0, measured.text()
    (results,) = (learnt.folder / "eval").glob("*.json")
    mean = read_results(results).sets["sums"].figures["mean@1"].value
    assert 0 < mean < 1
    assert mean == learnt.rows()[-1]["eval/sums/mean_at_1"]
