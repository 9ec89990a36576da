"""What servers say of themselves, in the timeline: asked in turn, off the hot path, and never the end of a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from typing_extensions import override

from rl_megatron.models.named import NAMED
from rl_megatron.observability.timeline import spans
from rl_megatron.rollout.servers import gauges
from rl_megatron.rollout.servers.adapter import EngineGauges
from rl_megatron.rollout.servers.gauges import GaugesInTurn
from rl_megatron.rollout.servers.http import AttemptFailed, Server
from rl_megatron.rollout.servers.replicas import Event, ReplicaSet
from rl_megatron.rollout.servers.sglang.adapter import SGLangAdapter
from rl_megatron.rollout.servers.vllm.adapter import VLLMAdapter
from tests.unit.rollout.test_engine_servers import Words

SHAPE = NAMED["qwen3-30b-a3b"]
Said = list[tuple[str, str, dict[str, float]]]

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 1.0e+06
vllm:generation_tokens_total{engine="1",model_name="m"} 2.0
"""
LOADS = {
    "loads": [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5, "gen_throughput": 100.5},
        {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.0, "gen_throughput": 1.0},
    ]
}


class Answers(Server):
    """A server whose answers are known."""

    def __init__(self, answer: object) -> None:
        super().__init__("http://127.0.0.1:9", token=None, timeout_seconds=1)
        self.answer = answer

    @override
    async def text(self, path: str) -> str:
        assert path == "/metrics"
        return str(self.answer)

    @override
    async def get(self, path: str) -> object:
        assert path == "/v1/loads"
        return self.answer


async def test_vllm_and_sglang_say_it_over_all_of_their_ranks() -> None:
    """By their formats: Prometheus's text, of vLLM 0.32.0; the JSON of SGLang 0.5.21's /v1/loads."""
    vllm, sglang = await VLLMAdapter(SHAPE).gauges(Answers(METRICS)), await SGLangAdapter(SHAPE).gauges(Answers(LOADS))
    assert vllm == EngineGauges(running=7, waiting=5, cache=0.375, tokens=1_000_002)
    assert sglang == EngineGauges(running=7, waiting=1, cache=0.25, tokens_per_second=101.5)


class Busy(Words):
    """Says what the ``say`` of a server is."""

    def __init__(self, say: dict[str, Callable[[], EngineGauges]]) -> None:
        super().__init__()
        self.say, self.asked = say, list[str]()

    @override
    async def gauges(self, server: Server) -> EngineGauges:
        self.asked.append(server.url)
        if server.url == "http://hangs":
            await asyncio.Event().wait()
        return self.say[server.url]()


def followed(adapter: Busy, urls: list[str], turns: int, dead: int | None = None) -> Said:
    """What is kept of servers that are asked every 2 ms, until there were so many questions or no more come."""
    spans.taken()

    async def run() -> None:
        replicas = ReplicaSet("words", [Server(url, token=None, timeout_seconds=1) for url in urls])
        if dead is not None:
            replicas.all[dead].apply(Event.DIED, "of this test")
        in_turn = GaugesInTurn(adapter, replicas, 0.002)
        async with in_turn.asked():
            for _ in range(5000):
                if len(adapter.asked) >= turns:
                    break
                await asyncio.sleep(0.002)

    asyncio.run(run())
    return [(lane.process, name, dict(said or {})) for lane, name, _, _, said in spans.taken()[0]]


def test_servers_are_asked_in_turn_and_one_that_is_dead_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as many are asked no more often. Speeds are differences of counts by the time between them."""
    at = 0

    def now() -> int:
        nonlocal at
        at += 10**9
        return at

    monkeypatch.setattr(spans, "now", now)
    made = iter(range(0, 10_000, 500))
    adapter = Busy(
        {
            "http://a": lambda: EngineGauges(running=2, waiting=1, tokens=next(made)),
            "http://b": lambda: EngineGauges(running=0, waiting=0, cache=0.25, tokens_per_second=7.0),
            "http://c": lambda: EngineGauges(running=9, waiting=9),
        }
    )
    kept = followed(adapter, ["http://a", "http://b", "http://c"], 4, dead=2)
    assert adapter.asked[:4] == ["http://a", "http://b"] * 2
    # a's clock: its requests at 1 s, counted at 2 s; b takes 3 to 6 s; again requests at 7 s, counted at 8 s
    assert kept[:5] == [
        ("replica 0", "requests", {"running": 2, "waiting": 1}),
        ("replica 1", "requests", {"running": 0, "waiting": 0}),
        ("replica 1", "cache", {"share": 0.25}),
        ("replica 1", "tokens", {"per_second": 7.0}),
        ("replica 0", "requests", {"running": 2, "waiting": 1}),
    ]
    assert kept[5] == ("replica 0", "tokens", {"per_second": pytest.approx(500 / 6, abs=0.1)})


def test_one_that_fails_or_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "_LIMIT_SECONDS", 0.01)

    def fails() -> EngineGauges:
        raise AttemptFailed("503")

    adapter = Busy({"http://fails": fails, "http://a": lambda: EngineGauges(running=1, waiting=0)})
    kept = followed(adapter, ["http://fails", "http://hangs", "http://a"], 6)
    assert adapter.asked[:6] == ["http://fails", "http://hangs", "http://a"] * 2
    assert kept[0] == ("replica 2", "requests", {"running": 1, "waiting": 0})


def test_an_answer_of_another_form_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def another() -> EngineGauges:
        raise KeyError("num_requests_running")

    adapter = Busy({"http://a": another})
    with caplog.at_level(logging.WARNING):
        assert followed(adapter, ["http://a"], 1) == []
    assert adapter.asked == ["http://a"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "the timeline has no load of servers: http://a: KeyError('num_requests_running')"
