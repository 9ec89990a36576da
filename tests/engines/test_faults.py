"""Faults that cost a server of its own: a broken loader, a killed server, a killed trainer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from launcher.servers.engines import SERVERS
from rl_megatron.engines.replicas import Health, Replica
from rl_megatron.engines.sglang import adapter as sglang
from rl_megatron.errors import ConfigError, EngineError, RLMegatronError, SyncError
from rl_megatron.types import Completion
from tests.e2e.processes import alive, eventually
from tests.engines.benches import REPO, ServedBench, interpreter, logprobs_of, request, served, spare_a_core, words_of
from tests.engines.conftest import needs

LIMIT = 600.0
TURNS = {
    "sglang": (
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_tensor",
        "/resume_memory_occupation",
    ),
    "vllm": ("seconds to fall asleep", "the engine with tags: ['weights']", "the engine with tags: ['kv_cache']"),
}
"""What a server's log has of a turn: memory given back, taken for weights, these loaded, taken for the cache."""


def refused(server: ServedBench, folder: Path, version: int, match: str) -> None:
    """A push ends with an error that says so, and nothing is served behind it."""
    with pytest.raises(SyncError, match=match):
        server.push(folder, version)
    with pytest.raises(EngineError, match="no weights are served"):
        server.generate(request())


def test_faults_in_vllm_are_named(models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor lost on the way into the model, a bit flipped in it, a worker that dies; and vLLM 0.32.0's experts on
    CPUs with our work-around removed, which its own update API reports as a success. An update that a killed run left
    open is ended. 30 seconds."""
    needs("vllm")
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'tests' / 'engines'}")
    options = "'--worker-extension-cls broken_vllm.WorkerExtension'"
    with served("vllm", models[0], tmp_path, options=options, probes="auto", restarts=0) as server:
        (replica,) = server.engine.servers

        def break_(fault: str) -> None:
            server.run(server.engine.adapter._rpc(replica, "break_", fault))  # type: ignore[attr-defined]

        server.push(models[0], 1)
        faults = {
            "lost": r"its bytes are not those that the learner wrote in model\.embed_tokens\.weight",
            "flipped": r"its bytes are not those that the learner wrote in model\.embed_tokens\.weight",
            "packing": r"log-probs of the probe differ from .* by up to [\d.]+ nats.*no checksum verifies .*experts",
        }
        for version, (fault, told) in enumerate(faults.items(), start=2):
            break_(fault)
            refused(server, models[1 - version % 2], version, told)
        break_("")
        server.run(replica.post("/start_weight_update"))  # and a run is killed
        server.push(models[1], 9)
        assert server.generate(request())[0][0].spans == ((0, 9),)
        break_("dies")
        with pytest.raises(RLMegatronError, match=r"no vLLM server is left|version 10 failed, and is not served"):
            server.push(models[0], 10)


def test_faults_in_sglang_are_told(models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that SGLang's loader does not take, a bit flipped in a stack of experts, packed scales. An update that a
    killed run left open is ended. 40 seconds."""
    needs("sglang")
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'tests' / 'engines'}")
    monkeypatch.setattr(sglang, "_LOADER", "broken_sglang.load")
    with served("sglang", models[0], tmp_path, probes="auto", restarts=0) as server:
        server.push(models[0], 1)
        refused(server, models[1], 101, r"wrote in model\.layers\.1\.self_attn\.q_proj\.weight$")
        refused(server, models[1], 102, r"wrote in model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight$")
        refused(
            server, models[1], 103, r"model\.norm\.weight: SGLang keeps the scales of float8 packed.*fp8-gemm-backend"
        )
        (replica,) = server.engine.servers
        server.run(replica.post("/begin_weight_update", {"selector": "target"}))  # and a run is killed
        server.push(models[1], 104)
        assert server.generate(request())[0][0].spans == ((0, 104),)


async def given_up(replica: Replica) -> None:
    """Until its end is known: the other server may have answered all requests by then."""
    while replica.health is not Health.GONE:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_a_server_that_is_not_started_again_is_done_without(
    models: tuple[Path, Path], tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With 8 completions in flight: the other samples those that it had, each in a second attempt. 60 seconds."""
    needs(name)
    with served(name, models[0], tmp_path, replicas=2, restarts=0) as server:
        spare_a_core()
        server.push(models[1], 1)
        first, second = server.engine.servers
        children = psutil.Process().children(recursive=True)
        (victim,) = [p for p in children if p.ppid() != os.getpid() and first.url.rsplit(":")[-1] in words_of(p)]
        asked = [replace(request([n, *range(30, 50)], new=400), id=f"{n}", prefix_group=f"{n % 2}") for n in range(8)]

        async def killed() -> tuple[int, list[Completion]]:
            running = [asyncio.create_task(server.engine.generate(one)) for one in asked]
            await server.sampling(*running)
            lost = first.in_flight
            os.killpg(victim.pid, signal.SIGKILL)
            return lost, [one for (one,) in await asyncio.gather(*running)]

        lost, answers = server.run(killed())
        assert lost > 0
        again = [record for record in caplog.records if re.search("is sent again|retrying in", record.message)]
        assert len(again) == lost
        assert [len(one.token_ids) for one in answers] == [400] * 8
        for one, completion in zip(asked, answers, strict=True):
            expected = logprobs_of(models[1], one.token_ids, completion, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        server.run(given_up(server.engine.replicas.all[0]))
        assert first.url in server.engine.replicas.all[0].reason
        assert "status" in server.engine.replicas.all[0].reason
        server.push(models[0], 2)
        assert server.generate(request())[0][0].spans == ((0, 2),)
        assert server.engine.servers == [second]


def start(name: str, cwd: Path, *keys: str) -> subprocess.Popen[str]:
    """``rl-megatron train`` on a small run."""
    arguments = (f"rollout={name}", f"rollout.python={interpreter(name)}", "run.name=it", "data.num_eval=16")
    sizes = ("rollout.prompts_per_step=4", "rollout.group_size=4", "warm_start.steps=2", "warm_start.check_every=2")
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", "train", *arguments, *sizes, *keys],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


@pytest.mark.parametrize(("name", "replicas", "transport"), [("sglang", 1, "file"), ("vllm", 2, "direct")])
def test_the_main_job_runs_and_leaves_nothing_behind(tmp_path: Path, name: str, replicas: int, transport: str) -> None:
    """What the learner and the engine make of the same tokens is equal to rounding. 45 seconds.

    Learner and servers take turns: every server gives its memory back before each training, and takes it again around
    the load of the next weights. Every replica samples.
    """
    needs(name)
    ways = (f"rollout.server.replicas={replicas}", f"weights.transport={transport}")
    placed = ("rollout.server.colocated=true", *ways)
    run = start(name, tmp_path, "train.steps=3", "eval.every=2", f"weights.folder={tmp_path}", *placed)
    try:
        output, _ = run.communicate(timeout=LIMIT)
    finally:
        run.kill()
    assert run.returncode == 0, output
    rows = [json.loads(line) for line in (tmp_path / "runs/it/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "mismatch/logprob_abs_max" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 and row["staleness/max"] == 0 for row in steps)
    assert not list(tmp_path.glob("rl_megatron-*"))
    log = (tmp_path / "runs/it/log.txt").read_text()
    assert "on CPUs servers do not release their memory" in log
    assert "DEAD" not in log, log
    for replica in range(replicas):
        said = (tmp_path / f"runs/it/{name}_{replica}.log").read_text()
        turns = re.findall("|".join(map(re.escape, TURNS[name])), said)
        assert turns[-3 * len(TURNS[name]) :] == [*TURNS[name]] * 3


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_servers_end_with_a_trainer_that_is_killed(tmp_path: Path, name: str) -> None:
    """45 seconds."""
    needs(name)
    run = start(name, tmp_path, "train.steps=10000", f"weights.folder={tmp_path}")
    metrics = tmp_path / "runs/it/metrics.jsonl"
    try:
        eventually(
            lambda: run.poll() is not None or (metrics.is_file() and '"step": 2' in metrics.read_text()), "a step"
        )
        assert run.poll() is None
        family = psutil.Process(run.pid).children(recursive=True)
        assert any(re.search(SERVERS[name].module, " ".join(words_of(p))) for p in family)
    finally:
        run.kill()
    run.communicate(timeout=LIMIT)
    eventually(lambda: not any(alive(p) for p in family), "engine and learner processes to end", 60)
    eventually(lambda: not list(tmp_path.glob("rl_megatron-*")), "the mirror to go", 10)


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_an_interpreter_without_the_engine_is_told_before_anything_starts(
    models: tuple[Path, Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engines.benches.interpreter", lambda engine: Path(sys.executable))
    with pytest.raises(ConfigError, match="is not installed there"), served(name, models[0], tmp_path):
        pass


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_a_server_that_cannot_start_is_told_with_its_log(models: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """5 seconds."""
    needs(name)
    with (
        pytest.raises(EngineError, match="--no-such-option"),
        served(name, models[0], tmp_path, options="--no-such-option"),
    ):
        pass
