"""Runs that cannot continue end quickly, say why and at which rank, and leave nothing running."""

from __future__ import annotations

import psutil

from launcher.runs.folder import mirror_path
from rl_megatron.config.io import load_config
from tests.e2e.processes import Place, alive
from tests.exposure import check_secrets, check_sockets, family, ports_of

EVEN = "reward.function=my_rewards:even"
TWO = ("learner.ep=2", EVEN, "train.steps=100000")
ONE = "learner.ep=1"


def test_a_dead_learner_process_ends_the_run_and_is_named(place: Place) -> None:
    run = place.fork("dead", *TWO)
    run.until_row(step=1)
    workers = run.workers()
    assert len(workers) == 2
    processes = family(run.process.pid)
    assert set(check_sockets(processes)) == {"A learner rank"}
    assert ports_of(psutil.Process(run.process.pid)) == []  # the controller, a fork as they are
    check_secrets(processes, run.folder)
    workers[1].kill()
    assert run.end() == 1
    assert f"error: rank 1 (pid {workers[1].pid}) was killed by signal 9" in run.text()
    assert "Traceback" not in run.text()
    assert "rank 1" in (run.folder / "log.txt").read_text()
    assert not any(map(alive, workers))


def test_an_update_that_is_not_finite_ends_the_run_with_what_to_do(place: Place) -> None:
    run = place.fork("nan", ONE, EVEN, "train.learning_rate=1e30", "train.steps=20")
    assert run.end() == 1
    assert "log-probs by weight version" in run.text()
    assert "resume from the last checkpoint with a lower learning rate" in run.text()
    assert "Traceback" not in run.text()
    run = place.fork("nan", ONE, EVEN, "train.learning_rate=1e-3", "train.steps=4", resume=True).finish()
    assert [row["step"] for row in run.rows() if row["phase"] == "rl"] == [0, 1, 2, 3, 4]


def test_a_reward_that_raises_ends_the_run_naming_it_and_the_prompt(place: Place) -> None:
    run = place.fork("raising", ONE, "reward.function=my_rewards:raising", "warm_start.steps=0")
    assert run.end() == 1
    assert "error: reward 'my_rewards:raising' of prompt '" in run.text()
    assert "raised KeyError: 'price list'" in run.text()
    assert "set reward.on_error to drop or to a number" in run.text()
    assert "Traceback" not in run.text()


def test_rewards_that_are_nan_are_dropped_or_replaced_and_counted(place: Place) -> None:
    keys = (
        ONE,
        "reward.function=my_rewards:sometimes_nan",
        "warm_start.steps=0",
        "train.steps=2",
        "rollout.prompts_per_step=16",
    )
    dropping = place.fork("dropping", *keys, "reward.on_error=drop")
    scoring = place.fork("scoring", *keys, "reward.on_error=-1")  # beside it
    for run in (dropping, scoring):
        run.finish()
        rows = [row for row in run.rows() if row["step"]]
        assert sum(row["reward/errors"] for row in rows) > 0
        assert "is not finite" in (run.folder / "log.txt").read_text()
    dropped = sum(row["groups/dropped"] for row in dropping.rows() if row["step"])
    assert 4 * dropped == sum(row["reward/errors"] for row in dropping.rows() if row["step"])
    assert all(row["groups/dropped"] == 0 for row in scoring.rows() if row["step"])
    assert all(-1 <= row["reward/mean"] <= 1 for row in scoring.rows() if row["step"])


def test_what_the_data_has_wrong_is_told_before_anything_is_trained(place: Place) -> None:
    good = '{"question": "1+1=", "answer": "#### 2"}\n'
    (place.folder / "good.jsonl").write_text(good)
    (place.folder / "bad.jsonl").write_text(good + "{oops\n" + '{"question": "2", "answr": "3"}\n')
    (place.folder / "empty.jsonl").write_text("")
    (place.folder / "long.jsonl").write_text(good + '{"question": "' + "1+" * 50 + '1=", "answer": "51"}\n')
    expected = {
        "bad": (
            "bad.jsonl:2: not JSON",
            "bad.jsonl:3: no field 'answer'; it has answr, question; did you mean 'answr'?",
        ),
        "empty": ("data.train=empty.jsonl: the file is empty",),
        "long": (
            "long.jsonl:2: the prompt has 102 tokens, rollout.max_prompt_tokens=16",
            "rollout.on_long_prompt=drop",
        ),
        "gone": ("data.train=gone.jsonl: no such file",),
    }
    runs = {name: place.fork(f"data-{name}", *_files(name)) for name in expected}
    for name, texts in expected.items():
        assert runs[name].end() == 1, runs[name].text()
        for text in texts:
            assert text in runs[name].text()
        assert "Traceback" not in runs[name].text()


def _files(name: str) -> tuple[str, ...]:
    return (
        "data=gsm8k",
        f"data.train={name}.jsonl",
        "data.eval=good.jsonl",
        "data.on_leak=keep",
        "reward.function=final_number",
        ONE,
    )


def test_a_folder_of_weights_that_another_put_there_is_refused(place: Place) -> None:
    shared, others = place.folder / "shared", place.folder / "others"
    keys = (ONE, "rollout.server.replicas=1", f"weights.folder={shared}", "warm_start.steps=0", "train.steps=1")
    name = mirror_path(load_config("tiny_cpu", list(keys)), place.folder / "runs" / "taken").parent.name
    for folder in (shared, others):
        folder.mkdir()
    (shared / name).symlink_to(others)
    run = place.fork("taken", *keys)
    assert run.end() == 1
    assert f"{shared / name}, the folder for weights: it is there, but is no folder of user" in run.text()
    assert not [*others.iterdir()]
