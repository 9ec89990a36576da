"""An evaluation while completions to train on run changes nothing of these."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.rollout.policy_sampler import HeldOut
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Completion, GenerationRequest
from rl_megatron.weights.checks.reports import Report
from tests.completions import completion
from tests.streams import OF_TOKENS, sampled_from
from tests.unit.rollout.still import Still

STEPS, STALENESS = 5, 2


@dataclass(eq=False)
class Seeded(Still):
    """A server whose tokens are a function of the request's seed; all but evaluations' wait until they may go on."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = 0
    heard: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        self.heard.append(request)
        tokens = np.random.default_rng(request.params.seed).integers(1, 40, 2 + request.params.seed % 5).tolist()
        spans = [(0, self.version)]
        if not request.id.startswith("evaluation"):
            await self.go.wait()
            spans += [(1, self.version)] if self.version > spans[0][1] else []
        return [completion(tokens, spans=spans)]

    async def load(self, server: Server, path: Path, version: int, **options: object) -> list[Report]:
        self.version = version
        return []


async def trained(path: Path, *, evaluates: bool) -> tuple[list[object], list[int], int]:
    """What each step trains on and what the stream says of itself, seeds in their order, and evaluations' requests."""
    adapter, servers = Seeded(), [Server("http://s:0", token=None, timeout_seconds=60)]
    engine = ServedEngine(adapter, servers, ServerSection(), max_length=64, vocab_size=41)
    sampler, stream = sampled_from(engine, staleness=STALENESS, last_step=STEPS + STALENESS, path=path)
    found: list[object] = []
    await engine.weights.load(Path("none"), 0)
    await engine.weights.commit(0)
    stream.admit()
    for step in range(1, STEPS + 1):
        if evaluates:
            assert stream._tasks  # something is sampled, and waits
            answers = await sampler.held_out(HeldOut(prompts=OF_TOKENS[:7], params=sampler.params(temperature=1.0)))
            assert all(one.rewards[0] >= 1.0 for one in answers)
        adapter.go.set()
        while stream._tasks:  # each draws and sends the next group
            await asyncio.gather(*stream._tasks)
        adapter.go.clear()
        batch = await stream.take(step)
        found.append([(g.prompt.id, one.chains[0].token_ids.tolist()) for g in batch.groups for one in g.trajectories])
        found.append([turn.spans for g in batch.groups for one in g.trajectories for turn in one.turns])
        found.append((batch.num_completions, batch.reward_sum))
        await engine.weights.load(Path("none"), step)
        await engine.weights.commit(step)
        stream.pushed(step)
        found.append({name: value for name, value in stream.row().items() if name.startswith("ledger/")})
    state = stream.state()
    found += [state.drawn, state.batch, state.ledger, path.read_text(), sampler.sampled]
    adapter.go.set()
    await stream.close()
    await engine.close()
    seeds = [one.params.seed for one in adapter.heard if not one.id.startswith("evaluation")]
    return found, seeds, len(adapter.heard) - len(seeds)


def test_an_evaluation_beside_running_completions_changes_no_row_of_training(tmp_path: Path) -> None:
    alone, seeds, none = asyncio.run(trained(tmp_path / "alone.jsonl", evaluates=False))
    beside, same, asked = asyncio.run(trained(tmp_path / "beside.jsonl", evaluates=True))
    assert beside == alone
    assert same == seeds
    assert (none, asked) == (0, 7 * STEPS)
