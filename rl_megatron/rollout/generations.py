"""Asks an engine for completions, and keeps the time of each request in the timeline."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from rl_megatron.interfaces import RolloutEngine
from rl_megatron.observability.timeline.spans import FreeLanes
from rl_megatron.types import Completion, GenerationRequest

_IN_FLIGHT = FreeLanes("sampling", "request")


async def sampled_by(
    engine: RolloutEngine, request: GenerationRequest, decode: Callable[[Sequence[int]], str]
) -> tuple[Completion, ...]:
    """Returns completions by ``engine``, each cut at its first stop text, as engines do except where they continue a
    completion. Raises the engine's errors."""
    with _IN_FLIGHT.during("generate", request=request.id) as span:
        completions = tuple(await engine.generate(request))
        span.say(**_said(completions))
    stop, begun = request.params.stop, request.begun is not None
    joined = [begun or one.continued or len(one.spans) > 1 for one in completions] if stop else []
    if any(joined):
        return await asyncio.to_thread(
            lambda: tuple(
                _cut(one, stop, decode) if late else one for one, late in zip(completions, joined, strict=True)
            )
        )
    return completions


def _cut(completion: Completion, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Completion:
    """Cuts the completion at the token that completes a stop text. An engine that continues a partial completion sees
    only the part that it samples itself."""
    tokens = completion.token_ids.tolist()

    def has_text(count: int) -> bool:
        text = decode(tokens[:count])
        return any(one in text for one in stop)

    if not has_text(len(tokens)):
        return completion
    count, routes = bisect_left(range(len(tokens)), True, key=has_text), completion.routes
    if routes is not None and count < len(tokens):
        positions, layers, experts = routes.shape
        kept = positions - len(tokens) + count
        data = routes.data[: len(routes.data) // positions * kept]
        routes = replace(routes, data=data, shape=(kept, layers, experts))
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        finish_reason="stop",
        spans=tuple(span for span in completion.spans if span.start < count),
        routes=routes,
    )


def _said(completions: Sequence[Completion]) -> dict[str, int]:
    """What the timeline says of them: tokens, and the first and the last version that sampled some."""
    versions = [span.version for one in completions for span in one.spans]
    tokens = sum(len(one.token_ids) for one in completions)
    return {"tokens": tokens} | ({"oldest": min(versions), "newest": max(versions)} if versions else {})
