"""The in-process engine against transformers, and its own promises: order, limits, independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from rl_megatron.config.io import load_config
from rl_megatron.data.routes import decode_routes
from rl_megatron.errors import EngineError
from rl_megatron.models.delta import DeltaStates
from rl_megatron.models.named import NAMED
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.scaling.memory import fullest
from rl_megatron.types import Completion, GenerationRequest, SamplingParams
from tests.completions import plain

MakeEngine = Callable[[int], LocalEngine]
LENGTHS = (1, 5, 2, 17, 9, 1, 30)


def request(name: str, prompt: tuple[int, ...], num: int = 1, **changes: object) -> GenerationRequest:
    values = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 12, "stop_token_ids": (), "seed": 3, **changes}
    return GenerationRequest(id=name, token_ids=prompt, num_completions=num, params=SamplingParams(**values))


def ragged(num: int = 1, **changes: object) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(11)
    prompts = [tuple(torch.randint(0, 41, (length,), generator=generator).tolist()) for length in LENGTHS]
    return [request(f"p{i}", prompt, num, **{"seed": i, **changes}) for i, prompt in enumerate(prompts)]


def logprobs_by_transformers(model: Qwen3MoeForCausalLM, asked: GenerationRequest, got: Completion) -> torch.Tensor:
    """Log-probs of the completion's tokens under the sampling distribution, from one plain forward, in float64."""
    ids = torch.tensor([[*asked.token_ids, *got.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(asked.token_ids) - 1 : -1].double()
    probabilities = (logits / (asked.params.temperature or 1.0)).softmax(-1)
    if asked.params.temperature:
        for row in probabilities:
            kept, mass = set(), 0.0
            for token in row.argsort(descending=True).tolist():
                if mass < asked.params.top_p:
                    kept.add(token)
                    mass += float(row[token])
            row[[token for token in range(len(row)) if token not in kept]] = 0
        probabilities /= probabilities.sum(-1, keepdim=True)
    return probabilities.log()[range(len(got.token_ids)), got.token_ids.tolist()]


@pytest.mark.parametrize("slots", [64, 5])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8), (0.0, 1.0)])
def test_recorded_logprobs_equal_transformers(
    theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine, slots: int, temperature: float, top_p: float
) -> None:
    requests = ragged(num=3, temperature=temperature, top_p=top_p)
    answers = make_engine(slots).generate(requests)
    assert [len(group) for group in answers] == [3] * len(LENGTHS)
    for asked, group in zip(requests, answers, strict=True):
        for got in group:
            assert len(got.token_ids) == 12
            expected = logprobs_by_transformers(theirs, asked, got)
            torch.testing.assert_close(torch.tensor(got.logprobs).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("slots", [64, 2])
def test_greedy_tokens_equal_transformers_generate(
    theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine, slots: int
) -> None:
    requests = ragged(temperature=0.0, max_new_tokens=40)
    for asked, (got,) in zip(requests, make_engine(slots).generate(requests), strict=True):
        ids = torch.tensor([asked.token_ids])
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        assert got.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("num", [1, 4, 5])
def test_what_was_sampled_before_changes_no_bit(make_engine: MakeEngine, num: int) -> None:
    fresh, used = make_engine(64), make_engine(64)
    used.generate(ragged(num=2, max_new_tokens=40))
    for first, again in zip(
        *(engine.generate([request("few", (3, 4), num, max_new_tokens=9)])[0] for engine in (fresh, used)), strict=True
    ):
        assert plain(first) == plain(again)


def test_a_completion_does_not_depend_on_what_else_is_in_the_batch(make_engine: MakeEngine) -> None:
    wide, narrow = make_engine(64), make_engine(3)
    requests = [
        *ragged(num=4, max_new_tokens=25, stop_token_ids=(4, 9)),
        request("nucleus", (3, 4), 5, top_p=0.6, seed=-(2**70) + 5),
        request("greedy", (7,), 2, temperature=0.0, max_new_tokens=3),
    ]
    together = wide.generate(requests)
    few = narrow.generate(requests)
    alone = [wide.generate([asked])[0] for asked in requests]
    for group, in_few, by_itself in zip(together, few, alone, strict=True):
        tokens = [got.token_ids.tolist() for got in group]
        assert tokens == [got.token_ids.tolist() for got in in_few] == [got.token_ids.tolist() for got in by_itself]
        for got, other in zip(group, by_itself, strict=True):
            assert got.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    again = wide.generate(requests)  # and the same bits
    assert [list(map(plain, group)) for group in together] == [list(map(plain, group)) for group in again]
    assert len({got.token_ids.tobytes() for got in together[0]}) == 4  # completions of one prompt differ


def test_stop_tokens_and_limits_end_completions(make_engine: MakeEngine) -> None:
    engine = make_engine(16)
    free = engine.generate(ragged(num=6, max_new_tokens=30))
    stops = (5, 12, 33)
    stopped = engine.generate(ragged(num=6, max_new_tokens=30, stop_token_ids=stops))
    reasons = set()
    for group, cut_group in zip(free, stopped, strict=True):
        for whole, cut in zip(group, cut_group, strict=True):
            first = next((i for i, token in enumerate(whole.token_ids) if token in stops), None)
            length = 30 if first is None else first + 1
            assert cut.token_ids.tolist() == whole.token_ids[:length].tolist()
            assert cut.finish_reason == ("length" if first is None else "stop")
            assert len(cut.logprobs) == length
            reasons.add(cut.finish_reason)
    assert reasons == {"length", "stop"}


def test_a_stop_token_at_the_limit_is_a_stop(make_engine: MakeEngine) -> None:
    ((got,),) = make_engine(1).generate([request("p", (3,), max_new_tokens=1, stop_token_ids=tuple(range(41)))])
    assert (len(got.token_ids), got.finish_reason) == (1, "stop")


@pytest.mark.parametrize("slots", [64, 3])
def test_routes_of_prompt_and_completion_are_transformers_top_k(
    theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine, slots: int
) -> None:
    asked = [replace(r, routes=i != 2) for i, r in enumerate(ragged(num=3, stop_token_ids=tuple(range(0, 41, 6))))]
    answers = make_engine(slots).generate(asked)
    assert [[got.routes is None for got in group] for group in answers] == [[i == 2] * 3 for i in range(len(asked))]
    unrouted = make_engine(slots).generate([replace(r, routes=False) for r in asked])
    without = [[plain(replace(got, routes=None)) for got in group] for group in answers]
    assert without == [list(map(plain, group)) for group in unrouted]
    lengths = set()
    for request, group in zip(asked, answers, strict=True):
        for got in group if request.routes else ():
            assert got.routes is not None
            lengths.add(len(got.token_ids))
            tokens = torch.tensor([[*request.token_ids, *got.token_ids.tolist()]])[:, :-1]
            with torch.no_grad():
                logits = theirs(tokens, output_router_logits=True).router_logits
            wanted = torch.stack([x.topk(2, -1).indices.sort(-1).values for x in logits], 1)
            found = torch.tensor(decode_routes(got.routes)).sort(-1).values
            assert found.tolist() == wanted.tolist()
    assert len(lengths) > 3  # rows were given to other sequences


def test_requests_with_different_parameters_keep_their_own(make_engine: MakeEngine) -> None:
    requests = [
        request("long", (3, 4, 5), 2, max_new_tokens=20),
        request("none", (3,), 0),
        request("short", (8,), 3, max_new_tokens=1),
        request("stops", (9, 2), 2, max_new_tokens=50, stop_token_ids=tuple(range(0, 41, 2))),
    ]
    long, none, short, stops = make_engine(2).generate(requests)
    assert [len(got.token_ids) for got in long] == [20, 20]
    assert none == []
    assert [len(got.token_ids) for got in short] == [1, 1, 1]
    for got in stops:
        assert [token % 2 for token in got.token_ids] == [1] * (len(got.token_ids) - 1) + [0]


def test_new_weights_and_version_are_served(make_engine: MakeEngine) -> None:
    engine = make_engine(4)
    ((before,),) = engine.generate([request("p", (3, 4))])
    engine.tensors["lm_head.weight"].zero_()
    engine.serve(8)
    ((after,),) = engine.generate([request("p", (3, 4))])
    assert (before.spans, after.spans) == (((0, 0),), ((0, 8),))
    assert after.logprobs == pytest.approx([-math.log(41)] * 12, abs=1e-5)
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", ()), r"request 'x': the prompt must have one or more token ids in \[0, 41\)"),
        (request("x", (3, 41)), r"got \(3, 41\)"),
        (request("x", (3,) * 120), r"120 prompt tokens \+ max_new_tokens=12 exceed the engine's max_length=128"),
        (request("x", (3,), max_new_tokens=0), "max_new_tokens=0"),
        (request("x", (3,), temperature=float("nan")), "temperature=nan"),
        (request("x", (3,), top_p=0.0), "top_p=0.0"),
        (request("x", (3,), stop_token_ids=(41,)), r"stop_token_ids=\(41,\)"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    make_engine: MakeEngine, bad: GenerationRequest, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        make_engine(2).generate([request("fine", (3,)), bad])


def test_weights_that_give_no_finite_log_probs_are_named_with_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine(4)
    next(iter(engine.tensors.values())).fill_(float("nan"))
    engine.serve(5)
    with pytest.raises(EngineError, match="request 'a': log-probs by weight version 5 are not finite"):
        engine.generate([request("a", (1, 2), max_new_tokens=4)])


def test_the_plan_has_the_bytes_of_the_cache() -> None:
    """Of Qwen3-Next: keys and values of every fourth layer, inputs and states of the others."""
    shape, meta = NAMED["qwen3-next-80b-a3b"], torch.device("meta")
    one, two = (load_config("tiny_cpu", ["model.path=.", f"rollout.slots={slots}"]) for slots in (1, 2))
    planned = fullest(two, shape).terms["engine"] - fullest(one, shape).terms["engine"]
    columns = one.rollout.max_prompt_tokens + one.longest_completion
    row, layers = (columns, shape.num_kv_heads, shape.head_dim), len(shape.attention_layers)
    states = DeltaStates.zeros(shape, 1, torch.float32, meta)
    keys = 2 * layers * torch.empty(row, device=meta).nbytes
    assert planned == keys + states.taps.nbytes + states.states.nbytes
