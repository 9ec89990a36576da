"""What a rehearsal asks of nodes, finds in their answers, and writes."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.preflight.checks import preflight
from launcher.rehearsal import machine
from launcher.rehearsal.links import open_store
from launcher.rehearsal.messages import Survey
from launcher.rehearsal.rehearsed import NotReached, RehearsedRun
from launcher.rehearsal.report import RehearsalReport, with_hidden_hosts
from launcher.rehearsal.settings import announced, rehearsal_of, run_of
from launcher.rehearsal.sizes import stage_limits
from launcher.rehearsal.slow import slow_nodes, unlike
from launcher.rehearsal.survey import Surveyed, read_answers
from launcher.rehearsal.table import TableLine, lines_of_run
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig, TinyModelSection
from rl_megatron.evaluation.sets import ProblemSet
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.scaling.estimates import estimate
from tests.exposure import check_sockets
from tests.unit.launcher.test_memory import QWEN3, RECIPES, recipe

MACHINE = {"python": "3.11", "torch": "2", "megatron-core": "0.16.1", "kernel": "6"}


def survey_of(*nodes: tuple[str, int]) -> Survey:
    fields = {"groups": (), "store": ("h", 1), "device": "cpu", "threads": 1, "num_bytes": 4, "seconds": 1.0}
    return Survey(nodes=nodes, answers="a", disks=(), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 33])
def test_each_node_is_in_two_pairs_and_none_waits_for_more_than_three_rounds(count: int) -> None:
    survey = survey_of(*((f"n{i}", 3) for i in range(count)))
    pairs = survey.pairs()
    assert len(pairs) == len({frozenset(pair) for pair in pairs}) == (count if count > 2 else count - 1)
    busy = [process for pair in pairs for process in pair]
    assert all(busy.count(3 * i) == (2 if count > 2 else count - 1) for i in range(count))
    done: dict[int, int] = {}  # rounds: a pair begins when both are free
    for one, other in pairs:
        done[one] = done[other] = max(done.get(one, 0), done.get(other, 0)) + 1
    assert max(done.values(), default=0) <= 2 + count % 2


def test_a_survey_arrives_as_it_was_sent() -> None:
    survey = survey_of(("a", 2), ("b", 1))
    assert Survey.read(survey.line().decode()).line() == survey.line()
    assert survey.processes("b") == range(2, 3)
    with pytest.raises(ValueError, match="this node, c, is none of a, b"):
        survey.processes("c")


def test_the_store_of_a_survey_listens_at_one_address_of_loopback() -> None:
    here = [psutil.Process()]
    before = check_sockets(here).total()
    listener = socket.create_server(("127.0.0.1", 0))
    survey = replace(survey_of(("a", 1)), store=listener.getsockname())
    store = open_store(listener, survey)
    assert check_sockets(here).total() == before + 1
    del store
    assert check_sockets(here).total() == before


def test_a_node_that_fails_is_named_with_its_cause(tmp_path: Path) -> None:
    """Of four, one answers not at all, one without its links, one with a rank's error."""
    answer = {"problems": [], "links": [{"process": 0}]}
    bad = {"process": 2, "error": "RuntimeError: NCCL error: unhandled system error"}
    found = {
        "a": answer,
        "c": {"problems": ["/data: No space left on device"]},
        "d": {"problems": [], "links": [bad, {**bad, "process": 3}]},
    }
    for node, said in found.items():
        (tmp_path / f"{node}.json").write_text(json.dumps(said))
    (tmp_path / "survey.txt").write_text("srun: error: Node failure on b\n")
    survey = survey_of(("a", 1), ("b", 1), ("c", 1), ("d", 2))
    failures = read_answers(survey, tmp_path, seconds=9.0, limit=180.0).failures
    assert {node: len(what) for node, what in failures.items()} == {"b": 1, "c": 2, "d": 1}
    assert "no answer in 9 s" in failures["b"][0]
    assert "Node failure on b" in failures["b"][0]
    assert failures["c"] == ["/data: No space left on device", "its links were not measured in 180 s"]
    assert failures["d"] == [bad["error"]]


def surveyed(
    pairs: Sequence[float], *, disks: Mapping[str, float] | None = None, **machines: Mapping[str, Any]
) -> Surveyed:
    """Nodes n0, n1, ... of one process each; ``pairs[i]``: GB/s from node i to the next."""
    count = max(len(pairs), 2)
    answers = {
        f"n{i}": {
            "machine": {**MACHINE, **machines.get(f"n{i}", {})},
            "disks": {"/d": {"write": 1e9 * (disks or {}).get(f"n{i}", 1.0), "read": 1e9}},
            "links": [
                {
                    "process": i,
                    "flops": 1e12,
                    "time": 100.0,
                    "pairs": [[(i + 1) % count, pairs[i] * 1e9]] if i < len(pairs) else [],
                }
            ],
        }
        for i in range(count)
    }
    return Surveyed(seconds=1.0, answers=answers, failures={}, by_process={i: f"n{i}" for i in range(count)})


@pytest.mark.parametrize(
    ("pairs", "slow"),
    [
        ([10, 10, 10], []),
        ([1, 10, 1], ["n0"]),  # n2-n0 and n0-n1
        ([1, 1, 10], ["n1"]),
        ([10, 1, 10, 10], []),  # either end, or the cable between
        ([10, 6, 6, 10], []),  # not twice as slow
        ([1, 1, 10, 10, 10, 10, 1, 1], ["n0", "n1", "n7"]),  # three neighbours
        ([1], []),  # two nodes: nobody knows whose end
    ],
)
def test_a_node_is_slow_whose_links_to_both_neighbours_are(pairs: list[float], slow: list[str]) -> None:
    assert list(slow_nodes(surveyed(pairs))) == slow


def test_a_slow_disk_is_named_with_its_node() -> None:
    found = slow_nodes(surveyed([1, 1, 1], disks={"n1": 0.3}))
    assert found == {"n1": ["writes in /d: 0.3 GB/s, 3.3 times slower than usual"]}


def test_a_slow_group_inside_a_node_is_compared_with_those_of_other_nodes() -> None:
    """Rates over nodes do not count: a group is as slow as its slowest link."""
    found = surveyed([1, 1, 1])
    for i, (near, far) in enumerate(((9e9, 1e9), (2e9, 2e7), (8e9, 1e9))):
        found.answers[f"n{i}"]["links"][0]["groups"] = {"tp": [[i], near], "dp": [[i, (i + 1) % 3], far]}
    assert slow_nodes(found) == {"n1": ["its tp group of ranks 1-1: 4.5 times slower than usual"]}


def test_what_differs_between_nodes_is_said() -> None:
    found = surveyed([1, 1, 1], n1={"torch": "3"})
    found.answers["n2"]["links"][0]["time"] = 160.0
    gpu = {"name": "H100", "used_mb": "30000", "memory_mb": "81559", "ecc_errors": "2"}
    lost = {**gpu, "used_mb": "[GPU requires reset]", "ecc_errors": "[GPU requires reset]"}
    halted = {**lost, "used_mb": "[Unknown Error]", "memory_mb": "[Unknown Error]"}
    given = [{**gpu, "used_mb": "1", "ecc_errors": "[N/A]"}, gpu, lost, halted, {**lost, "used_mb": "[N/A]"}]
    found.answers["n0"]["gpus"] = given  # type: ignore[index]
    assert list(unlike(found)) == [
        "torch differs: 2 on n0, n2; 3 on n1",
        "the clock of n2 is +60 s from the others'",
        "GPU 1 of n0 (H100) is in use: 30000 of 81559 MB are taken",
        "GPU 1 of n0 (H100) has 2 uncorrected memory errors",
        "GPU 2 of n0 (H100) does not say its memory: [GPU requires reset]",
        "GPU 3 of n0 (H100) does not say its memory: [Unknown Error]",
        "GPU 4 of n0 (H100) does not say its memory: [N/A]",
    ]


def driver(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_driver_is_asked_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVIDIA H100 80GB HBM3, 550.54, 81559, 12, 1980, 0, 31, 0x0000000000000000"
    driver(tmp_path / "good", f"for i in 0 1; do echo '{line}'; done", monkeypatch)
    found = machine.gpus()
    assert len(found) == 2
    assert (found[1]["name"], found[1]["memory_mb"], found[1]["ecc_errors"]) == ("NVIDIA H100 80GB HBM3", "81559", "0")
    driver(tmp_path / "bad", "echo 'Unable to determine the device handle for GPU 3: Lost'; exit 15", monkeypatch)
    with pytest.raises(OSError, match="GPU 3: Lost"):
        machine.gpus()


@pytest.mark.parametrize(
    ("visible", "asked"), [("4,GPU-5a", "--id=4,GPU-5a"), ("", ""), ("-1", ""), ("NoDevFiles", ""), ("MIG-1b", "")]
)
def test_the_driver_is_asked_for_the_jobs_gpus_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, asked: str
) -> None:
    """Of a cluster that hides no device from a job, others are at work on the rest."""
    driver(tmp_path / "bin", 'echo "$2, 550.54" | grep -o "^--id=[^ ]*" || echo "all, 550.54"', monkeypatch)
    names = ",".join(machine.gpus(visible)[0].values())
    assert names.startswith(asked or "all")


def test_a_disk_is_measured_by_a_block_at_least_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_SECONDS", 0.0)
    found = machine.disk(tmp_path)
    assert found["written"] == machine._BLOCK
    assert min(found["write"], found["read"]) > 0
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        machine.disk(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (TableLine(what="", unit="s", measured=None, predicted=1.0), "not measured"),
        (TableLine(what="", unit="s", measured=3.0, bound=2.0), "OUT OF BOUND"),
        (TableLine(what="", unit="s", measured=2.0, bound=2.0), "ok"),
        (TableLine(what="", unit="GB/s", measured=2.0, bound=3.0, least=True), "OUT OF BOUND"),
        (TableLine(what="", unit="GB/s", measured=2.0, predicted=5.0, least=True), "2.5 times worse than predicted"),
        (TableLine(what="", unit="GB/s", measured=50.0, predicted=5.0, least=True), "as predicted"),
        (TableLine(what="", unit="s", measured=50.0, predicted=5.0), "10.0 times worse than predicted"),
        (TableLine(what="", unit="s", measured=0.05, predicted=1e-5), "as predicted"),
        (TableLine(what="", unit="GB", measured=0.0, predicted=0.0), "as predicted"),
        (TableLine(what="", unit="GB", measured=2.0, predicted=0.0), "2 more than predicted"),
        (TableLine(what="", unit="s", measured=2.0), ""),
    ],
)
def test_the_verdict_of_a_line(line: TableLine, verdict: str) -> None:
    assert line.verdict == verdict


def config(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", list(keys))


def test_the_job_is_short_and_ends_for_good_and_the_run_is_the_real_one_but_short(tmp_path: Path) -> None:
    keys = ("run.name=x", "checkpoint.every=7", "slurm.array=0-3", "train.lr_decay=cosine", "log.wandb=online")
    job = rehearsal_of(config(*keys, "slurm.environment.HF_TOKEN=secret"))
    assert (job.run.name, job.slurm.time, job.slurm.requeues, job.slurm.array) == ("x-rehearsal", "20", 0, None)
    assert rehearsal_of(job) == job
    assert job.checkpoint.every == 7  # the table's bound is of the run's own
    run = run_of(job)
    assert (run.checkpoint.every, run.warm_start.steps, run.log.wandb, run.run.slow_steps) == (1, 0, "off", 2)
    same = ("model", "reward", "algorithm", "rollout", "learner", "roles", "weights")
    assert all(getattr(run, section) == getattr(config(*keys), section) for section in same)


@pytest.mark.parametrize("name", RECIPES)
def test_the_stages_of_a_recipes_rehearsal_end_in_their_limits(name: str) -> None:
    """Servers take all that they may to start, steps what is predicted; the last of a fuller pipeline fits too."""
    own, shape = recipe(name, "run.launcher=slurm")
    inside = run_of(own)
    limits, step, start = stage_limits(inside, shape), seconds_of(inside, shape), own.rollout.server.start_seconds
    assert limits["start"] >= start + 3 * step
    assert limits["resume"] >= start + step
    assert seconds_of(own, shape) > step
    mean = (inside.rollout.max_new_tokens + inside.rollout.max_prompt_tokens) / 2
    tokens = inside.completions_per_step * mean / inside.train.minibatches / inside.learner.dims.dp
    assert tokens >= inside.learner.pp * inside.learner.max_tokens_per_micro_batch
    assert inside.train.minibatches == 2


def seconds_of(config: RunConfig, shape: ModelShape) -> float:
    found = estimate(config, shape).step
    assert found is not None
    return found.seconds


def test_a_rehearsal_says_its_limits_before_it_has_nodes_and_no_advice_for_longer_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    keys = ("run.name=x", "run.launcher=slurm", f"model.path={tmp_path}")
    job = rehearsal_of(load_config("qwen3_30b_a3b", keys))
    (limits, batch) = announced(job)
    minutes, *stages = (float(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", limits))
    assert str(int(minutes)) == job.slurm.time
    assert 60 * minutes >= sum(stages)
    assert batch.startswith("a step has 2 of the run's 64 prompts, and 2 of its 4 minibatches")
    findings = preflight(run_of(job), for_job=True, once=True)
    assert not [text for text in findings.texts("note") if "signal_seconds" in text]
    assert any("a checkpoint, every 1 steps" in text for text in findings.texts("fact"))
    unknown = announced(rehearsal_of(load_config("qwen3_30b_a3b", [*keys, "slurm.speeds.gpu=null"])))
    assert [*unknown][-1].endswith("set slurm.speeds.gpu to the kind of your GPUs, as h100")


def test_shares_of_a_step_are_bound_by_those_of_the_runs_own_batch() -> None:
    """A step of the rehearsal is shorter: its push would take too much of it."""
    own, shape = recipe("qwen3_235b_a22b", "run.launcher=slurm")
    inside = run_of(own)
    own_seconds, seconds = seconds_of(own, shape), seconds_of(inside, shape)
    row = {"seconds/step": seconds, "seconds/weights": 0.08 * own_seconds, "seconds/checkpoint": 0.0}
    row |= {"tokens/train": 1.0, "tokens/rollout": 1.0, "checkpoint/write_seconds": 2 * own_seconds}
    lines = {line.what: line for line in lines_of_run(own, inside, shape, [row, row], None, None)}
    assert lines["step, with its checkpoint"].verdict == "as predicted"
    assert lines["push of weights"].bound == pytest.approx(0.1 * own_seconds)
    assert lines["checkpoint"].bound == pytest.approx(0.1 * own_seconds * own.checkpoint.every)


@pytest.mark.parametrize(
    "keys",
    [
        ("slurm.exclude_slow=2",),
        ("checkpoint.keep_best=2",),
        ("checkpoint.keep_best=1", "checkpoint.keep_every=100"),
        ("eval.mode=beside", "eval.at_once=4", "rollout.server.replicas=1"),
        (
            "eval.sets.own.samples=1",
            "eval.sets.late.data.type=arithmetic",
            "train.steps=400",
            "eval.sets.late.at_steps=400",
        ),
        ("train.steps=400", "profile.steps=150", "profile.ranks=0"),
    ],
)
def test_every_run_has_a_rehearsal_with_its_mode_of_evaluations(keys: tuple[str, ...]) -> None:
    job = rehearsal_of(config("run.name=x", *keys))
    assert run_of(job).eval.mode == job.eval.mode


def test_of_all_sets_a_rehearsal_samples_few_problems_of_the_first_once() -> None:
    """The others keep their samples, for which servers need slots, and are due at a step that never comes."""
    first = ("samples=64", "temperature=1.0", "pass_at=1,8", "limit=256", "data.type=arithmetic", "data.digits=3")
    other = ("samples=16", "temperature=1.0", "every=5")
    keys = [*(f"eval.sets.first.{key}" for key in first), *(f"eval.sets.other.{key}" for key in other)]
    run = run_of(rehearsal_of(config("run.name=x", *keys)))
    sets = {
        name: ProblemSet(name=name, prompts=(), section=one, temperature=1.0) for name, one in run.eval.sets.items()
    }
    assert [name for name, one in sets.items() if one.section.due(0, every=run.eval.every, last=False)] == ["first"]
    assert (run.eval.sets["first"].limit, run.eval.sets["first"].samples) == (8, 1)
    assert run.eval.sets["other"].samples == 16
    assert run_of(rehearsal_of(config("run.name=x", *keys, "eval.sets.first.limit=3"))).eval.sets["first"].limit == 3


def test_weights_are_made_up_where_the_folder_has_none(tmp_path: Path) -> None:
    model = make_tiny_model(TinyModelSection(), tmp_path, 0)
    given = config(f"model.path={model}")
    assert not rehearsal_of(given).model.random_weights
    (model / "model.safetensors").unlink()
    assert rehearsal_of(given).model.random_weights


def test_the_file_to_send_holds_no_secret_and_other_names_for_nodes_if_asked(tmp_path: Path) -> None:
    job = rehearsal_of(config("run.name=x", "slurm.environment.HF_TOKEN=sesame", "slurm.account=acme"))
    failed = "start: rank 3 on gpu-7, gpu-70 and gpu-7b"
    report = RehearsalReport(config=job, slow={"gpu-7": ["its network"]}, failures=[failed])
    report.nodes, report.hosts = {"gpu-7": {}}, ["gpu-7", "gpu-70"]  # one gave no answer
    path = report.write(tmp_path, hide_hosts=True)
    text = path.read_text()
    assert not re.search(r"sesame|HF_TOKEN|acme|gpu-7\b", text)
    assert "gpu-70" not in text
    assert "and gpu-7b" in text  # another word
    (name,) = json.loads(text)["slow"]
    assert re.fullmatch(r"host-[0-9a-f]{8}", name)
    assert f"rank 3 on {name}, host-" in text
    assert "gpu-7" in (tmp_path / "rehearsal.txt").read_text()
    assert with_hidden_hosts("gpu-7", ["gpu-7"]) != with_hidden_hosts("gpu-7", ["gpu-7"])


def test_an_interpreter_in_which_this_code_is_not_installed_reports_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As slurm.python's, which has the code by PYTHONPATH and only needs its dependencies."""
    report = RehearsalReport(config=config("run.name=x"))
    installed = json.loads(report.write(tmp_path, hide_hosts=False).read_text())
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed["rl_megatron"]
    assert json.loads(report.write(tmp_path, hide_hosts=False).read_text()) == {**installed, "rl_megatron": None}


def test_a_run_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "rehearsal").mkdir()
    attempts = RehearsedRun(file=tmp_path / "none.yaml", folder=tmp_path, allocation=None)
    with pytest.raises(NotReached, match=r"(?s)the run ended before the first step;.*none\.yaml"):
        attempts.start(60.0)


def test_a_run_may_end_after_the_stages_time_once_its_rank_was_killed(tmp_path: Path) -> None:
    """It takes seconds to end, which are not there where the checkpoint was late."""
    (tmp_path / "rehearsal").mkdir()
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 2, "seconds/step": 1.0}\n')
    with subprocess.Popen(["sleep", "infinity"]) as rank:
        try:
            (tmp_path / "ranks.txt").write_text(f"rank 1 node {rank.pid} 1.00 0 0 0\n")
            attempts = RehearsedRun(file=tmp_path / "none.yaml", folder=tmp_path, allocation=None)
            found = attempts.start(0.5)
            assert rank.wait(60) == -signal.SIGKILL
        finally:
            rank.kill()
    assert found.killed is not None
    assert found.noticed is not None
