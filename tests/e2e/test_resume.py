"""Runs killed at any moment, or stopped, and continued, equal to the bit a run that never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher.build.model import starting_shape
from rl_megatron.config.io import load_config
from rl_megatron.data.routes import decode_routes
from rl_megatron.evaluation.results import read_results
from rl_megatron.observability.metrics.table import PHASE_SECONDS
from rl_megatron.scaling.saves import bytes_by_rank
from rl_megatron.training import checkpoints
from rl_megatron.weights.layouts.learner import learner_layout
from tests.e2e.processes import PORTABLE, Place, Run, alive, eventually
from tests.kills.points import Point, Witness, ctrl_c_at
from tests.perfetto import check_trace

SAVES = "rl_megatron.training.checkpoints"
IN_A_SAVE = (
    Point(name="a checkpoint has its folder", call=f"{SAVES}:CheckpointStore._make_room", after=True),
    Point(name="the first checkpoint has its name", call=f"{SAVES}:publish_folder", after=True),
    Point(name="ranks write", call=f"{SAVES}:CheckpointStore.save", after=True),
)
IN_THE_WARM_START = Point(name="warm start, step 3", call="rl_megatron.training.jobs.warm_start:WarmStart.step", nth=3)
IN_STEP_3 = Point(name="step 3, between two checkpoints", call="rl_megatron.training.update:Update.__call__", nth=3)
THIRD_SAVE = Point(name="step 3, once step 2 is saved", call=f"{SAVES}:CheckpointStore.save", nth=3)
LEFT = (".writing-step_000000", "step_000000", ".writing-step_000002")  # by each
ONE = ("learner.ep=1", "reward.function=my_rewards:even")
STORED = Path(__file__).with_name("reference.json")
PIPELINE = (
    *ONE,
    *("learner.pp=2", "train.max_staleness=1", "eval.every=1", "train.lr_decay=none", "algorithm.routing_replay=r3"),
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


def test_the_timeline_is_a_trace_whose_seconds_are_those_of_the_rows(reference: Run) -> None:
    """Perfetto leaves nothing of it out; sums within 1 %."""
    check_trace(reference.folder / "trace.json")
    events = json.loads((reference.folder / "trace.json").read_text())
    shown = [event for event in events if event["ph"] == "X"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    queued: dict[tuple[int, str], int] = {}
    for e in sorted(shown, key=lambda e: (e["ts"], -e["dur"])):
        lane = processes[e["pid"]].partition(" (")[0], threads[e["pid"], e["tid"]]
        lanes.setdefault(lane, []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
        queued[e["ts"], e["name"]] = e.get("args", {}).get("queued_us", 0)
    assert {("controller", thread) for thread in ("steps", "phases", "pushes", "saves")} <= lanes.keys()
    assert {("sampling", "request 0"), ("sampling", "reward 0"), ("rank 0", "calls")} <= lanes.keys()
    steps = {name: (begin, end) for begin, end, name in lanes["controller", "steps"]}
    rows = [row for row in reference.rows() if "seconds/step" in row]
    assert len(steps) == len(rows) == 8
    for row in rows:
        warm = row["phase"] == "warm_start"
        first, last = steps[f"warm start step {row['warm_start/step']}" if warm else f"step {row['step']}"]
        assert (last - first) / 1e6 == pytest.approx(row["seconds/step"], rel=0.01)
        phases = [one for one in lanes["controller", "phases"] if first <= one[0] and one[1] <= last]
        timed = {name.removeprefix("seconds/") for name in row if name.startswith("seconds/")} & set(PHASE_SECONDS)
        for phase in {name for *_, name in phases} | timed:
            seconds = sum(end - begin for begin, end, name in phases if name == phase) / 1e6
            assert seconds == pytest.approx(row[f"seconds/{phase}"], rel=0.01, abs=1e-5), (row["step"], phase)
    calls, asked = (lanes["rank 0", thread] for thread in ("calls", "asked by the controller"))
    assert {"backward", "step", "forward", "after its forward", "optimizer", "generate", "save"} <= {
        c[2] for c in calls
    }
    outer = [one for one in calls if one[2] in {one[2] for one in asked}]
    for begin, end, name in outer:  # a rank's call lies between the controller's call and its answer, on one clock
        waits = [(first - queued[first, name], last) for first, last, waited in asked if waited == name]
        assert any(first <= begin + 1000 and end - 1000 <= last for first, last in waits)


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
    begun = [r["step"] for r in reference.rows() if "checkpoint/stage_seconds" in r]
    ended = [r["checkpoint/step"] for r in reference.rows() if "checkpoint/step" in r]
    assert begun == [3, 5]
    assert ended in ([2, 4], [2])  # no step waits behind the first; the last but one may end in the last step
    assert planned < min(written) <= max(written) < planned + frames + 200_000  # and .metadata


EVALUATES = """
import asyncio, sys
from pathlib import Path
sys.path.append(".")
from launcher.build.trained import trained_model
from launcher.programs import evaluate
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
    run = place.fork("killed", *ONE, before=Witness(folder=place.folder, point=IN_THE_WARM_START))
    run.killed()
    assert not list(run.folder.glob("checkpoints/*"))

    for point, left in zip(IN_A_SAVE, LEFT, strict=True):
        witness = Witness(folder=place.folder, point=point)
        run = place.fork("killed", *ONE, resume=True, before=witness)  # the first starts over: nothing is saved yet
        run.killed()
        assert (run.folder / "checkpoints" / left / "learner").is_dir()

    run = place.fork("killed", *ONE, resume=True, before=Witness(folder=place.folder, point=IN_STEP_3))
    run.killed()

    (place.folder / "hold").touch()
    run = place.fork("killed", *ONE, resume=True)
    run.until((place.folder / "holding").exists, "a step")
    (worker,) = run.workers()
    worker.kill()
    (place.folder / "hold").unlink()
    assert run.end() == 1
    assert f"rank 0 (pid {worker.pid}) was killed by signal 9" in run.text()

    run = place.fork("killed", *ONE, resume=True).finish()
    assert run.record() == reference.record()
    assert sorted(p.name for p in run.folder.glob("checkpoints/*")) == ["step_000004", "step_000006"]
    assert (run.folder / "hf_step_000006").is_dir()


def test_stopped_by_ctrl_c_in_the_warm_start_and_between_checkpoints(place: Place, reference: Run) -> None:
    """The run sends the signal itself: a test that waits for a row may be late by steps."""
    run = place.fork("stopped", *ONE, before=partial(ctrl_c_at, IN_THE_WARM_START)).finish()
    assert [p.name for p in run.folder.glob("checkpoints/*")] == ["warm_start_000003"]
    assert "--resume goes on" in run.text()

    run = place.fork("stopped", *ONE, resume=True, before=partial(ctrl_c_at, IN_STEP_3)).finish()
    assert max(p.name for p in run.folder.glob("checkpoints/step_*")) == "step_000003"

    run = place.fork("stopped", *ONE, resume=True).finish()
    assert "resuming from runs/stopped/checkpoints/step_000003" in run.text()
    assert run.record() == reference.record()


def test_a_second_ctrl_c_ends_at_once(place: Place) -> None:
    run = place.fork("impatient", *ONE, "train.steps=100000")
    run.until_row(step=1)
    children = run.workers()
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "press Ctrl-C again" in run.text(), "the first Ctrl-C to be seen")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    eventually(lambda: not any(map(alive, children)), "ranks to end")  # at once, the run does not wait for them
    assert "interrupted" in run.text()


def test_a_pipeline_with_rollouts_ahead_resumes_its_buffer_and_exports_what_sampled(place: Place) -> None:
    reference = place.fork("ahead", *PIPELINE, "train.steps=4").finish()
    witness = Witness(folder=place.folder, point=THIRD_SAVE)
    run = place.fork("ahead-killed", *PIPELINE, "train.steps=3", before=witness)
    run.until(lambda: len(run.workers()) == 2, "two ranks")
    run.killed()
    run = place.fork("ahead-killed", *PIPELINE, "train.steps=3", resume=True).finish()
    run = place.fork("ahead-killed", *PIPELINE, "train.steps=4", resume=True).finish()
    rows, _ = run.record()
    assert [row["staleness/max"] for row in rows if row["step"]] == [0, 1, 1, 1]
    rerouted = [row["moe/rerouted_fraction"] for row in rows if row["step"]]
    assert 0 < rerouted[0] < 0.1 < rerouted[-1] < 0.5  # after the first minibatch; then rollouts are of older weights
    assert run.record() == reference.record()

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
        logprobs = said.logits[0, turn.start - 1 :].log_softmax(-1)
        theirs = logprobs.gather(1, tokens[0, turn.start :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(turn.logprobs), theirs, rtol=0, atol=1e-4)
        assert row.routes is not None
        routes = torch.tensor(decode_routes(row.routes)).sort(-1).values
        wanted = torch.stack([x.topk(routes.shape[-1]).indices.sort(-1).values for x in said.router_logits], 1)
        assert routes.tolist() == wanted.tolist()


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
