"""Algorithms with a critic, a reference or pairs, by the command line: they train, and resume to the bit."""

from __future__ import annotations

import statistics
from collections import defaultdict

import pytest

from rl_megatron.observability.files import read_jsonl
from rl_megatron.training import checkpoints
from tests.e2e.processes import Place, Run, alive

HALF_RIGHT = "reward.function=my_rewards:even"
UNWARMED = (HALF_RIGHT, "warm_start.steps=0")
CUTS_COUNT = "algorithm.unfinished_reward=null"  # most completions of these tiny runs are cut
PPO = (
    "algorithm=ppo",
    HALF_RIGHT,
    CUTS_COUNT,
    "algorithm.kl.coefficient=0.1",
    "algorithm.kl.placement=token_reward",
    "algorithm.kl.estimator=k1",
    "algorithm.routing_replay=r2",
    "train.route_flips=true",
    "train.epochs=2",
    "train.steps=4",
    "train.lr_decay=linear",
)
APART = ("roles.critic=separate", "roles.reference=separate")
LAYOUTS = ("roles.layouts.critic.pp=2", "roles.layouts.reference.tp=2")
FIGURES = {"loss", "grad_norm", "critic/loss", "critic/grad_norm", "critic/value_mean", "kl/reference"}


@pytest.fixture(scope="module")
def ppo(place: Place) -> Run:
    return place.fork("ppo", *PPO).finish()


def test_ppo_trains_policy_and_critic_with_kl_in_the_reward(ppo: Run) -> None:
    rows = [row for row in ppo.rows() if row["step"]]
    assert len(rows) == 4
    assert rows[0]["critic/value_mean"] != 0  # of the last of four optimizer steps: the value layer left 0
    assert rows[0]["critic/explained_variance"] == 0
    assert all(row["critic/grad_norm"] > 0 < row["grad_norm"] for row in rows)
    assert rows[0]["kl/reference"] == pytest.approx(0, abs=1e-4)  # the reference is the policy of the start
    assert abs(rows[-1]["kl/reference"]) > 1e-3
    assert all(0 < row["moe/rerouted_fraction"] < 0.2 for row in rows)  # after the first of four optimizer steps
    assert all(row["moe/flips_update"] == 0 and row["moe/flips_engine"] < 0.02 for row in rows)  # replay; no noise
    one_pass = rows[0]["tokens/train"] / 2
    assert one_pass == int(one_pass)
    rates = [row["learning_rate"] for row in rows]
    assert (rates, rates[-1]) == (sorted(rates, reverse=True), pytest.approx(rates[0] / 4))


@pytest.mark.slow
def test_a_ppo_run_resumes_on_ranks_of_ray_with_its_critic_reference_and_memory(place: Place, ppo: Run) -> None:
    """Critic and reference get ranks of their own, which were in the learner's. 22 s."""
    pytest.importorskip("ray")
    folder = place.copy(ppo, "on-ray", until=2)
    run = place.fork("on-ray", *PPO, *APART, "run.launcher=ray", resume=True).finish()
    assert "2 learner processes, 2 critic processes, 2 reference processes" in run.text()
    assert run.record() == ppo.record()
    expected = {f"{stem}-{number}.txt" for stem in ("rank", "critic", "reference") for number in (0, 1)}
    assert {path.name for path in (folder / "ray").glob("*-?.txt")} == expected


def test_layouts_of_critic_and_reference_change_no_figure_also_after_a_rank_has_died(place: Place, ppo: Run) -> None:
    """The learner has two data-parallel ranks, the critic two stages, the reference two parts of each matrix. When one
    of the critic's ranks has died, the critic goes on in the learner's."""
    run = place.fork("ppo-killed", *PPO, *APART, *LAYOUTS)
    run.until_row(step=3)
    workers = run.workers()
    assert len(workers) == 6
    workers[3].kill()
    assert run.end() == 1
    assert f"error: critic rank 1 (pid {workers[3].pid}) was killed by signal 9" in run.text()
    assert not any(map(alive, workers))
    before = run.rows()
    run = place.fork("ppo-killed", *PPO, APART[1], LAYOUTS[1], resume=True).finish()
    assert "resuming from" in run.text()
    assert [row["step"] for row in run.rows()] == [row["step"] for row in ppo.rows()]
    for found, known, last in ((before, ppo.rows(), 2), (run.rows(), before, 3)):  # later another token may be sampled
        for mine, theirs in zip(found, known, strict=False):
            for name in FIGURES & theirs.keys() if mine["step"] <= last else ():
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), (mine["step"], name)


def test_a_critic_may_start_from_a_checkpoint_and_train_alone_and_routers_have_noise(place: Place, ppo: Run) -> None:
    path = ppo.folder / "checkpoints/step_000004/critic"
    keys = (f"algorithm.critic.path={path}", "algorithm.critic.only_steps=1", "train.steps=3")
    keys = (*keys, "train.route_flips=true", "rollout.router_noise=0.5")
    run = place.fork("from-critic", "algorithm=vapo", HALF_RIGHT, CUTS_COUNT, *keys).finish()
    first, second, third = (row for row in run.rows() if row["step"])
    assert abs(first["critic/explained_variance"]) > 0  # it says something from the start
    assert "grad_norm" not in first
    assert first["critic/grad_norm"] > 0 < second["grad_norm"]
    assert second["loss/nll"] > 0
    assert all(row["moe/flips_engine"] > 0.05 for row in (first, second, third))  # its routers have noise
    assert all(0 < row["moe/flips_update"] < row["moe/flips_engine"] for row in (second, third))


def test_a_policy_that_is_its_own_critic_with_stale_rollouts_and_a_reference_of_its_own_resumes_to_the_bit(
    place: Place, ppo: Run
) -> None:
    keys = (
        *("algorithm=ppo", HALF_RIGHT, CUTS_COUNT, "algorithm.critic.backbone=policy", "train.steps=4", "seed=1"),
        *("algorithm.kl.coefficient=0.1", f"algorithm.kl.reference={ppo.folder / 'hf_start'}"),
        *("algorithm.old_logprobs=interpolated", "train.max_staleness=2"),
    )
    run = place.fork("own-critic", *keys).finish()
    first, *_, last = rows = [row for row in run.rows() if row["step"]]
    assert all("critic/grad_norm" not in row and row["critic/loss"] > 0 < row["grad_norm"] for row in rows)
    assert (first["critic/explained_variance"], last["critic/value_mean"] == 0) == (0, False)
    assert [row["staleness/max"] for row in rows] == [0, 1, 2, 2]
    assert all("seconds/logprobs" not in row for row in rows)  # old log-probs are interpolated
    assert first["kl/reference"] > 0.01  # another seed's model
    assert first["loss/kl"] > 0
    assert not (run.folder / "hf_start").exists()
    place.copy(run, "own-critic-resumed", until=2)
    again = place.fork("own-critic-resumed", *keys, resume=True).finish()
    assert "resuming from" in again.text()
    assert again.record() == run.record()


def test_dpo_on_pairs_of_the_group_by_a_model_of_one_expert_which_is_a_dense_one_without_flips(place: Place) -> None:
    sizes = [f"model.tiny.{key}=1" for key in ("num_experts", "experts_per_token")]
    keys = ("algorithm=dpo", *UNWARMED, *sizes, "learner.ep=1", "train.route_flips=true", "train.steps=3")
    rows = [row for row in place.fork("dpo", *keys).finish().rows() if row["step"]]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in rows)  # the engine's forward is transformers'
    assert all(row["moe/flips_update"] == row["moe/flips_engine"] == 0 for row in rows)
    assert all(row["moe/first_flip/none"] == 1 for row in rows)


def test_a_prompt_has_a_baseline_from_its_earlier_completions_and_a_resume_knows_it(place: Place) -> None:
    """Sums of one digit, most of them seen again in the second epoch, behind the resume."""
    keys = ("algorithm=spo", *UNWARMED, "data.digits=1", "rollout.prompts_per_step=28", "log.samples_per_step=28")
    keys = (*keys, "rollout.group_size=1", "algorithm.advantage_std=none", "rollout.ignore_eos=true")
    whole = place.fork("spo", *keys).finish()
    place.copy(whole, "spo-resumed", until=4)
    resumed = place.fork("spo-resumed", *keys, resume=True).finish()
    assert "resuming from" in resumed.text()
    assert resumed.record() == whole.record()
    alpha, beta = defaultdict[str, float](lambda: 0.5), defaultdict[str, float](lambda: 0.5)
    found = [row["advantage/std"] for row in whole.rows() if row["step"]]
    samples = read_jsonl(whole.folder / "samples.jsonl")
    for step in range(1, 7):
        seen = [(one["prompt"], one["reward"]) for one in samples if one["step"] == step]
        assert len(seen) == 28
        above = [reward - alpha[prompt] / (alpha[prompt] + beta[prompt]) for prompt, reward in seen]
        assert found[step - 1] == pytest.approx(statistics.pstdev(above), rel=1e-5)
        for prompt, reward in seen:
            alpha[prompt] = 0.875 * alpha[prompt] + reward
            beta[prompt] = 0.875 * beta[prompt] + 1 - reward
    assert len(alpha) < 6 * 28 * 0.8  # prompts came again


def test_demonstrations_wait_with_their_groups_and_a_resume_has_them_to_the_bit(place: Place) -> None:
    keys = ("algorithm=luffy", *UNWARMED, "train.max_staleness=1", "train.steps=4")
    whole = place.fork("luffy", *keys).finish()
    rows = [row for row in whole.rows() if row["step"]]
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1]
    assert all(0 < row["demonstration/share"] < 0.5 and row["grad_norm"] > 0 for row in rows)
    assert all(row["demonstration/reward"] in (0, 0.25, 0.5, 0.75, 1) for row in rows)
    stream = checkpoints.read(place.copy(whole, "luffy-resumed", until=2) / "checkpoints/step_000002").state.stream
    assert stream is not None
    groups = [one.answered.group for one in stream.places if one.answered is not None]
    shown = [group.demonstration for group in groups if group is not None and group.demonstration is not None]
    assert len(shown) == len(stream.places) == 4
    for group in shown:
        ((row,),) = [one.chains for one in group.trajectories]
        assert bytes(row.token_ids[:-1].tolist()).decode() == group.prompt.text + group.prompt.answer
    resumed = place.fork("luffy-resumed", *keys, resume=True).finish()
    assert "resuming from" in resumed.text()
    assert resumed.record() == whole.record()
