"""What the endpoint says it took for a turn, beside what a client waited for and what an engine took."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.environments.figures import environment_row, of_requests
from rl_megatron.types import Chain, Completion, GenerationRequest, Trajectory, Turn
from tests.unit.rollout.conversation.families import FAMILIES
from tests.unit.rollout.endpoint.serving import ASK, TOKENIZER, Saying, Serving, post

ENGINE, HELD = 0.05, 0.5  # seconds
LONG = [{"role": "user", "content": "The quick brown fox adds 12 and 30; " * 5000}]


class Busy(Saying):
    """Computes for `ENGINE` seconds, and says how long it took."""

    def __init__(self) -> None:
        super().__init__("So it is.")
        self.took = list[float]()

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        began = time.perf_counter()
        while time.perf_counter() < began + ENGINE:
            pass
        answer = await super().generate(request)
        self.took.append(time.perf_counter() - began)
        return answer


def chat(served: tuple[str, str], messages: Sequence[object], **headers: str) -> float:
    """Seconds that a client waits for its turn."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    began = time.perf_counter()
    status, _ = post(served, body, **headers)
    assert status == 200
    return time.perf_counter() - began


@pytest.mark.parametrize("by", ["messages", "tokens"])
def test_own_time_is_less_than_the_clients_without_the_engines(serving: Serving, by: str) -> None:
    engine = Busy()
    turns = serving.turns(engine, max_prompt_tokens=100_000)
    served = serving.open(turns)
    counts = serving.endpoint.requests(served[1])
    if by == "messages":
        waited = [chat(served, messages) for messages in (LONG, ASK, [*ASK, *ASK])]
    else:
        body, began = json.dumps({"token_ids": [5] * 100}).encode(), time.perf_counter()
        assert post(served, body, "/inference/v1/generate")[0] == 200
        waited = [time.perf_counter() - began]
    assert len(counts.own_ms) == len(waited) == counts.answered
    for own, client, sampling in zip(counts.own_ms, waited, engine.took, strict=True):
        assert 0 < own / 1000 < client - sampling
    if by == "messages":
        template, alone = ChatTemplate(TOKENIZER, options=FAMILIES["qwen3"].options), list[float]()
        for _ in range(3):
            began = time.thread_time()
            template.begin(LONG, ())
            alone.append(time.thread_time() - began)
        assert counts.own_ms[0] / 1000 > min(alone) / 2


def test_a_turn_that_waits_for_another_or_is_asked_for_again_takes_no_more(serving: Serving) -> None:
    engine = Saying("One.")
    turns = serving.turns(engine)
    served = serving.open(turns)
    counts = serving.endpoint.requests(served[1])
    engine.go.clear()
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(chat, served, [*ASK, *more]) for more in ([], ASK)]
        while not engine.asked or not turns._turn._waiters:
            pass
        ends = time.perf_counter() + HELD
        while time.perf_counter() < ends:
            pass
        engine.go.set()
    chat(served, ASK, x_stainless_retry_count="1")
    assert (counts.answered, counts.retried, len(counts.own_ms)) == (2, 1, 2)
    assert max(counts.own_ms) / 1000 < max(one.result() for one in asking) - HELD


def test_quantiles_are_of_all_turns_of_a_step(serving: Serving) -> None:
    """Of trajectories with 1, 3 and 96 turns, as numpy has them; one without clients has no part in it."""
    took = [float(one) for one in np.random.default_rng(0).gamma(2.0, size=100)]
    counts = serving.endpoint.requests(serving.open(serving.turns(Saying("a")))[1])
    turn = Turn(start=1, logprobs=np.zeros(1, np.float32), finish_reason="stop", spans=(), text="")
    row, led = Chain(token_ids=np.zeros(2, np.int32), turns=(turn,)), list[Trajectory]()
    fixed = {"seconds": 1.0, "tool_calls": 0.0, "bad_calls": 0.0, "gone_on": 0.0}
    for part in (took[:1], took[1:4], took[4:]):
        counts.answered = len(part)
        metrics = fixed | of_requests(counts)
        led.append(Trajectory(chains=(row,), reward=0.0, metrics=metrics, overhead_ms=tuple(part)))
    found = environment_row([*led, Trajectory(chains=(row,), reward=0.0, metrics=fixed)])
    assert found["endpoint/overhead_ms_p50"] == sorted(took)[50]
    assert found["endpoint/overhead_ms_p99"] == sorted(took)[99]
    assert found["endpoint/answered"] == pytest.approx(100 / 3)
    assert not [
        name for name in environment_row([Trajectory(chains=(row,), reward=0.0, metrics=fixed)]) if "ms" in name
    ]
