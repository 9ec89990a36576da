"""What only a server can get wrong: updates under way, faults on the way to it, and how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.engines.adapter import EngineGauges
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.errors import ConfigError, EngineError, SyncError
from rl_megatron.types import Completion
from tests.engines.benches import MAX_LENGTH, NEW, RETURN_ROUTES, ServedBench, logprobs_of, request, routes_of, served
from tests.exposure import check_secrets, check_sockets, family


def swap_gate_and_up(tensors: dict[str, Tensor]) -> None:
    """The fault that a round trip cannot see."""
    at = "model.layers.1.mlp.experts.3."
    gate, up = f"{at}gate_proj.weight", f"{at}up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def flip_a_byte(server: ServedBench) -> Callable[[], None]:
    """After the file was sealed."""

    def flip() -> None:
        server.sync.mirror.tensors["model.layers.0.mlp.experts.5.down_proj.weight"].view(torch.uint8)[3, 7] ^= 1

    return flip


def lose_the_seal(server: ServedBench) -> Callable[[], None]:
    """What a sender leaves that dies while it writes."""
    return server.sync.mirror.withdraw


@pytest.mark.parametrize(
    ("change", "after", "named"),
    [
        (swap_gate_and_up, None, r"log-probs of the probe differ from the learner's by up to [\d.e-]+ nats"),
        (
            None,
            flip_a_byte,
            r"its bytes are not those that the learner wrote in model\.layers\.0\.mlp\.experts\.5\.down_proj\.weight$",
        ),
        (None, lose_the_seal, "holds version None, not 2"),
    ],
    ids=["gate and up swapped", "byte flipped", "sender died"],
)
def test_a_wrong_sync_is_refused_and_never_served(
    server: ServedBench,
    models: tuple[Path, Path],
    change: Callable[[dict[str, Tensor]], None] | None,
    after: Callable[[ServedBench], Callable[[], None]] | None,
    named: str,
) -> None:
    server.push(models[0], 1)
    server.sync.after = after(server) if after else lambda: None
    with pytest.raises(SyncError, match=named):
        server.push(models[1], 2, change)
    server.sync.after = lambda: None
    with pytest.raises(EngineError, match="no weights are served"):
        server.generate(request())
    server.push(models[1], 3)
    (completion,) = server.generate(request())[0]
    assert completion.spans == ((0, 3),)
    expected = logprobs_of(models[1], request().token_ids, completion, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_it_tells_meanwhile_that_it_makes_tokens(server: ServedBench, models: tuple[Path, Path]) -> None:
    """A busy server is told from a dead one by it."""
    server.push(models[0], 1)
    adapter, (one,) = server.engine.adapter, server.engine.servers

    async def looked(n: int, new: int) -> tuple[set[object], set[object]]:
        idle = {await adapter.tokens(one) for _ in range(3)}
        running, busy = asyncio.create_task(server.engine.generate(request(n=n, new=new))), set[object]()
        while not running.done():
            busy.add(await adapter.tokens(one))
        return idle, busy

    for n, new in (*((1, new) for new in NEW), (24, NEW[-1])):  # the last where the server answers but rarely
        idle, busy = server.run(looked(n, new))
        assert len(idle) == 1
        if len(busy - idle) > 3:  # of the prompt and of many tokens behind it
            return
    raise AssertionError(f"it told {busy - idle} while it sampled {n} times {new} tokens")


def test_it_says_how_busy_it_is(server: ServedBench, models: tuple[Path, Path]) -> None:
    """One request runs, then none; what it says is in the cache is a share."""
    server.push(models[0], 1)
    adapter, (one,) = server.engine.adapter, server.engine.servers

    async def looked(new: int) -> list[EngineGauges | None]:
        running, busy = asyncio.create_task(server.engine.generate(request(new=new))), list[EngineGauges | None]()
        while not running.done():
            busy.append(await adapter.gauges(one))
        return busy

    for new in NEW:
        found = [each for each in server.run(looked(new)) if each is not None and each.running]
        if found:
            break
    assert {(each.running, each.waiting) for each in found} == {(1, 0)}
    assert all(each.cache is not None and 0 <= each.cache < 1 for each in found)
    assert all(each.tokens is not None or each.tokens_per_second is not None for each in found)


def test_a_running_request_goes_on_over_an_update(server: ServedBench, models: tuple[Path, Path]) -> None:
    (one,) = server.engine.servers

    async def update_meanwhile(new: int) -> Completion:
        server.sync.folder = models[0]
        await server.weights.push(1)
        asked = replace(request(new=new), columns=("routes",) if server.name in RETURN_ROUTES else ())
        running = asyncio.create_task(server.engine.generate(asked))
        await server.sampling(running)
        if server.name != "sglang":  # else a short request is over before a push has begun
            await server.engine.adapter.pause(one, "recompute")  # with routes, a push aborts at SGLang
        server.sync.folder = models[1]
        await server.weights.push(2)
        (completion,) = await running
        return completion

    for new in NEW:
        completion = server.run(update_meanwhile(new))
        if len(completion.spans) == 2:
            break
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", new)
    prompt, token_ids = request().token_ids, completion.token_ids
    _, (cut, _) = completion.spans
    gaps = [
        (torch.tensor(completion.logprobs) - logprobs_of(folder, prompt, completion, 1.0, part)).abs()
        for folder, part in zip(models, (slice(cut), slice(cut, None)), strict=True)
    ]
    by_first = int((gaps[0] > 1e-3).int().argmax())  # the first token that the old weights did not sample
    assert 0 < by_first < new
    assert completion.spans == ((0, 1), (by_first, 2))
    assert gaps[0][:by_first].max() < 1e-4
    assert gaps[1][by_first:].max() < 1e-4  # by the new weights alone: keys and values were computed again
    if "routes" in completion.columns:  # of every position once, of the weights that computed it first
        found = torch.tensor(completion.columns["routes"]).sort(-1).values
        old, wanted = (routes_of(folder, (*prompt, *token_ids)[:-1]) for folder in models)
        wanted[: len(prompt) + cut - 1] = old[: len(prompt) + cut - 1]
        assert found.shape == wanted.shape
        assert (found == wanted).double().mean() > 0.99  # a near tie may fall otherwise
    assert ("routes" in completion.columns) == (server.name in RETURN_ROUTES)


def test_what_an_update_ends_goes_on_from_what_it_has(server: ServedBench, models: tuple[Path, Path]) -> None:
    """The other way to keep partial rollouts; each part's log-probs are of the weights that sampled it."""
    server.push(models[0], 1)
    routed, prompt = server.name in RETURN_ROUTES, request().token_ids
    section = ServerSection(running_requests="abort")
    engine = server.engine
    ending = ServerEngine(engine.adapter, engine.servers, section, max_length=MAX_LENGTH, vocab_size=259)

    async def update_meanwhile(new: int) -> Sequence[Completion]:
        pair = replace(request(n=2, new=new), columns=("routes",) if routed else ())
        weights = server.weights_of(ending)
        server.sync.folder = models[0]
        await weights.push(1)
        running = asyncio.create_task(ending.generate(pair))
        await server.sampling(running)
        server.sync.folder = models[1]
        await weights.push(2)
        return await running

    completions: Sequence[Completion] = ()
    for new in NEW:
        completions = server.run(update_meanwhile(new))
        if all(len(c.spans) == 2 for c in completions):
            break
    for completion in completions:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", new)
        _, (start, _) = completion.spans
        before, after = (
            (torch.tensor(completion.logprobs) - logprobs_of(folder, prompt, completion, 1.0, part)).abs()
            for folder, part in zip(models, (slice(start), slice(start, None)), strict=True)
        )
        cut = int((before > 1e-3).int().argmax())
        assert 0 < cut < new
        assert completion.spans == ((0, 1), (cut, 2))
        assert before[:cut].max() < 1e-4
        assert after[cut:].max() < 1e-4
        assert ("routes" in completion.columns) == routed
        if "routes" in completion.columns:  # each position's experts are those that chose the token behind it
            found = torch.tensor(completion.columns["routes"]).sort(-1).values
            of_old, of_new = (routes_of(folder, (*prompt, *completion.token_ids)[:-1]) for folder in models)
            first = len(prompt) + cut - 1  # that the new weights sampled
            assert found.shape == of_old.shape
            assert (found[:first] == of_old[:first]).double().mean() > 0.99  # a near tie may fall otherwise
            assert (found[first:] == of_new[first:]).double().mean() > 0.99
            assert (of_new[:first] == of_old[:first]).double().mean() < 0.9


def test_aborted_requests_keep_what_was_sampled(server: ServedBench, models: tuple[Path, Path]) -> None:
    """Of all their completions, by one message; a request beside them goes on, and one that is not there is no harm."""
    server.push(models[0], 1)
    (replica,) = server.engine.servers
    adapter, routed = server.engine.adapter, server.name in RETURN_ROUTES

    async def abort(new: int) -> tuple[list[Completion], list[Completion]]:
        pair = replace(request(n=2, new=new), columns=("routes",) if routed else ())
        names = "mine", "second", "mine too"
        mine, second, other = (asyncio.create_task(adapter.generate(replica, pair, name)) for name in names)
        await server.sampling(mine, second, other)
        await adapter.abort_all(replica, dict.fromkeys(("mine", "absent", "second"), pair), lambda: asyncio.sleep(0))
        return [*await mine, *await second], await other

    for new in NEW:
        aborted, whole = server.run(abort(new))
        if all(0 < len(c.token_ids) < new for c in aborted):
            break
    assert (len(aborted), len(whole)) == (4, 2)
    for completion in aborted:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) == len(completion.logprobs) < new
        assert ("routes" in completion.columns) == routed
        if "routes" in completion.columns:
            positions = (*request().token_ids, *completion.token_ids)[:-1]
            assert completion.columns["routes"].shape == routes_of(models[0], positions).shape
    assert [c.finish_reason for c in whole] == ["length"] * 2


async def running_on(server: ServedBench) -> int:
    """Sequences that the server itself says it samples."""
    (replica,) = server.engine.servers
    if server.name == "sglang":
        (load,) = (await replica.get("/v1/loads"))["loads"]
        return int(load["num_running_reqs"])
    said = await replica.text("/metrics")
    return int(sum(float(n) for n in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", said, re.MULTILINE)))


def test_a_cancelled_request_is_aborted_on_the_server(server: ServedBench, models: tuple[Path, Path]) -> None:
    """Before its end: a request beside it that ends earlier runs on."""
    server.push(models[0], 1)

    async def cancel(new: int) -> bool:
        asked = request(n=24, new=new + 50), request(range(60, 80), n=24, new=new)
        tasks = [asyncio.create_task(server.engine.generate(r)) for r in asked]
        while not tasks[1].done() and await running_on(server) < 48:
            pass
        tasks[0].cancel()
        while not tasks[1].done() and (number := await running_on(server)) >= 24:
            if number == 24:
                assert tasks[0].cancelled()
                assert [len(c.token_ids) for c in await tasks[1]] == [new] * 24
                return True
        await asyncio.wait(tasks)
        return False

    assert any(server.run(cancel(new)) for new in NEW)
    assert server.run(running_on(server)) == 0
    (replica,) = server.engine.servers
    assert replica.in_flight == 0


def test_memory_is_released_when_a_cancelled_request_has_ended(server: ServedBench, models: tuple[Path, Path]) -> None:
    """A server is notified of the cancelling later than the run is. SGLang's would end if it were not idle."""
    server.push(models[0], 1)
    (replica,) = server.engine.servers

    async def release() -> bool:
        asked = asyncio.create_task(server.engine.generate(request(n=24, new=NEW[-1])))
        await server.sampling(asked)
        asked.cancel()
        await asyncio.wait([asked])
        await server.engine.weights.release()
        return asked.cancelled()

    assert server.run(release())
    server.push(models[1], 2)
    assert server.engine.servers == [replica]  # no other has taken its place
    (completion,) = server.generate(request())[0]
    expected = logprobs_of(models[1], request().token_ids, completion, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_memory_is_released_between_two_questions_for_health(server: ServedBench, models: tuple[Path, Path]) -> None:
    """SGLang samples a token to answer one, and ends if it is asked to release memory meanwhile."""
    server.push(models[0], 1)
    (replica,) = server.engine.servers

    async def release() -> list[int | None]:
        found, over = list[int | None](), asyncio.Event()

        async def ask() -> None:
            while not over.is_set():
                found.append(await replica.health(seconds=60))
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(ask())
            while len(found) < 3:
                await asyncio.sleep(0)
            await server.engine.weights.release()
            over.set()
        return found

    for version, model in enumerate(models, start=2):
        assert set(server.run(release())) == {200}
        assert replica.released
        server.push(model, version)
        assert not replica.released
    assert server.engine.servers == [replica]  # no other has taken its place


def test_no_cached_prefix_outlives_its_weights(server: ServedBench, models: tuple[Path, Path]) -> None:
    """Of prompts and completions longer than two blocks of any cache, sampled by each version in turn."""
    asked = request([(11 * j) % 256 for j in range(300)], n=2)
    for version, folder in enumerate((*models, *models), start=1):
        server.push(folder, version)
        for _ in range(2):  # the second time from the cache
            for c in server.generate(asked)[0]:
                expected = logprobs_of(folder, asked.token_ids, c, 1.0)
                torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_a_pause_can_end_what_runs(server: ServedBench, models: tuple[Path, Path]) -> None:
    server.push(models[0], 1)
    (replica,) = server.engine.servers

    async def pause(new: int) -> Completion:
        running = asyncio.create_task(server.engine.adapter.generate(replica, request(new=new), "mine"))
        await server.sampling(running)
        await server.engine.adapter.pause(replica, "abort")
        (completion,) = await running
        await server.engine.adapter.resume(replica)
        return completion

    assert any(server.run(pause(new)).finish_reason == "abort" for new in NEW)
    assert len(server.generate(request())[0]) == 1


def test_nobody_reaches_a_server_or_reads_its_token_who_is_not_the_run(server: ServedBench) -> None:
    """Every path asks for it; ranks meet in a file; no command line, no log and no file has it."""
    processes = family(os.getpid())
    assert check_sockets(processes)["An engine server"] >= 1
    (replica,) = server.engine.servers
    assert isinstance(replica.token, str)
    (log,) = (server.path.parents[1]).glob(f"{server.name}_*.log")
    assert replica.token in check_secrets(processes, log.parent, secrets=[replica.token])
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_server_says_what_it_is(server: ServedBench) -> None:
    (replica,) = server.engine.servers
    described = server.run(server.engine.adapter.describe(replica))
    assert described.problems == ()
    assert (described.dtype, described.architecture) == ("float32", "Qwen3MoeForCausalLM")
    assert described.max_length == MAX_LENGTH


def test_running_servers_are_left_running(server: ServedBench, models: tuple[Path, Path], tmp_path: Path) -> None:
    (replica,) = server.engine.servers
    token = tmp_path / "token.txt"
    token.write_text(f"{replica.token}\n")
    attach = {"addresses": replica.url, "token_file": token}
    server.push(models[0], 7)
    with served(server.name, models[0], tmp_path, **attach) as attached:
        attached.push(models[1], 7)
        assert attached.generate(request(n=2))[0][1].spans == ((0, 7),)
        with pytest.raises(EngineError, match="another run has pushed its weights to the server"):
            server.generate(request())
    server.push(models[0], 1)
    assert len(server.generate(request())[0]) == 1
    with (
        pytest.raises(ConfigError, match=r"computes in float32, but learner\.dtype=bfloat16; make them equal"),
        served(server.name, models[0], tmp_path, dtype="bfloat16", **attach),
    ):
        pass
    other = tmp_path / "other"
    shutil.copytree(models[0], other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace("Qwen3MoeForCausalLM", "MixtralForCausalLM"))
    with (
        pytest.raises(ConfigError, match="serves Qwen3MoeForCausalLM, but the model to train is MixtralForCausalLM"),
        served(server.name, other, tmp_path, **attach),
    ):
        pass
    token.write_text("wrong")
    with pytest.raises(EngineError, match=r"status 40[13]"), served(server.name, models[0], tmp_path, **attach):
        pass
