"""Asks an engine for completions, and keeps the time of each request in the timeline."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.interfaces import RolloutEngine
from rl_megatron.observability.timeline.spans import FreeLanes
from rl_megatron.types import Completion, GenerationRequest

_IN_FLIGHT = FreeLanes("sampling", "request")


async def sampled_by(engine: RolloutEngine, request: GenerationRequest) -> tuple[Completion, ...]:
    """What ``engine`` generates. Raises what it raises."""
    with _IN_FLIGHT.during("generate", request=request.id) as span:
        completions = tuple(await engine.generate(request))
        span.say(**_said(completions))
    return completions


def _said(completions: Sequence[Completion]) -> dict[str, int]:
    """What the timeline says of them: tokens, and the first and the last version that sampled some."""
    versions = [span.version for one in completions for span in one.spans]
    tokens = sum(len(one.token_ids) for one in completions)
    return {"tokens": tokens} | ({"oldest": min(versions), "newest": max(versions)} if versions else {})
