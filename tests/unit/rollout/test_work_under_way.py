"""What is sampled of unfinished groups goes into a checkpoint, and goes on from there after a resume."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from pydantic import TypeAdapter

from rl_megatron.rollout.stream import Stream, StreamState
from rl_megatron.types import Completion, GenerationRequest
from tests.completions import completion
from tests.streams import sampled_from

VERSIONS = {"first": 0, "second": 7}


def length_of(request_id: str) -> int:
    """The first completion of a group is short, the last one long."""
    return 2 + 3 * int(request_id[-1])


@dataclass
class Tokens:
    """An engine whose n-th token of a completion is n; it samples up to ``most`` tokens of each, then waits."""

    version: int
    most: int
    heard: list[GenerationRequest] = field(default_factory=list)
    tokens: dict[str, Completion] = field(default_factory=dict)
    told: dict[str, Completion] = field(default_factory=dict)
    made: int = 0
    interrupts: int = 0

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.heard.append(request)
        have = [] if request.begun is None else request.begun.token_ids.tolist()
        spans = () if request.begun is None else request.begun.spans
        if length_of(request.id) > len(have):
            spans = (*spans, (len(have), self.version))
        while len(have) < length_of(request.id):
            if len(have) == self.most:
                self.tokens[request.id] = completion(have, finish="abort", spans=spans)
                await asyncio.Event().wait()
            have.append(len(have))
            self.made += 1
        return [completion(have, spans=spans)]

    async def interrupt(self) -> None:
        self.interrupts += 1
        self.told = {**self.tokens}

    def so_far(self, request_id: str) -> Completion | None:
        return self.told.get(request_id)


def stream_over(engine: Tokens, *, staleness: int = 1) -> Stream:
    return sampled_from(engine, staleness=staleness, last_step=2)[1]


async def killed() -> tuple[Tokens, StreamState]:
    """A run of which only the first completion of each group has ended, read from a file again."""
    stream = stream_over(engine := Tokens(VERSIONS["first"], most=4))
    stream.admit()
    while len(engine.tokens) < 8:  # of four groups, two completions each
        await asyncio.sleep(0)
    await stream.interrupt()
    adapter = TypeAdapter(StreamState)
    state = adapter.validate_json(adapter.dump_json(stream.state()))
    await stream.close()
    return engine, state


async def resumed(state: StreamState, staleness: int = 1) -> tuple[Tokens, list[list[list[tuple[int, int]]]]]:
    """The spans of each completion of the first two steps, all of whose tokens are right."""
    stream = stream_over(engine := Tokens(VERSIONS["second"], most=99), staleness=staleness)
    stream._prompts.take(state.drawn)
    stream.restore(state)
    groups = [*(await stream.take(1)).groups]
    stream.pushed(1)
    groups += (await stream.take(2)).groups
    rows = [[one.chains[0] for one in group.trajectories] for group in groups]
    for group in rows:
        assert [row.token_ids[2:].tolist() for row in group] == [list(range(2 + 3 * i)) for i in range(3)]
    await stream.close()
    return engine, [[[tuple(span) for span in row.turns[0].spans] for row in group] for group in rows]


@pytest.mark.parametrize("staleness", [1, 0])
def test_a_resume_goes_on_from_every_token(staleness: int) -> None:
    before, state = asyncio.run(killed())
    assert before.made == 4 * (2 + 4 + 4)
    assert [(r.id, r.num_completions, r.group) for r in before.heard[:3]] == [
        (f"step 1: {state.places[0].drawn.prompt.id}, completion {i}", 1, f"step 1: {state.places[0].drawn.prompt.id}")
        for i in range(3)
    ]
    assert len({request.params.seed for request in before.heard}) == 12
    after, spans = asyncio.run(resumed(state, staleness))
    assert spans == [[[(0, 0)], [(0, 0), (4, 7)], [(0, 0), (4, 7)]]] * 4
    of_first = [request for request in after.heard if request.id in {r.id for r in before.heard}]
    assert [r.params.seed for r in of_first] == [r.params.seed for r in before.heard]
    assert sum(length_of(r.id) - len(r.begun.token_ids) for r in of_first if r.begun is not None) == 4 * (0 + 1 + 4)


def test_a_completion_that_ended_waits_for_its_group_in_the_checkpoint() -> None:
    _, state = asyncio.run(killed())
    for place in state.places:
        first, *others = place.drawn.begun
        assert first is not None
        assert first.finish_reason == "stop"
        assert [len(one.token_ids) for one in others if one is not None] == [4, 4]


@pytest.mark.parametrize("times", [1, 3])
async def test_what_was_begun_is_kept_over_several_kills(times: int) -> None:
    _, state = await killed()
    for _ in range(times):
        stream = stream_over(Tokens(3, most=4))
        stream._prompts.take(state.drawn)
        stream.restore(state)
        stream.admit()  # and is killed before a server has heard of it
        state = stream.state()
        await stream.close()
    assert [len(one.token_ids) for one in state.places[0].drawn.begun if one is not None] == [2, 4, 4]
