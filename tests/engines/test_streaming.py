"""Pushes while requests run: each token is of its span's version, by transformers' forward with those weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.config.sections.rollout import RunningRequests, ServerSection
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.types import Completion, GenerationRequest
from tests.engines.benches import (
    MAX_LENGTH,
    NEW,
    RETURN_ROUTES,
    ServedBench,
    logprobs_of,
    logprobs_over_kept,
    request,
    routes_of,
)
from tests.engines.test_servers import running_on

PROMPTS = [[(13 * i + 5 * j) % 256 for j in range(8 + 5 * i)] for i in range(8)]
TOLERANCE = 1e-4  # nats, in float32


def of_mode(server: ServedBench, mode: RunningRequests) -> ServerEngine:
    """Another engine over the same servers."""
    section = ServerSection(running_requests=mode)
    return ServerEngine(server.engine.adapter, server.engine.servers, section, max_length=MAX_LENGTH, vocab_size=259)


async def interrupted(
    server: ServedBench, engine: ServerEngine, asked: Sequence[GenerationRequest], running: Sequence[asyncio.Task[Any]]
) -> list[Completion | None]:
    """What is known of requests that were interrupted: again, where one of them had not begun and none is over."""
    while True:
        await server.sampling(*running)
        await engine.collect_partials()
        known = [engine.partial_completion(each.id) for each in asked]
        if None not in known or any(task.done() for task in running):
            return known


async def over_a_push(
    server: ServedBench, mode: RunningRequests, models: tuple[Path, Path], new: int
) -> list[tuple[GenerationRequest, Completion, Completion | None]]:
    """Requests that ran over a push, their completions, and what was known of each before its end.

    With ``abort`` all are interrupted before the push too.
    """
    weights = server.weights_of(engine := of_mode(server, mode))
    server.sync.folder = models[0]
    await weights.push(1)
    asked = [replace(request(prompt, new=new), id=f"{number}") for number, prompt in enumerate(PROMPTS)]
    running = [asyncio.create_task(engine.generate(each)) for each in asked]
    known: list[Completion | None] = [None] * len(asked)
    if mode == "abort":
        known = await interrupted(server, engine, asked, running)
    else:
        await server.sampling(*running)
        if mode != "recompute" or server.name != "sglang":  # with routes, a push aborts at SGLang
            await engine.adapter.pause(server.engine.servers[0], mode)  # or short ones end before it
    server.sync.folder = models[1]
    await weights.push(2)
    answers = [completions[0] for completions in await asyncio.gather(*running)]
    assert [engine.partial_completion(each.id) for each in asked] == [None] * 8
    return list(zip(asked, answers, known, strict=True))


@pytest.mark.parametrize("mode", ["recompute", "keep_cache", "abort"])
def test_tokens_keep_spans_over_a_push(server: ServedBench, models: tuple[Path, Path], mode: RunningRequests) -> None:
    """With 8 running requests. What is kept is that of the old weights: the oracle computes it with these."""
    for new in (200, *NEW):
        found = server.run(over_a_push(server, mode, models, new))
        if all(len(completion.spans) == 2 and (known or mode != "abort") for _, completion, known in found):
            break
    for asked, completion, known in found:
        prompt, tokens = asked.token_ids, completion.token_ids
        assert (completion.finish_reason, len(tokens)) == ("length", new)
        (_, cut), versions = zip(*completion.spans, strict=True)
        assert versions == (1, 2)
        assert 0 < cut < new
        mine = torch.tensor(completion.logprobs)
        parts = slice(cut), slice(cut, None)
        old, whole = (logprobs_of(f, prompt, completion, 1.0, part) for f, part in zip(models, parts, strict=True))
        kept = logprobs_over_kept(*models, prompt, completion, cut)
        assert largest(mine[:cut], old[:cut]) < TOLERANCE
        # That of a token which is labeled one too late is the old weights', as a rule some 0.5 from the new ones'.
        right, wrong = (kept, whole) if mode == "keep_cache" else (whole, kept)
        assert largest(mine[cut:], right[cut:]) < TOLERANCE, told(mine, right, cut, prompt, tokens)
        assert largest(mine[cut:], wrong[cut:]) > 0.1
        if mode == "abort":  # what was interrupted is the beginning of what was answered
            assert known is not None
            assert 0 < len(known.token_ids) <= cut
            assert known.token_ids.tolist() == tokens[: len(known.token_ids)].tolist()
            assert known.logprobs.tolist() == completion.logprobs[: len(known.token_ids)].tolist()
            assert known.spans == ((0, 1),)


def largest(some: Tensor, others: Tensor) -> float:
    """The largest distance of two rows of log-probs."""
    return float((some - others).abs().max())


def told(mine: Tensor, right: Tensor, cut: int, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """All that it takes to look for the cause later: the tiny models are made from seeds."""
    gaps = (mine - right).abs()[cut:]
    beyond = (gaps > TOLERANCE).nonzero()[:, 0].tolist()
    shown = [f"{cut + n}: {gaps[n]:.1e}" for n in beyond[:20]]
    return f"{len(beyond)} of {len(gaps)} tokens from {cut} on differ: {shown}; {list(prompt)} -> {list(tokens)}"


def test_prompts_find_no_prefix_of_weights_before_the_push(server: ServedBench, models: tuple[Path, Path]) -> None:
    """Where caches are kept. Without the salt they do: they get the log-probs of the old weights' keys and values."""
    engine, (one,) = of_mode(server, "keep_cache"), server.engine.servers
    weights = server.weights_of(engine)
    asked = request([(11 * j) % 256 for j in range(300)])

    async def gap_after(version: int, folder: Path, *, salted: bool) -> float:
        """To the log-probs of ``folder`` of what is sampled as ``version``, which is pushed."""
        server.sync.folder = folder
        await weights.push(version)
        if not salted:
            one.salt = None
        for _ in range(2):  # the second time from the cache
            (completion,) = await engine.generate(asked)
        assert completion.spans == ((0, version),)
        expected = logprobs_of(folder, asked.token_ids, completion, 1.0)
        return largest(torch.tensor(completion.logprobs), expected)

    async def gaps(*, salted: bool, first: int) -> Sequence[float]:
        return [await gap_after(first + n, models[n], salted=salted) for n in range(2)]

    try:
        assert max(server.run(gaps(salted=True, first=1))) < TOLERANCE
        _, second = server.run(gaps(salted=False, first=3))
        assert second > 0.1
    finally:
        server.push(models[0], 5)  # by an engine that drops the caches
    assert one.salt is None


def test_a_request_goes_on_from_columns_of_a_checkpoint(server: ServedBench, models: tuple[Path, Path]) -> None:
    """Sampled by other weights before; the rest is of the weights that are served, as are its routes."""
    server.push(models[0], 1)
    asked = replace(request(PROMPTS[3], new=24), columns=("routes",) if server.name in RETURN_ROUTES else ())
    first = server.generate(replace(asked, params=replace(asked.params, max_new_tokens=10)))[0][0]
    assert (first.finish_reason, len(first.token_ids)) == ("length", 10)
    first = replace(first, finish_reason="abort")  # as a save finds a completion under way; one that ended stays ended
    server.push(models[1], 2)
    whole = server.generate(replace(asked, partial=first))[0][0]
    assert whole.spans == ((0, 1), (10, 2))
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 24)
    assert whole.token_ids[:10].tolist() == first.token_ids.tolist()
    mine = torch.tensor(whole.logprobs)
    for folder, part in zip(models, (slice(0, 10), slice(10, 24)), strict=True):
        assert largest(mine[part], logprobs_of(folder, asked.token_ids, whole, 1.0, part)[part]) < TOLERANCE
    assert ("routes" in whole.columns) == bool(asked.columns)
    if "routes" in whole.columns:  # of every position once: the experts of the weights that chose the token behind it
        found = torch.tensor(whole.columns["routes"]).sort(-1).values
        of_old, of_new = (routes_of(folder, (*asked.token_ids, *whole.token_ids)[:-1]) for folder in models)
        cut = len(asked.token_ids) + 10 - 1
        wanted = torch.cat((of_old[:cut], of_new[cut:]))
        assert found.shape == wanted.shape
        assert (found == wanted).double().mean() > 0.99  # a near tie may fall otherwise
        assert (of_old == of_new).double().mean() < 0.9


async def idle(server: ServedBench) -> None:
    """Wait until the server runs nothing."""
    while await running_on(server):
        pass


def test_a_completion_that_does_not_end_is_ended_by_its_time(server: ServedBench, models: tuple[Path, Path]) -> None:
    """The server is rid of it then; the one beside it is as it was."""
    server.push(models[0], 1)
    endless = replace(request(PROMPTS[5], new=NEW[-1]), id="endless", max_seconds=0.3)

    async def both(beside: GenerationRequest) -> tuple[Completion, Completion] | None:
        other, late = (asyncio.create_task(server.engine.generate(one)) for one in (beside, endless))
        (ended,) = await late
        alone = False
        while not (alone or other.done()):
            alone = await running_on(server) == 1
        (whole,) = await other
        return (ended, whole) if alone else None

    for new in NEW:
        beside = replace(request(PROMPTS[6], new=new), id="beside")
        if found := server.run(both(beside)):
            break
    assert found is not None
    for asked, completion in zip((endless, beside), found, strict=True):
        assert (completion.finish_reason, completion.spans) == ("length", ((0, 1),))
        expected = logprobs_of(models[0], asked.token_ids, completion, 1.0)
        assert largest(torch.tensor(completion.logprobs), expected) < TOLERANCE
    ended, whole = (len(completion.token_ids) for completion in found)
    assert 0 < ended < NEW[-1]
    assert whole == new
    server.run(asyncio.wait_for(idle(server), 60))  # its scheduler forgets a request milliseconds after the last token
    assert server.engine.servers[0].in_flight == 0
