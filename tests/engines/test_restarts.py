"""Servers that are killed or stopped under a run: they come back with the weights that are served, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from launcher.servers.engines import SERVERS
from rl_megatron.engines import replicas
from rl_megatron.engines.replicas import Health
from rl_megatron.types import Completion, GenerationRequest
from tests.e2e.processes import alive, eventually
from tests.engines.benches import NEW, ServedBench, logprobs_of, request, served, spare_a_core, words_of
from tests.engines.conftest import needs
from tests.engines.straight import FolderSender, direct
from tests.engines.test_faults import start

LIMIT = 900.0
NOTED = """
def noted(prompt, completions, texts):
    with open("noted.txt", "a") as file:
        file.write(f"{prompt.id} {len(completions)}\\n")
    return [float(sum(c.token_ids) % 2 == 0) for c in completions]
"""


def process_of(server: ServedBench, number: int) -> psutil.Process:
    """The server that stands at a place; its guard, which has its port in its command line too, is its parent."""
    port = server.engine.replicas.all[number].server.url.rsplit(":")[-1]
    children = psutil.Process().children(recursive=True)
    (found,) = [p for p in children if p.ppid() != os.getpid() and port in words_of(p)]
    return found


Answered = list[tuple[GenerationRequest, Sequence[Completion]]]


def while_sampling(server: ServedBench, do: Callable[[], None]) -> Answered:
    """Long requests under which something happens, and their answers."""

    async def both(asked: Sequence[GenerationRequest]) -> Answered | None:
        spare_a_core()
        running = [asyncio.create_task(server.engine.generate(r)) for r in asked]
        await server.sampling(*running)
        met = not any(task.done() for task in running)
        if met:
            do()
        answers = await asyncio.gather(*running)
        return list(zip(asked, answers, strict=True)) if met else None

    for new in NEW:
        answered = server.run(both([request(range(20 + i, 40 + i), n=2, new=new) for i in range(6)]))
        if answered is not None:
            return answered
    raise AssertionError("each time a request was over before the server told that it sampled")


def pushed_while_sampling(server: ServedBench, folder: Path, version: int) -> Answered:
    """A push that finds requests at both servers, paused so that none is over before; then one server is left."""
    servers, adapter = server.engine.servers, server.engine.adapter

    async def both(asked: Sequence[GenerationRequest]) -> Answered | None:
        spare_a_core()
        running = [asyncio.create_task(server.engine.generate(r)) for r in asked]
        await server.sampling(*running)
        await asyncio.gather(*(adapter.pause(one, "recompute") for one in servers))
        if met := not any(task.done() for task in running):
            server.sync.folder = folder
            await server.weights.push(version)
            assert server.engine.metrics() == {"engine/healthy": 1, "engine/restarts": 1}
        else:
            await asyncio.gather(*map(adapter.resume, servers))
        answers = await asyncio.gather(*running)
        return list(zip(asked, answers, strict=True)) if met else None

    for new in NEW:
        if answered := server.run(
            both([replace(request(range(20 + i, 40 + i), new=new), id=f"{i}") for i in range(6)])
        ):
            return answered
    raise AssertionError("each time a request was over before the servers were paused")


def check_spans(answered: Answered, models: tuple[Path, Path]) -> None:
    """Each token is of its span's weights, those of version n in ``models[n % 2]``: some requests went on where they
    were, and some were asked again."""
    for asked, (completion,) in answered:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", asked.params.max_new_tokens)
        ends = [*(span.start for span in completion.spans[1:]), len(completion.token_ids)]
        for span, end in zip(completion.spans, ends, strict=True):
            mine, part = torch.tensor(completion.logprobs), slice(span.start, end)
            right = logprobs_of(models[span.version % 2], asked.token_ids, completion, 1.0, part)
            torch.testing.assert_close(mine[part], right[part], atol=1e-4, rtol=0)
    versions = Counter(tuple(span.version for span in completion.spans) for _, (completion,) in answered)
    assert set(versions) == {(1, 2), (2,)}, versions


def until_healthy(server: ServedBench, restarts: int) -> None:
    """All serve, after so many restarts or more: what was killed is healthy until its death is seen."""

    async def wait() -> None:
        async with asyncio.timeout(LIMIT):
            healthy = len(server.engine.replicas.all)
            while (now := server.engine.metrics())["engine/healthy"] < healthy or now["engine/restarts"] < restarts:
                assert not any(r.health is Health.GONE for r in server.engine.replicas.all)
                await asyncio.sleep(0.05)

    server.run(wait())


def check(server: ServedBench, model: Path, answered: Answered, version: int, restarts: int) -> None:
    """Every answer is there, sampled by the weights that are served; so is what each replica samples on its own."""
    for asked, completions in answered:
        wanted = asked.params.max_new_tokens, ((0, version),)
        assert [(len(c.token_ids), c.spans) for c in completions] == [wanted] * 2
        for c in completions:
            expected = logprobs_of(model, asked.token_ids, c, 1.0)
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
    until_healthy(server, restarts)
    for replica in server.engine.replicas.all:
        (c,) = server.run(server.engine.adapter.generate(replica.server, request(), "mine"))
        expected = logprobs_of(model, request().token_ids, c, 1.0)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
        assert c.spans == ((0, version),)


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_servers_that_die_come_back_with_what_is_served(
    models: tuple[Path, Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of sampling, of a push over running requests, where it stands still, of a way straight into it or
    of a push along it, and all of them. 150 seconds for vLLM, 90 for SGLang."""
    needs(name)
    if name == "vllm":
        monkeypatch.setattr(replicas, "HEALTH_SECONDS", 18.0)
    with served(name, models[0], tmp_path, replicas=2, restarts=5) as server:
        server.push(models[1], 1)
        answered = while_sampling(server, lambda: os.killpg(process_of(server, 0).pid, signal.SIGKILL))
        check(server, models[1], answered, 1, restarts=1)
        if name != "vllm":  # the rest is the same code for both, and a minute
            return
        server.sync.after = lambda: os.killpg(process_of(server, 1).pid, signal.SIGSTOP)
        check_spans(pushed_while_sampling(server, models[0], 2), models)
        server.sync.after = lambda: None
        until_healthy(server, 2)

        def kill_all() -> None:
            for process in [process_of(server, number) for number in (0, 1)]:
                os.killpg(process.pid, signal.SIGKILL)

        check(server, models[0], while_sampling(server, kill_all), 2, restarts=4)
        sender = FolderSender(models[1])
        sender.hold(models[1], lambda tensors: None)

        def kill_once() -> None:
            sender.before = sender.before_joining = lambda: None
            os.killpg(process_of(server, 1).pid, signal.SIGKILL)

        server.sync.folder = models[1]
        with direct(server, sender):
            for version, when in enumerate(("before_joining", "before"), start=3):
                setattr(sender, when, kill_once)
                server.run(server.weights.push(version))
                assert server.engine.metrics()["engine/healthy"] == 1
                until_healthy(server, version + 2)
            check(server, models[1], while_sampling(server, lambda: None), version, restarts=version + 2)


def test_a_run_whose_only_server_is_killed_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Sampling ahead, so that the learner has moved on when the server comes back, in a Ray actor. 90 seconds."""
    needs("vllm")
    pytest.importorskip("ray")
    (tmp_path / "my_rewards.py").write_text(NOTED)
    keys = ("train.steps=5", "eval.every=0", "train.max_staleness=1", "reward.function=my_rewards:noted")
    keys += (f"weights.folder={tmp_path}", "warm_start.steps=0", "run.launcher=ray")
    run = start("vllm", tmp_path, *keys)
    folder = tmp_path / "runs/it"
    try:
        metrics = folder / "metrics.jsonl"
        eventually(
            lambda: run.poll() is not None or (metrics.is_file() and '"step": 2' in metrics.read_text()), "a step"
        )
        assert run.poll() is None
        family = psutil.Process(run.pid).children(recursive=True)
        (victim,) = [p for p in family if "rl_megatron.engines.vllm.server" in words_of(p)[1:4]]
        guard = victim.parent()
        assert guard is not None
        holder = guard.parent()
        assert holder is not None
        assert "ServerActor" in " ".join(words_of(holder))
        os.killpg(victim.pid, signal.SIGKILL)
        output, _ = run.communicate(timeout=LIMIT)
    finally:
        run.kill()
    assert run.returncode == 0, output
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    assert [row["engine/restarts"] for row in (steps[0], steps[-1])] == [0, 1]
    assert all(row["engine/healthy"] == 1 and row["staleness/max"] <= 1 for row in steps)
    groups = [line for line in (tmp_path / "noted.txt").read_text().splitlines() if line.endswith(" 4")]
    assert 5 * 4 <= len(groups) <= (5 + 1) * 4  # those sampled ahead wait in the checkpoint
    assert max(Counter(groups).values()) == 1
    log = (folder / "log.txt").read_text()
    changes = ["HEALTHY -> DEAD", "DEAD -> RESTARTING", "RESTARTING -> STALE", "STALE -> HEALTHY"]
    places = [log.rindex(change) for change in changes]
    assert places == sorted(places)
    assert not [p for p in family if alive(p)]
