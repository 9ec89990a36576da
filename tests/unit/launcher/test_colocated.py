"""Learner and servers that take turns: who releases its memory before whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from launcher.controller.group import WorkerGroup
from launcher.controller.roles import BatchCalls, LearnerGroup
from launcher.hosts.sites import server_sites
from launcher.servers.pool import COMPUTING, ServerLauncher, ServerPool, colocated
from launcher.worker.models import RankModels
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer
from rl_megatron.engines import replicas
from rl_megatron.engines.replicas import Health
from rl_megatron.engines.weights import ReplicaWeights
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.interfaces import Launcher, Learner, RunComponents
from rl_megatron.models.tiny import TinySizes, tiny_shape
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.jobs.rl import RLJob
from rl_megatron.types import Loss, ParallelDims
from tests.processes.launcher.test_supervisor import LIMIT, Bed, Place, bed, stuck, until
from tests.samples import sequences_of
from tests.unit.rollout.test_engine_servers import Fake, running


class Ranks:
    """The ranks of a role, which note the calls that come to them."""

    def __init__(self, role: str, heard: list[str]) -> None:
        self.role, self.heard = role, heard
        self.workers = (SimpleNamespace(rank=0),)

    def send(self, name: str, arguments: object) -> list[Any]:
        assert name in RankModels.CALLS
        self.heard.append(f"{self.role} {name}")
        return [[({}, 0.0)] if name == "score" else {}]

    async def gather(self, answers: list[Any]) -> list[Any]:
        return answers

    async def call_all(self, name: str, *arguments: object) -> list[Any]:
        assert name in RankModels.CALLS
        self.heard.append(f"{self.role} {name}")
        return [None]

    async def call(self, name: str, shares: object) -> list[Any]:
        self.heard.append(f"{self.role} {name}")
        return [{}]


def learner(group: WorkerGroup, role: str) -> LearnerGroup:
    return LearnerGroup(group, role, BatchCalls(group, ParallelDims()))


class Servers:
    """All servers, and the push of weights into them."""

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    async def release(self) -> None:
        self.heard.append("servers release")

    async def push(self, version: int) -> None:
        self.heard.append(f"servers load {version}")

    async def export(self, folder: Path) -> None:
        self.heard.append(f"export {folder.name}")
        if folder.is_absolute():
            folder.mkdir()
            (folder / "config.json").touch()


def roles_of(servers: Servers, policy: Any, critic: Any, reference: Any) -> RunComponents:
    learners, weights = {"policy": policy, "critic": critic}, cast(Any, servers)
    return colocated(
        RunComponents(learners=learners, frozen_models={"reference": reference}, engine=weights, weight_sync=weights),
        weights,
    )


async def test_models_release_their_memory_before_a_push_and_servers_before_models_compute() -> None:
    assert {*COMPUTING} == {name for name in dir(Learner) if name[0] != "_"} - {"free_step", "release_memory", "save"}
    heard: list[str] = []
    models = {role: learner(cast(WorkerGroup, Ranks(role, heard)), role) for role in "abc"}
    servers = Servers(heard)
    roles = roles_of(servers, *(models[role] for role in "abc"))
    batch = Packer(dims=ParallelDims(), max_tokens=2).pack(sequences_of([2]))
    await roles.weight_sync.push(1)
    await roles.frozen_models["reference"].score(batch, frozenset())
    await roles.policy.backward(batch, cast(Loss, None))
    await roles.learners["critic"].step(0.1)
    await roles.policy.release_memory()
    await roles.weight_sync.export(Path("x"))
    assert heard == [
        *("a release_memory", "b release_memory", "c release_memory", "servers load 1"),
        *("servers release", "c score", "servers release", "a backward", "servers release", "b step"),
        *("a release_memory", "export x"),
    ]


@pytest.mark.parametrize("fresh", [True, False])
async def test_models_loaded_at_the_start_leave_the_gpus_before_sampling(tmp_path: Path, *, fresh: bool) -> None:
    """They are loaded after a push, which has woken servers; the reference also on a resume."""
    heard: list[str] = []
    groups = {r: cast(WorkerGroup, Ranks(r, heard)) for r in ("policy", "critic", "reference")}
    models = {role: learner(group, role) for role, group in groups.items()}
    servers = Servers(heard)

    async def row(*_: object) -> dict[str, float]:
        heard.append("servers sample")
        return {"eval/accuracy": 0.5}

    roles = roles_of(servers, *(models[role] for role in groups))
    keys = ("rollout=vllm", "rollout.server.colocated=true", "algorithm=ppo", "algorithm.kl.coefficient=0.1")
    config, none = load_config("tiny_cpu", keys), cast(Any, None)
    stream = SimpleNamespace(restore=lambda *_: None, table=None, read_ahead=lambda: None, digest=dict)
    job = RLJob(
        config=config,
        roles=roles,
        prompts=cast(Any, stream),
        evaluation=cast(Any, SimpleNamespace(row=row)),
        update=none,
        start_folder=tmp_path / "start",
        recorder=none,
        push_route="",
        stream=cast(Any, SimpleNamespace(restart=lambda: None)),
    )
    if fresh:
        await roles.weight_sync.push(0)  # as the warm start before it
    else:
        await job.restore(TrainerState(step=3, prompts=none, stream=None))
    await job.start(fresh=fresh)
    if fresh:
        await job.evaluate(Stopwatch())
    version, parked = 0 if fresh else 3, [f"{role} release_memory" for role in models]
    pushed = [*parked, f"servers load {version}"]
    first = ["export start", "servers release", "critic load_weights"] if fresh else []
    loaded = [*first, "servers release", "reference load_weights"]
    assert heard == [*pushed, *loaded, *pushed, *(["servers sample"] if fresh else [])]


def test_servers_leave_the_gpus_before_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    heard: list[str] = []
    critic, servers = learner(cast(WorkerGroup, Ranks("critic", heard)), "critic"), Servers(heard)
    none = cast(Any, None)
    roles = RunComponents(learners={"policy": critic}, frozen_models={}, engine=none, weight_sync=none)
    asyncio.run(colocated(roles, cast(ReplicaWeights, servers)).policy.load(tmp_path, {}))
    assert heard == ["servers release", "critic verify", "critic load"]


HALF = "rollout.server.memory_fraction=0.5"
TURNS = (HALF, "rollout.server.colocated=true")


@pytest.mark.parametrize(
    ("gpus", "keys", "order"),
    [
        ("0", (HALF,), ["servers start", "servers are ready", "learners start"]),
        ("0,1", (HALF,), ["learners start"]),
        ("0,1", TURNS, ["servers start", "servers are ready", "servers release", "learners start"]),
    ],
)
async def test_learners_start_after_servers_that_share_their_gpus(
    gpus: str, keys: tuple[str, ...], order: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """These take what learners allocate meanwhile for their own. Learners with GPUs of their own start at once."""
    heard: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self: object, path: Path) -> AsyncIterator[SimpleNamespace]:
        heard.append("servers start")
        await turns()
        heard.append("servers are ready")
        yield SimpleNamespace(weights=Servers(heard))

    class Learners(Launcher):
        def start(self, config: RunConfig, tell: object = None) -> AbstractAsyncContextManager[RunComponents]:
            heard.append("learners start")
            raise ConfigError("that is enough")

    monkeypatch.setattr(ServerPool, "running", running)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    config = load_config("tiny_cpu", ["rollout=vllm", "learner.device=cuda", "learner.ep=1", *keys])
    launcher = ServerLauncher(
        Learners(), tmp_path, tmp_path, tiny_shape(TinySizes.of(config.model.tiny)), server_sites(config, None)
    )
    with pytest.raises(ConfigError, match="that is enough"):
        async with launcher.start(config):
            pass
    assert heard == order


def test_a_rank_leaves_its_gpu_by_model_and_returns_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's weights stay, for the push; ranks of separate roles share no GPU with servers."""
    heard: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: heard.append("empty"))

    def model(role: str) -> SimpleNamespace:
        return SimpleNamespace(offload=lambda *, pushed: heard.append((role, pushed)))

    for shares in (True, False):
        rank = RankModels.__new__(RankModels)
        rank._learners = cast(Any, {role: model(role) for role in ("policy", "critic")})
        rank._shares_gpus, rank._leaving = shares, frozenset()
        rank.release_memory()
    assert heard == [("policy", True), ("critic", False), "empty", "empty"]


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    with running(3) as some:
        yield some


async def turns() -> None:
    """Let every task run that can."""
    for _ in range(100):
        await asyncio.sleep(0)


async def answers(it: Bed) -> None:
    """Time enough to ask the second server."""
    for _ in range(20):
        await it.places[1].server.status("/health", seconds=LIMIT)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_server_that_dies_while_learners_have_gpus_starts_with_a_push(fakes: list[Fake], replicas: int) -> None:
    """Also where it is the only one, for which the push waits."""
    async with bed(fakes[:replicas], fakes[2:], colocated=True) as it:
        await it.push(4)
        await it.engine.weights.release()
        it.places[0].why.set_result("killed")
        await it.reach(0, Health.DEAD)
        await turns()
        await it.engine.weights.release()
        assert it.engine.replicas.all[0].health is Health.DEAD
        assert it.spare == fakes[2:]
        go, pushing = stuck(fakes[1], "/load"), asyncio.create_task(it.push(5))
        if replicas == 2:  # it starts once the other has its memory: it would take that for its own
            await until(lambda: fakes[1].asked.count("/load") == 2)
            assert it.spare == fakes[2:]
        go.set()
        await pushing
        await it.reach(0, Health.HEALTHY)
        assert [path for path in fakes[2].asked if path != "/health"] == ["/pause", "/load", "/resume", "/relabel"]
        assert fakes[2].label == "5@t"


async def test_a_push_straight_from_ranks_has_dead_servers_started_again(fakes: list[Fake]) -> None:
    """It asks servers for their layouts before they load."""
    async with bed(fakes[:1], fakes[2:], colocated=True) as it:
        await it.push(4)
        await it.engine.weights.release()
        it.places[0].why.set_result("killed")
        await it.reach(0, Health.DEAD)
        await it.engine.weights.boxes(Path("weights"))
        assert fakes[2].asked.count("/boxes") == 1


async def test_the_learner_waits_for_a_server_that_is_starting_on_its_gpus(fakes: list[Fake]) -> None:
    async with bed(fakes[:2], fakes[2:], colocated=True) as it:
        await it.push(4)
        it.may_start.clear()
        it.places[0].why.set_result("killed")
        await it.reach(0, Health.RESTARTING)
        releasing = asyncio.create_task(it.engine.weights.release())
        await turns()
        assert not releasing.done()
        it.may_start.set()
        await releasing
        assert [fake.asked.count("/release") for fake in fakes] == [0, 1, 1]


@pytest.mark.parametrize("at", ["/pause", "/load"])
async def test_the_learner_waits_for_a_server_that_is_being_refitted(fakes: list[Fake], at: str) -> None:
    """Else the refit takes the server's memory back while the learner trains."""
    async with bed(fakes[:2], fakes[2:], colocated=True) as it:
        await it.push(4)
        go = stuck(fakes[2], at)
        it.places[0].why.set_result("killed")
        await until(lambda: at in fakes[2].asked)
        releasing = asyncio.create_task(it.engine.weights.release())
        await answers(it)
        assert not releasing.done()
        assert "/release" not in fakes[2].asked
        go.set()
        await releasing
        assert [each for each in fakes[2].asked if each != "/health"][-1] == "/release"
        assert [each.server.released for each in it.engine.replicas.all] == [True, True]


def killed(place: Place) -> tuple[asyncio.Event, asyncio.Event]:
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def end() -> None:
        ending.set()
        await may_end.wait()

    place.end = end
    place.why.set_result("killed")
    return ending, may_end


async def test_the_learner_waits_for_a_dead_server(fakes: list[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which still hold its memory; not for ever, and then it says whose."""
    async with bed(fakes[:2], fakes[2:], colocated=True) as it:
        await it.push(4)
        ending, may_end = killed(it.places[0])
        await ending.wait()
        monkeypatch.setattr(replicas, "_END_SECONDS", 0.0)
        said = f"not ended in 0 s, so the learner cannot take its GPUs; .*\n  replica 0 at {fakes[0].url}: killed"
        with pytest.raises(EngineError, match=said):
            await it.engine.weights.release()
        monkeypatch.undo()
        releasing = asyncio.create_task(it.engine.weights.release())
        await answers(it)
        assert fakes[1].asked.count("/release") == 0
        may_end.set()
        await releasing
        assert [fake.asked.count("/release") for fake in fakes] == [0, 1, 0]
