"""Hours and tokens of a run against hand-made rows, and its report that is written again while it trains."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.commands import train
from launcher.commands.report import RunCosts, costs_of_run, devices, recorded
from launcher.commands.train import keep_report_current
from launcher.runs.stop import StopSignal
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.models.named import NAMED
from rl_megatron.observability.progress import Progress
from tests.unit.launcher.commands import status_of
from tests.unit.launcher.test_memory import QWEN_30B, QWEN_235B
from tests.unit.observability.report_pages import a_run
from tools.planner.estimates import estimate, planned_metrics
from tools.planner.memory import fullest

ROWS = [
    {"phase": "warm_start", "step": 0, "seconds/step": 360.0},
    {"phase": "rl", "step": 0, "eval/accuracy": 0.5},
    *(
        {
            "phase": "rl",
            "step": n,
            "seconds/step": 90.0,
            "seconds/rollout": 60.0,
            "tokens/train": 5000,
            "tokens/rollout": 4000,
        }
        for n in (1, 2)
    ),
]


def job(name: str, *keys: str) -> RunConfig:
    return load_config(name, ["model.path=/given", "run.launcher=slurm", *keys])


def spent(config: RunConfig, rows: Iterable[Mapping[str, object]]) -> RunCosts:
    costs = RunCosts(config)
    for row in rows:
        costs.add(row)
    return costs


def total(config: RunConfig, rows: Iterable[Mapping[str, object]]) -> float:
    return sum(spent(config, rows).hours.values())


def test_servers_on_the_learners_gpus_have_the_hours_in_which_they_sample() -> None:
    """180 s of 8 GPUs are 0.4 GPU-hours, of which they sample for 120 s; the warm start is not among them."""
    found = spent(job(QWEN_30B), ROWS)
    assert found.hours == pytest.approx({"learner": 8 * 60 / 3600, "engines": 8 * 120 / 3600})
    assert (found.trained, found.sampled, found.steps) == (10000, 8000, 2)
    assert found.lines() == [
        "cost of 2 steps: 0.4 GPU-hours (learner 0.133, engines 0.267); 10,000 tokens trained, 8,000 sampled, "
        "25,000 trained per GPU-hour",
        "  warm start before them: 0.8 GPU-hours",  # 360 s
    ]
    assert spent(job(QWEN_30B), ROWS[:3]).lines()[0].startswith("cost of 1 step: ")
    assert spent(job(QWEN_30B), ROWS[:2]).lines() == []


def test_steps_before_a_resume_took_the_devices_that_they_had() -> None:
    """A step of 90 s on 2 ranks of 3 threads, then one on 4 ranks; rows of older versions have the present devices."""
    two, four = (load_config("tiny_cpu", ["learner.threads=3", f"learner.dp={n}"]) for n in (2, 4))
    first, second = ({**ROWS[at], **recorded(one)} for at, one in ((2, two), (3, four)))
    assert total(two, [first, second]) == pytest.approx(3 * (2 + 4) * 90 / 3600)
    assert total(four, [ROWS[2], second]) == pytest.approx(3 * (4 + 4) * 90 / 3600)
    assert sum(spent(four, [{**ROWS[0], **recorded(two)}]).warm_start.values()) == pytest.approx(3 * 2 * 360 / 3600)


def test_hours_of_rows_that_name_their_devices_need_no_machine_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("tiny_cpu", ["rollout=vllm", *HERE])
    for gpus, rows in (("0,1,2,3", ROWS), ("", [{**row, "devices/learner": 2, "devices/engines": 2} for row in ROWS])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        assert spent(config, rows).hours == pytest.approx({"learner": 0.1, "engines": 0.1})
    assert "devices/learner" not in recorded(config)  # it has none of them


def test_roles_with_nodes_of_their_own_hold_them_all_the_time_and_written_text_its_steps() -> None:
    found = spent(job(QWEN_235B), ROWS)
    assert found.hours == pytest.approx({"learner": 96 * 0.05, "engines": 32 * 0.05})
    config = load_config("dpo_tiny", ["learner.threads=3"])
    found = spent(config, [{"phase": "dpo", "step": n, "seconds/step": 90.0, "tokens/train": 5000} for n in (1, 2)])
    assert (found.steps, found.trained, found.sampled) == (2, 10000, 0)
    assert found.hours == pytest.approx({"learner": 3 * config.learner.dims.world_size * 0.05})


def test_cores_are_counted_on_cpus() -> None:
    config = load_config("tiny_cpu", ["learner.threads=3", "learner.dp=2", "algorithm=ppo", "roles.critic=separate"])
    ranks, found = config.learner.dims.world_size, spent(config, ROWS)
    assert found.hours["critic"] == pytest.approx(3 * ranks * 0.05)
    assert found.hours["learner"] + found.hours["engines"] == pytest.approx(3 * ranks * 0.05)
    assert " core-hours (" in found.lines()[0]


SHAPE = NAMED["qwen3-30b-a3b"]


def test_what_the_plan_says_of_metrics_is_the_learners_and_of_gpus_alone() -> None:
    """The bytes are those of the table of `rl-megatron plan`, without the servers' and what no allocator sees."""
    config = job(QWEN_30B, "slurm.speeds.gpu=h100", "slurm.gpu_memory_gb=80")
    guess, found = estimate(config, SHAPE), planned_metrics(config, SHAPE)
    held = fullest(config, SHAPE).terms
    assert found["memory/peak"] == pytest.approx(sum(held.values()) - held["engine"] - 0.06 * 80e9)
    assert 0 < found["mfu/train"] < 1
    assert guess.step is not None
    assert guess.step.predicted is not None
    parts = guess.step.predicted.step.parts
    seconds = {name: value for name, value in found.items() if name.startswith("seconds/")}
    names = {"train": "training", "rollout": "rollout", "logprobs": "log-probs", "weights": "push"}
    assert seconds == {f"seconds/{name}": parts[part] for name, part in names.items() if part in parts}
    assert seconds.keys() >= {"seconds/train", "seconds/rollout", "seconds/weights"}
    assert found["response/length_mean"] == 7168 / 2
    assert f"training at {found['mfu/train']:.0%} of the peak (MFU)" in "\n".join(guess.step.lines())
    assert planned_metrics(load_config("tiny_cpu", []), SHAPE) == {}


HERE = ("learner.device=cuda", "weights.transport=file", "rollout.server.replicas=2")
TOGETHER = "rollout.server.memory_fraction=0.4"


@pytest.mark.parametrize(
    ("launcher", "gpus", "keys", "held"),
    [
        ("ray", 4, (TOGETHER, "rollout.server.colocated=true"), {"learner": 2}),
        ("local", 4, (), {"learner": 2, "engines": 2}),
        ("local", 2, (TOGETHER,), {"learner": 2}),
        ("local", 4, (TOGETHER, "rollout.server.colocated=true", "rollout.server.replicas=3"), {"learner": 3}),
    ],
)
def test_on_one_machine_gpus_are_those_of_ranks_and_servers(
    launcher: str, gpus: int, keys: tuple[str, ...], held: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without slurm.gpus_per_node, which says nothing of this machine: 2 ranks, and servers of one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = load_config("tiny_cpu", ["rollout=vllm", *HERE, f"run.launcher={launcher}", *keys])
    assert (config.slurm.gpus_per_node, config.learner.dims.world_size) == (0, 2)
    assert devices(config) == held
    assert total(config, ROWS) == pytest.approx(sum(held.values()) * 180 / 3600)


def test_a_fault_in_the_hours_does_not_end_a_run() -> None:
    (line,) = spent(load_config("tiny_cpu", []), [{"phase": "rl", "step": 1, "seconds/step": "soon"}, *ROWS]).lines()
    assert line.startswith("the report cannot count the run's hours: ValueError: could not convert string to float")


def test_the_costs_of_a_folder_are_those_that_its_run_said_at_its_end(tmp_path: Path) -> None:
    config = load_config("tiny_cpu", [])
    save_resolved(config, tmp_path / "config.yaml")
    costs = costs_of_run(tmp_path)
    for row in ROWS:
        costs.add(row)
    assert costs.lines() == spent(config, ROWS).lines()
    (tmp_path / "config.yaml").write_text("rollout: 7\n")
    (line,) = costs_of_run(tmp_path).lines()
    assert line.startswith("the report cannot count the run's hours: ")


def test_a_run_of_many_steps_is_counted_in_the_room_of_a_row() -> None:
    """Rows of 100,000 steps took 1.1 GB in a controller, and 16 GB of ten times as many."""
    taken, row = [], {**ROWS[2], **{f"observer/{number}": number + 0.5 for number in range(200)}}
    for steps in (2, 2, 500):  # the first imports and caches
        tracemalloc.start()
        found = spent(load_config("tiny_cpu", []), (dict(row) for _ in range(steps))).lines()
        taken.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found[0].startswith(f"cost of {steps} steps: ")
    assert taken[2] - taken[1] < 50 * len(json.dumps(row))


def test_a_run_that_waits_has_spent_nothing_and_its_report_says_that_no_step_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    save_resolved(load_config("tiny_cpu", []), tmp_path / "config.yaml")
    assert status_of("report", str(tmp_path)) == 1
    said = f"{tmp_path}/metrics.jsonl: no step is recorded yet; wait for the run's first row"
    assert capsys.readouterr().err == f"error: {said}\n"
    assert not caplog.records
    assert costs_of_run(tmp_path).lines() == []


@pytest.mark.parametrize("by", [None, "SIGTERM"])
def test_a_report_is_made_beside_the_loop_and_ends_once_nobody_waits_for_it(
    by: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a second Ctrl-C, or a signal: Python waits for the threads of a loop that ends."""
    config, begun, goes_on = load_config("tiny_cpu", []), threading.Event(), threading.Event()
    save_resolved(config, tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    add = train._LoggedCosts.add

    def slow(costs: train._LoggedCosts, row: Mapping[str, object]) -> None:
        begun.set()
        assert goes_on.wait(20)
        add(costs, row)

    async def interrupted() -> None:
        stop = StopSignal(Progress(2, "plain"))
        making = asyncio.create_task(train._report(config, tmp_path, Progress(2, "plain"), stop))
        assert await asyncio.to_thread(begun.wait, 20)
        making.cancel() if by is None else stop.request(by)
        await asyncio.wait({making})
        assert not stop.is_set()
        goes_on.set()

    with monkeypatch.context() as patched:
        patched.setattr(train._LoggedCosts, "add", slow)
        asyncio.run(interrupted())
    assert not (tmp_path / "report.html").exists()
    said = f"the report is left out; rl-megatron report {tmp_path} writes it\n"
    assert capsys.readouterr().out == ("" if by is None else said)
    asyncio.run(train._report(config, tmp_path, Progress(2, "plain"), StopSignal(Progress(2, "plain"))))
    assert "cost of 2 steps: " in (tmp_path / "report.html").read_text()


def test_the_end_of_a_run_has_the_verdicts_of_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, progress, folder = load_config("tiny_cpu", []), Progress(2, "plain"), a_run(tmp_path / "a", steps=20)
    asyncio.run(train._report(config, folder, progress, StopSignal(progress)))
    assert capsys.readouterr().out.splitlines()[-2:] == ["healthy: learning, time", f"report: {folder}/report.html"]


def test_a_report_that_fails_is_warned_of_and_fails_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config("tiny_cpu", [])
    save_resolved(config, tmp_path / "config.yaml")
    progress = Progress(2, "plain")
    asyncio.run(train._report(config, tmp_path, progress, StopSignal(progress)))
    (said,) = caplog.messages
    assert said.startswith(f"the report could not be written: {tmp_path}/metrics.jsonl")
    assert said.endswith(f"; rl-megatron report {tmp_path} writes it")


def test_an_allocation_without_a_count_of_gpus_has_those_of_its_ranks() -> None:
    assert total(job(QWEN_30B, "slurm.gpus_per_node=0"), ROWS) == pytest.approx(8 * 180 / 3600)


# While a run trains its report is written again, in a thread that ends with it.
LIMIT = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.01)


async def test_it_is_written_with_the_steps_of_now_and_says_when_it_is_again(tmp_path: Path) -> None:
    folder, config = a_run(tmp_path / "a"), load_config("tiny_cpu", [])
    page, rows = folder / "report.html", (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("")  # no row yet, which is no fault
    async with keep_report_current(config, folder, 0.05):
        await asyncio.sleep(0.2)
        assert not page.exists()
        (folder / "metrics.jsonl").write_text(rows)
        await until(page.exists)
        assert 'data-again="' in page.read_text()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"phase": "rl", "step": 7, "reward/mean": 0.5}) + "\n")
        await until(lambda: "7 of 6" in page.read_text())
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


async def test_the_loop_runs_and_nothing_writes_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), list[str]()

    def slow(*given: object, costs: Any, **options: object) -> None:
        begun.set()
        try:
            while True:
                costs.add({})
                time.sleep(0.01)
        finally:
            ended.append("thread")

    monkeypatch.setattr(train, "write_report", slow)
    async with keep_report_current(load_config("tiny_cpu", []), tmp_path, 0.0):
        await until(begun.is_set)
        assert not ended
    ended.append("context")
    assert ended == ["thread", "context"]


def test_a_report_explains_how_sums_are_written() -> None:
    assert RunCosts(load_config("tiny_cpu", [])).note == "Sums are written lowest digit first: 37+08=540 is right."
    assert RunCosts(load_config("tiny_cpu", ["data.operation=product"])).note == ""


@pytest.mark.parametrize(("algorithm", "judged"), [("grpo", True), ("ppo", False), ("otb", True)])
def test_equal_rewards_are_a_verdict_only_where_they_give_no_gradient(
    algorithm: str, judged: bool, tmp_path: Path
) -> None:
    row = {"phase": "rl", "groups/zero_advantage_fraction": 1.0, "groups/trained": 8, "reward/mean": 0.5}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(20):
            print(json.dumps({**row, "step": step + 1, "seconds/step": 1.0}), file=file)
    save_resolved(load_config("tiny_cpu", [f"algorithm={algorithm}"]), tmp_path / "config.yaml")
    assert status_of("report", str(tmp_path)) == 0
    assert ("of the groups have a gradient" in (tmp_path / "report.html").read_text()) == judged
