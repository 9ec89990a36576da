"""What the timeline has of requests for completions."""

from __future__ import annotations

import asyncio

from rl_megatron.observability.timeline import spans
from rl_megatron.rollout.environments.waves import Waves
from rl_megatron.types import Prompt
from tests.completions import drawn
from tests.scripted_engine import Scripted, sampler, trajectories


def test_each_turn_of_an_environment_is_a_generation() -> None:
    engine = Scripted(lambda text: "!12" if ":" in text else "?3*4")
    spans.taken()
    prompt = Prompt(id="3*4", text="3*4=", token_ids=(1,), answer="12")
    found = asyncio.run(sampler(Waves(engine)).groups(drawn([prompt], 1)))
    kept = [(lane.process, said) for lane, name, _, _, said in spans.taken()[0] if name == "generate" and said]
    assert {process for process, _ in kept} == {"sampling"}
    assert sorted(str(said["request"]) for _, said in kept) == sorted(one.id for one in engine.asked)
    turns = [turn for one in trajectories(found) for chain in one.chains for turn in chain.turns]
    assert sum(int(said["tokens"]) for _, said in kept) == sum(turn.stop - turn.start for turn in turns)
