"""Services of a run: started with a key, asked in turns, restarted, given up, and ended with the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from launcher.hosts.sites import service_sites
from launcher.preflight.checks import preflight
from launcher.processes import restarts
from launcher.programs.submit import checked, for_slurm
from launcher.servers import services as module
from launcher.servers.services import RunningServices
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, ServiceError
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.services import Services
from rl_megatron.types import Completion, Prompt, Span

REPO = Path(__file__).resolve().parents[3]
JUDGE = f"{sys.executable} {REPO / 'tests' / 'judge.py'} --at {{host}}:{{port}}"
TEACHER = tuple(f"algorithm.kl.teachers.t.{key}" for key in ("server=service:big", "engine=vllm", "path=tests"))
PROMPT = Prompt(id="p", text="", token_ids=(0,), answer="")
DONE = Completion(
    token_ids=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), finish_reason="stop", spans=(Span(0, 0),)
)


def configured(command: str = JUDGE, *keys: str) -> RunConfig:
    given = ["reward.function=service:judge/score", f"services.judge.command='{command}'", *keys]
    return load_config("tiny_cpu", given)


def running(config: RunConfig, folder: Path, *, resumes: bool = False) -> tuple[RunningServices, Services]:
    services = Services(config.services)
    return RunningServices(config, folder, service_sites(config, None), services, resumes=resumes), services


def started(mark: Path) -> list[int]:
    return [int(line.split()[0]) for line in mark.read_text().splitlines()]


async def test_it_is_started_asked_with_its_key_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_STARTS", str(tmp_path / "starts"))
    config = configured(JUDGE, "services.judge.replicas=2")
    here, services = running(config, tmp_path)
    reward = resolve_rewards(config.reward, {}, None, services)
    async with here.running():
        first, second = (services.address("judge") for _ in range(2))
        assert first.url != second.url
        assert first.key != second.key
        for _ in range(2):  # each replica once
            assert [one.total for one in await reward(PROMPT, [DONE] * 2, ["a", "ab"])] == [1.0, 0.0]
        shown = [" ".join(psutil.Process(pid).cmdline()) for pid in started(tmp_path / "starts")]
        ports = {url.rpartition(":")[2] for url in (first.url, second.url)}
        assert {line.rpartition(":")[2] for line in shown} == ports
        assert not any(one.key in line for one in (first, second) for line in shown)
    assert not any(psutil.pid_exists(pid) for pid in started(tmp_path / "starts"))
    logs = sorted(tmp_path.glob("service_judge_*.log"))
    assert [log.name for log in logs] == ["service_judge_0.log", "service_judge_1.log"]
    assert all(log.stat().st_mode & 0o077 == 0 for log in logs)


async def test_all_replicas_are_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_STARTS", str(tmp_path / "starts"))
    here, _ = running(configured(JUDGE, "services.judge.replicas=2"), tmp_path)

    end, ending, most = module._Replica.end, 0, 0

    async def counted(one: module._Replica) -> None:
        nonlocal ending, most
        ending += 1
        most = max(most, ending)
        await end(one)
        ending -= 1

    async with asyncio.timeout(60):
        monkeypatch.setattr(module._Replica, "end", counted)
        async with here.running():
            pass
    assert most == 2
    assert not any(psutil.pid_exists(pid) for pid in started(tmp_path / "starts"))


async def test_a_replica_that_dies_is_restarted_and_at_last_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", 0.01)
    config = configured(JUDGE, "services.judge.restarts=1", "reward.http.backoff_seconds=0.05")
    async with asyncio.timeout(60):
        here, services = running(config, tmp_path)
        reward = resolve_rewards(config.reward, {}, None, services)
        async with here.running() as watching:
            os.kill(started(tmp_path / "starts")[0], signal.SIGKILL)
            while len(started(tmp_path / "starts")) < 2:
                await asyncio.sleep(0.01)
            assert (await reward(PROMPT, [DONE], ["a"]))[0].total == 1.0
            os.kill(started(tmp_path / "starts")[1], signal.SIGKILL)
            with pytest.raises(ServiceError) as given_up:
                await watching
            said = str(given_up.value)
            assert "service judge, replica 0 (here) ended with status" in said
            assert "judge listens at 127.0.0.1" in said
            assert "services.judge.restarts=1 are used up" in said
            with pytest.raises(ServiceError, match="no replica of it serves now; it was given up"):
                await services.serving("judge")


@pytest.mark.parametrize(("resumes", "deaths", "starts"), [(False, 1, 1), (True, 2, 3), (True, 9, 3)])
async def test_one_that_dies_while_it_starts_ends_a_run_but_not_its_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resumes: bool, deaths: int, starts: int
) -> None:
    """Which starts it again ``restarts`` times, 2 here."""
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", 0.01)
    mark = tmp_path / "starts"
    program = f'sh -c "echo its log; echo $$ >>{mark}; test $(wc -l <{mark}) -gt {deaths} || exit 3; exec {JUDGE}"'
    here, services = running(configured(program, "services.judge.restarts=2"), tmp_path, resumes=resumes)
    used_up = r"services\.judge\.restarts=2 are used up: " if resumes else ""
    why = rf"(?s)^{used_up}service judge, replica 0 \(here\) ended with status 3; .*judge_0\.log ends with:.*its log"
    async with asyncio.timeout(60):
        fails = pytest.raises(ServiceError, match=why)
        with contextlib.nullcontext() if deaths < starts else fails:
            async with here.running() as watching:
                assert services.address("judge").url
                assert not watching.done()
    assert len(started(mark)) == starts


async def test_a_restart_that_the_system_refuses_is_one_of_its_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", 0.01)
    here, _ = running(configured(JUDGE, "services.judge.restarts=2"), tmp_path)
    async with asyncio.timeout(60):
        async with here.running() as watching:
            log = tmp_path / "service_judge_0.log"
            log.rename(tmp_path / "moved")
            log.symlink_to("moved")  # no server writes through a link
            os.kill(started(tmp_path / "starts")[0], signal.SIGKILL)
            with pytest.raises(ServiceError, match=r"services\.judge\.restarts=2 are used up: .*service_judge_0\.log"):
                await watching


async def test_restarts_before_a_replica_ran_for_long_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(restarts, "CALM_SECONDS", 0.0)
    here, services = running(configured(JUDGE, "services.judge.restarts=1"), tmp_path)
    async with asyncio.timeout(60):
        async with here.running() as watching:
            for died in (1, 2, 3):
                os.kill(started(tmp_path / "starts")[-1], signal.SIGKILL)
                while len(started(tmp_path / "starts")) == died:
                    await asyncio.sleep(0.01)
                await services.serving("judge")
            assert not watching.done()


async def test_any_interpreter_finds_this_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's has no rl_megatron, and must not get the packages beside it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = tmp_path / "server.py"
    program.write_text(
        "import os, rl_megatron.errors\nprint(os.listdir(os.environ['PYTHONPATH']))\nraise SystemExit(3)"
    )
    here, _ = running(configured(f"{sys.executable} -S {program}"), tmp_path)
    with pytest.raises(ServiceError, match=r"ended with status 3[^$]*\['rl_megatron'\]"):
        async with asyncio.timeout(60), here.running():
            pass
    assert not list(tmp_path.glob("rl_megatron-*"))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f'{sys.executable} -c "raise SystemExit(3)"', "service judge, replica 0 .here. ended with status 3"),
        ("no-such-program-here", "No such file"),
        (
            f'{sys.executable} -c "import time; print(1234, flush=True); time.sleep(600)"',
            "answered nothing within services.judge.start_seconds=4; .* ends with:\n  1234",
        ),
        (f"{JUDGE} --no-such-path", "answered status 404 within services.judge.start_seconds=4"),
    ],
)
async def test_one_that_does_not_start_is_named_with_its_last_lines(tmp_path: Path, command: str, said: str) -> None:
    """What was asked, for how long, and what it printed."""
    keys = ["services.judge.start_seconds=4"] + (["services.judge.health=/other"] if "no-such-path" in command else [])
    here, services = running(configured(command.replace("'", '"'), *keys), tmp_path)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ServiceError, match=said):
        async with asyncio.timeout(60), here.running():
            pass
    assert set(psutil.Process().children(recursive=True)) <= before
    with pytest.raises(ServiceError, match="no replica of it serves now"):
        services.address("judge")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["reward.function=service:judge/score"], "reward.function=service:judge: services has none"),
        (["services.judge.command=x"], "services.judge: nothing asks it"),
        (
            ["algorithm=distill", *TEACHER],
            "algorithm.kl.teachers.t.server=service:big: services has none; give services.big.command",
        ),
        (["services.judge.command='x {name}'"], "names host and port alone in braces"),
        (["services.judge.command=''"], "empty"),
        (["slurm.services.nodes=1"], "slurm.services.nodes=1, but services have 0 replicas"),
        (
            [
                "reward.function=service:j",
                "services.j.command=x",
                "slurm.services.nodes=1",
                "slurm.services.partition=c",
            ],
            "slurm.services requests nodes unlike the learner's",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", keys)


def test_a_job_has_nodes_for_services_between_the_learners_and_the_servers() -> None:
    config = for_slurm(
        configured(
            JUDGE,
            *("services.judge.replicas=3", "slurm.services.nodes=2", "slurm.nodes=1", "slurm.ntasks_per_node=2"),
            *("rollout.server.replicas=1", "slurm.engines.nodes=1"),
        )
    )
    lines = checked(config).describe().splitlines()
    assert lines[-2:] == ["engine 0: node 3", "service judge: node 1, node 2, node 1"]


def test_without_nodes_of_their_own_services_are_beside_the_controller() -> None:
    config = for_slurm(configured(JUDGE, "slurm.nodes=1", "slurm.ntasks_per_node=2"))
    assert checked(config).describe().splitlines()[-1] == "service judge: node 0"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "slurm.services.gpus_per_node=0 with slurm.heterogeneous=true"),
        (("slurm.heterogeneous=true",), "slurm.services.gpus_per_node=0"),
        (("slurm.heterogeneous=true", "slurm.services.gpus_per_node=8"), None),
    ],
)
def test_gpus_of_services_that_nobody_asked_for_are_noted(more: tuple[str, ...], said: str | None) -> None:
    nodes = ("services.judge.replicas=2", "slurm.services.nodes=2", "slurm.nodes=1", "slurm.gpus_per_node=8")
    config = for_slurm(configured(JUDGE, *nodes, "slurm.ntasks_per_node=2", *more))
    notes = preflight(config, for_job=True).texts("note")
    assert [text for text in notes if text.startswith("slurm.services.nodes=2: each asks for 8 GPUs")] == (
        []
        if said is None
        else [
            "slurm.services.nodes=2: each asks for 8 GPUs, as the learner's nodes; for services that use none "
            f"set {said}"
        ]
    )
