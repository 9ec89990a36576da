"""Runs killed at any moment, or stopped, and continued, equal to the bit a run that never was."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from bisect import bisect_right
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher.build.model import starting_shape
from rl_megatron.config.io import load_config
from rl_megatron.evaluation.results import read_results
from rl_megatron.observability.metrics import PHASE_SECONDS
from rl_megatron.training import checkpoints
from rl_megatron.weights.layouts.learner import learner_layout
from tests.documents import blocks
from tests.e2e.conftest import Refused
from tests.e2e.processes import PORTABLE, Place, Run, alive, eventually
from tests.kills.points import Point, Witness, ctrl_c_at
from tests.perfetto import check_trace
from tests.unit.launcher.commands import status_of
from tools.planner.memory import bytes_by_rank

SAVES = "rl_megatron.training.checkpoints"
FOLDER_MADE = Point(name="a checkpoint has its folder", call=f"{SAVES}:CheckpointStore._make_room", after=True)
NAMED = Point(name="the first checkpoint has its name", call=f"{SAVES}:publish_folder", after=True)
RANKS_WRITE = Point(name="ranks write", call=f"{SAVES}:CheckpointStore.save", after=True)
IN_THE_WARM_START = Point(name="warm start, step 3", call="rl_megatron.training.jobs.warm_start:WarmStart.step", nth=3)
IN_STEP_3 = Point(
    name="step 3, between two checkpoints", call="rl_megatron.training.update:PolicyUpdate.__call__", nth=3
)
NOT_EXPORTED = Point(name="the last step is saved, not exported", call="rl_megatron.training.loop:Loop.export")
ONE = ("learner.ep=1", "reward.function=my_rewards:even")
REPO, STORED = Path(__file__).parents[2], Path(__file__).with_name("reference.json")
PIPELINE = (
    *ONE,
    *("learner.pp=2", "train.max_staleness=1", "eval.every=1", "train.lr_decay=none", "algorithm.routing_replay=r3"),
    *("algorithm=gmpo", "train.steps=3"),
)


@pytest.fixture(scope="module")
def reference(place: Place) -> Run:
    """A run that is left alone, of the same numbers on every processor."""
    place.environment = PORTABLE
    return place.start("reference", *ONE).finish()


def test_the_reference_learns_from_a_gradient(reference: Run) -> None:
    recorded = reference.rows()
    assert [(r["phase"], r.get("warm_start/step", r["step"])) for r in recorded] == [
        *(("warm_start", k) for k in (0, 2, 4)),
        *(("rl", k) for k in range(7)),
    ]
    assert all(r["grad_norm"] > 0 for r in recorded if r["step"])
    assert [r["step"] for r in recorded if "eval/accuracy" in r and r["phase"] == "rl"] == [0, 2, 4, 6]


def test_the_reference_records_what_it_always_did(place: Place, reference: Run) -> None:
    """Samples and integers exactly, other numbers to 1e-5: the same machine has rounded norms of gradients by 1.3e-6
    otherwise, some hours later."""
    found, stored = place.folder / STORED.name, json.loads(STORED.read_text())
    metrics, samples = reference.record()
    found.write_text(json.dumps({"metrics": metrics, "samples": samples}, indent=1) + "\n")
    assert samples == stored["samples"]
    for row, wanted in zip(metrics, stored["metrics"], strict=True):
        close = {name: pytest.approx(x, rel=1e-5, abs=1e-5) for name, x in wanted.items() if isinstance(x, float)}
        assert row == wanted | close, f"where this is meant to change, copy {found} to {STORED}"


def lanes_of(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[tuple[int, int, str, dict[str, Any]]]]:
    """Begin, end, name and arguments of a trace's spans by process and thread, in their order."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes: dict[tuple[str, str], list[tuple[int, int, str, dict[str, Any]]]] = {}
    for e in sorted((event for event in events if event["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        lane = processes[e["pid"]].partition(" (")[0], threads[e["pid"], e["tid"]]
        lanes.setdefault(lane, []).append((e["ts"], e["ts"] + e["dur"], e["name"], e.get("args", {})))
    return lanes


def test_the_timeline_is_a_trace_whose_seconds_are_those_of_the_rows(reference: Run) -> None:
    """Perfetto leaves nothing of it out; sums within 1 %."""
    check_trace(reference.folder / "trace.json")
    lanes = lanes_of(json.loads((reference.folder / "trace.json").read_text()))
    assert {("controller", thread) for thread in ("steps", "phases", "pushes", "saves")} <= lanes.keys()
    assert {("sampling", "request 0"), ("sampling", "reward 0"), ("rank 0", "calls")} <= lanes.keys()
    steps = {name: (begin, end) for begin, end, name, _ in lanes["controller", "steps"]}
    rows = [row for row in reference.rows() if "seconds/step" in row]
    assert len(steps) == len(rows) == 8
    for row in rows:
        warm = row["phase"] == "warm_start"
        first, last = steps[f"warm start step {row['warm_start/step']}" if warm else f"step {row['step']}"]
        assert (last - first) / 1e6 == pytest.approx(row["seconds/step"], rel=0.01)
        phases = [one[:3] for one in lanes["controller", "phases"] if first <= one[0] and one[1] <= last]
        timed = {name.removeprefix("seconds/") for name in row if name.startswith("seconds/")} & set(PHASE_SECONDS)
        for phase in {name for *_, name in phases} | timed:
            seconds = sum(end - begin for begin, end, name in phases if name == phase) / 1e6
            assert seconds == pytest.approx(row[f"seconds/{phase}"], rel=0.01, abs=1e-5), (row["step"], phase)
    calls, asked = (lanes["rank 0", thread] for thread in ("calls", "asked by the controller"))
    assert {"backward", "step", "forward", "after its forward", "optimizer", "generate", "save"} <= {
        name for *_, name, _ in calls
    }
    for begin, end, name, _ in calls:  # a rank's call lies between the controller's call and its answer, on one clock
        waits = [(first - given.get("queued_us", 0), last) for first, last, waited, given in asked if waited == name]
        assert not waits or any(first <= begin + 1000 and end - 1000 <= last for first, last in waits)


def test_the_learner_agrees_with_the_engine_at_every_step(reference: Run) -> None:
    differences = [r["mismatch/logprob_abs_max"] for r in reference.rows() if r["step"]]
    assert len(differences) == 6
    assert 0 <= max(differences) < 1e-4


def test_a_checkpoint_has_the_bytes_that_are_planned(reference: Run) -> None:
    """But for the frames that torch gives each tensor, 2 KiB at most."""
    config = load_config(str(reference.folder / "config.yaml"), [])
    layout, (planned,) = learner_layout(config, shape := starting_shape(config)), bytes_by_rank(config, shape).values()
    frames = 2048 * 4 * layout.num_parameters(0)  # of a parameter, its float32 copy and two moments
    written = {r["checkpoint/bytes"] for r in reference.rows() if "checkpoint/bytes" in r}
    ended = [r["checkpoint/step"] for r in reference.rows() if "checkpoint/step" in r]
    assert ended in ([2, 4], [2])  # no step waits behind the first; the last but one may end in the last step
    assert planned < min(written) <= max(written) < planned + frames + 200_000  # and .metadata


EVALUATES = """
import asyncio, sys
from pathlib import Path
sys.path.append(".")
from launcher.build.trained import trained_model
from launcher.commands import evaluate
for model in sys.argv[1:]:
    asyncio.run(evaluate.measure_model(trained_model(Path(model), None, []), Path(model).name))
assert "megatron" not in sys.modules
"""


def test_an_evaluation_of_a_checkpoint_is_that_of_its_export_and_the_runs_own(place: Place, reference: Run) -> None:
    """By rl-megatron eval's program, without megatron-core."""
    run, kept = "runs/reference", "step_000004"
    models = [run, f"{run}/hf_step_000006", f"{run}/checkpoints/{kept}"]
    environment = {**os.environ, **PORTABLE, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", EVALUATES, *models], cwd=place.folder, env=environment, check=True)
    newest, exported, before = (
        read_results(place.folder / folder / name)
        for folder, name in (
            (f"{run}/eval", "reference.json"),
            ("eval", "hf_step_000006.json"),
            (f"{run}/eval", f"{kept}.json"),
        )
    )
    assert newest.weights == exported.weights != before.weights
    accuracy = {row["step"]: row["eval/accuracy"] for row in reference.rows() if "eval/accuracy" in row}
    assert newest.sets["held_out"].measured.right == exported.sets["held_out"].measured.right
    assert newest.sets["held_out"].figures["mean@1"].value == accuracy[6]
    assert before.sets["held_out"].figures["mean@1"].value == accuracy[4]


def test_killed_at_every_kind_of_moment(place: Place, reference: Run) -> None:
    """And stopped, by Ctrl-C within steps that are known: a test that waits for a row may be late by steps. The run's
    name is its configuration's."""
    folder, keys = place.folder / "runs" / "tiny_cpu", (*ONE, "run.name=null")
    start = partial(place.fork, folder.name, *keys)
    start(before=Witness(folder=place.folder, point=FOLDER_MADE)).killed()
    assert (folder / "checkpoints/.writing-step_000000/learner").is_dir()

    run = start(resume=True, before=partial(ctrl_c_at, IN_THE_WARM_START)).finish()  # it starts over
    assert [p.name for p in folder.glob("checkpoints/*")] == ["warm_start_000003"]
    assert "continue with: rl-megatron train" in run.text()
    for point, left in ((NAMED, "step_000000"), (RANKS_WRITE, ".writing-step_000002")):
        start(resume=True, before=Witness(folder=place.folder, point=point)).killed()
        assert (folder / "checkpoints" / left / "learner").is_dir()
    start(resume=True, before=partial(ctrl_c_at, IN_STEP_3)).finish()
    assert max(p.name for p in folder.glob("checkpoints/step_*")) == "step_000003"

    (place.folder / "hold").touch()
    run = start(resume=True)
    run.until((place.folder / "holding").exists, "a step")
    second = place.fork("tiny_cpu", *ONE, resume=True)
    assert second.end() == 1
    assert "runs/tiny_cpu: another process runs in it" in second.text()
    children = run.workers()
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "press Ctrl-C again" in run.text(), "the first Ctrl-C to be seen")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    eventually(lambda: not any(map(alive, children)), "ranks to end")  # at once, the run does not wait for them
    assert "interrupted" in run.text()
    (place.folder / "hold").unlink()

    run = start(resume=True).finish()
    assert "resuming from runs/tiny_cpu/checkpoints/step_000003" in run.text()
    assert run.record() == reference.record()
    assert sorted(p.name for p in folder.glob("checkpoints/*")) == ["step_000004", "step_000006"]
    assert (folder / "hf_step_000006").is_dir()


@pytest.fixture(scope="module")
def ahead(place: Place) -> Run:
    """A pipeline with rollouts ahead, whose objective is the page's file, and whose second step is profiled."""
    documented, *_ = blocks(REPO / "docs" / "algorithms.md", "python")
    (place.folder / "mine.py").write_text(documented.text)
    keys = ("train.steps=4", "algorithm.objective=mine:gmpo", "profile.steps=2")
    return place.fork("ahead", *PIPELINE, *keys).finish()


def test_a_pipeline_with_rollouts_ahead_resumes_its_buffer_and_exports_what_sampled(place: Place, ahead: Run) -> None:
    """By the row of the same objective. Killed before it is exported, a run is; with more steps it goes on."""
    run = place.fork("killed", *PIPELINE, before=Witness(folder=place.folder, point=NOT_EXPORTED))
    run.killed()
    run = place.fork("killed", *PIPELINE, resume=True).finish()
    assert "step_000003: the run is at its last step; give a larger train.steps" in run.text()
    longer = place.call_in_fork("train", "--config", "runs/killed/config.yaml", "--resume", "train.steps=4")
    assert longer.end() == 0, longer.text()
    rows, _ = run.record()
    assert [row["staleness/max"] for row in rows if row["step"]] == [0, 1, 1, 1]
    assert all(row["grad_norm"] > 0 for row in rows if row["step"])
    assert {row["devices/learner"] for row in run.rows() if row["step"]} == {2}
    rerouted = [row["moe/rerouted_fraction"] for row in rows if row["step"]]
    assert 0 < rerouted[0] < 0.1 < rerouted[-1] < 0.5  # after the first minibatch; then rollouts are of older weights
    assert run.record() == ahead.record()

    stream = checkpoints.read(run.folder / "checkpoints/step_000004").state.stream
    assert stream is not None
    groups = [place.answered.group for place in stream.places if place.answered is not None]
    assert [place.drawn.batch for place in stream.places] == [5] * 4
    rows = [row for g in groups if g is not None for one in g.trajectories for row in one.chains]
    assert len(rows) == 16
    assert {turn.spans for row in rows for turn in row.turns} == {((0, 3),)}  # the weights that this folder holds
    model = AutoModelForCausalLM.from_pretrained(run.folder / "hf_step_000003", dtype=torch.float32)
    for row in rows:
        (turn,), tokens = row.turns, torch.tensor(row.token_ids[None], dtype=torch.int64)
        with torch.no_grad():
            said = model(tokens[:, :-1], output_router_logits=True)
        theirs = said.logits[0, turn.start - 1 :].log_softmax(-1).gather(1, tokens[0, turn.start :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(turn.logprobs), theirs, rtol=0, atol=1e-4)
        routes = torch.tensor(row.columns["routes"]).sort(-1).values
        wanted = torch.stack([x.topk(routes.shape[-1]).indices.sort(-1).values for x in said.router_logits], 1)
        assert routes.tolist() == wanted.tolist()


def test_steps_are_profiled_as_configured(ahead: Run) -> None:
    """Kernels lie inside the ranks' calls in the timeline."""
    (folder,) = (ahead.folder / "profile").iterdir()
    assert folder.name == "step_000002"
    assert {path.name for path in folder.iterdir()} == {"rank-0.json.gz", "ranks.json"}
    trace = ahead.folder / "timeline.json.gz"
    assert status_of("report", str(ahead.folder), "--trace", str(trace)) == 0
    found = lanes_of(json.loads(gzip.decompress(trace.read_bytes())))
    assert "step 2" in {name for *_, name, _ in found["controller", "steps"]}
    calls = found["rank 0", "calls"]
    first = min(begin for begin, _, name, _ in calls if name in ("backward", "score", "step", "generate"))
    spans = [
        one
        for (process, thread), some in found.items()
        if process == "rank 0"
        for one in some
        if thread.startswith("operators")
    ]
    assert all(begin >= first - 1000 for begin, *_ in spans)
    products = [(begin, end) for begin, end, name, _ in spans if name == "aten::mm"]
    assert len(products) > 100
    inside = [(begin, end) for begin, end, _, given in calls if "call" in given]
    starts = [begin for begin, _ in inside]
    for begin, end in products:
        first, last = inside[bisect_right(starts, begin + 2000) - 1]
        assert first - 2000 <= begin <= end <= last + 2000


def test_a_resume_with_other_values_or_fewer_steps_is_refused(place: Place, reference: Run, refused: Refused) -> None:
    other = ("data.digits=3", "algorithm=cispo", "learner.ep=2", "train.steps=7")
    said = refused(*place.training("reference", *ONE, *other, resume=True))
    assert "data.digits: 2 then, 3 now" in said
    assert "algorithm.objective: 'clip' then, 'cispo' now" in said
    assert "learner.ep" not in said
    assert "train.steps" not in said
    said = refused("train", "--config", "runs/reference/config.yaml", "--resume", "train.steps=1")
    assert "train.steps=1, but runs/reference/checkpoints/step_000006 is of step 6; give train.steps=6" in said
    assert [row["step"] for row in reference.rows() if row["phase"] == "rl"] == [*range(7)]


def test_the_doctor_of_a_mismatch(place: Place, reference: Run, refused: Refused) -> None:
    """Nothing is wrong with the run, but with what the doctor is asked to sample with."""
    sound = place.call_in_fork("doctor", "mismatch", "runs/reference", "--prompts", "8", "--completions", "2")
    assert sound.end() == 0, sound.text()
    assert "runs/reference/checkpoints/step_000006" in sound.text()
    sick = place.call_in_fork("doctor", "mismatch", "runs/reference", "rollout.top_p=0.5", "learner.tp=2")
    assert sick.end() == 1, sick.text()
    report = json.loads((reference.folder / "doctor/mismatch.json").read_text())
    found = {f["cause"]: f for f in report["findings"]}
    assert [cause for cause, f in found.items() if f["verdict"] == "guilty"] == ["sampling parameters"]
    assert "top_p 0.5 (the learner: 1)" in found["sampling parameters"]["evidence"]
    assert "set rollout.top_p=1" in found["sampling parameters"]["fix"]
    assert "tensors compared" in found["weights"]["evidence"]
    assert "nothing" in refused("doctor", "mismatch", "nothing")
    keys = ("rollout=vllm", "rollout.server.colocated=true")
    assert "add rollout.server.colocated=false" in refused("doctor", "mismatch", "tiny_cpu", *keys)


def test_a_shard_that_changed_is_named_by_the_rank_that_reads_it(place: Place, reference: Run) -> None:
    checkpoint = reference.folder / "checkpoints/step_000006"
    shard = checkpoint / "learner/__0_0.distcp"
    before = shard.read_bytes()
    flipped = bytearray(before)
    flipped[len(flipped) // 2] ^= 1
    shard.write_bytes(flipped)
    try:
        run = place.fork("reference", *ONE, resume=True)
        assert run.end() == 1
    finally:
        shard.write_bytes(before)
    error = run.text()
    assert "__0_0.distcp changed since it was written" in error
    assert f"remove {checkpoint.relative_to(place.folder)} to resume from the checkpoint before it" in error
    assert "Traceback" not in error
