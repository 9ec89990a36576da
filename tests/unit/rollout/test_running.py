"""Requests that come and go in a server of the in-process engine, and pushes while they run, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM
from transformers.cache_utils import DynamicCache

from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.errors import EngineError
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.rollout.servers.embedded.running import Ended, RunningBatch
from rl_megatron.types import Completion, GenerationRequest
from tests.unit.rollout.test_local_engine import request

MakeEngine = Callable[[int], LocalEngine]


@pytest.fixture(scope="module")
def newer(theirs: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    """The weights of the next version."""
    model = deepcopy(theirs)
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return model


def load(engine: LocalEngine, model: Qwen3MoeForCausalLM, version: int) -> None:
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        checkpoint = load_file(Path(folder) / "model.safetensors")
    for name, tensor in engine.tensors.items():
        tensor.copy_(checkpoint[name])
    engine.serve(version)


def requests() -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(11)
    lengths = ((1, 30), (5, 3), (17, 25), (9, 14), (2, 30), (30, 9), (12, 1), (5, 28))
    prompts = [tuple(torch.randint(0, 41, (length,), generator=generator).tolist()) for length, _ in lengths]
    return [
        request(f"p{i}", prompt, 2, seed=i, max_new_tokens=most)
        for i, (prompt, (_, most)) in enumerate(zip(prompts, lengths, strict=True))
    ]


def drive(
    running: RunningBatch, asked: list[GenerationRequest], between: Callable[[int], Ended] = lambda _: []
) -> dict[str, list[Completion]]:
    """Every other step one more request comes. ``between`` is called after each, with its number."""
    done: dict[str, list[Completion]] = {}
    coming, number = list(asked), 0
    while coming or running.unfinished:
        if coming and number % 2 == 0:
            one = coming.pop(0)
            running.start(one.id, one)
        done |= dict(running.step())
        done |= dict(between(number))
        number += 1
    return done


@torch.no_grad()
def expected(
    models: dict[int, Qwen3MoeForCausalLM], asked: GenerationRequest, got: Completion, *, keep: bool
) -> torch.Tensor:
    """Log-probs of each token by its version, from the whole text; or with what older versions have cached."""
    text = [*asked.token_ids, *got.token_ids.tolist()]
    starts = [span.start for span in got.spans]
    out, cache = [], DynamicCache()
    for span, (start, stop) in zip(got.spans, pairwise([*starts, len(got.token_ids)]), strict=True):
        first = len(asked.token_ids) - 1 + start  # the position of the token before
        given = text[cache.get_seq_length() if keep else 0 : first + stop - start]
        cache = cache if keep else DynamicCache()
        logits = models[span.version](torch.tensor([given]), past_key_values=cache, use_cache=True).logits[0]
        logprobs = logits[len(logits) - (stop - start) :].double().log_softmax(-1)
        out.append(logprobs[range(stop - start), got.token_ids[start:stop].tolist()])
    return torch.cat(out)


@pytest.mark.parametrize("slots", [32, 3])
@pytest.mark.parametrize("mode", ["recompute", "keep_cache"])
def test_each_token_is_of_its_version_whatever_came_and_went(
    theirs: Qwen3MoeForCausalLM, newer: Qwen3MoeForCausalLM, make_engine: MakeEngine, slots: int, mode: RunningRequests
) -> None:
    engine, asked, models = make_engine(slots), requests(), {0: theirs, 1: newer, 2: theirs}
    running = RunningBatch(engine, slots=slots)

    def push(number: int) -> Ended:
        if number in (12, 21):
            assert running.pause(mode) == []
            version = 1 + (number == 21)
            load(engine, models[version], version)
            running.resume()
        return []

    done = drive(running, asked, push)
    assert done.keys() == {one.id for one in asked}
    versions = set()
    for one in asked:
        for got in done[one.id]:
            versions.add(tuple(span.version for span in got.spans))
            assert len(got.token_ids) == one.params.max_new_tokens
            wanted = expected(models, one, got, keep=mode == "keep_cache")
            np.testing.assert_allclose(got.logprobs, wanted, rtol=0, atol=1e-4)
    assert len(versions) >= 3
    assert (0, 1, 2) in versions


def test_what_was_cached_before_a_push_shows_in_later_tokens(
    theirs: Qwen3MoeForCausalLM, newer: Qwen3MoeForCausalLM, make_engine: MakeEngine
) -> None:
    """Else the test above would not tell the modes apart."""
    engine, (asked, *_) = make_engine(4), requests()
    running = RunningBatch(engine, slots=4)

    def push(number: int) -> Ended:
        if number == 12:
            running.pause("keep_cache")
            load(engine, newer, 1)
            running.resume()
        return []

    for got in drive(running, [asked], push)[asked.id]:
        again = expected({0: theirs, 1: newer}, asked, got, keep=False)
        assert np.abs(got.logprobs - again.numpy())[13:].max() > 0.01


def test_a_completion_depends_on_its_request_alone_and_goes_on_with_its_own_random_numbers(
    make_engine: MakeEngine,
) -> None:
    def tokens(slots: int, asked: list[GenerationRequest], *, pushed: bool) -> dict[str, list[list[int]]]:
        engine = make_engine(slots)
        running = RunningBatch(engine, slots=slots)

        def push(number: int) -> Ended:
            if pushed and number % 5 == 4:  # the same weights again
                running.pause("recompute")
                running.resume()
            return []

        done = drive(running, asked, push)
        return {name: [one.token_ids.tolist() for one in completions] for name, completions in done.items()}

    asked = requests()
    alone = {name: made for one in asked for name, made in tokens(32, [one], pushed=False).items()}
    assert tokens(3, asked, pushed=False) == alone
    assert tokens(3, asked, pushed=True) == alone
    assert all(first != second for first, second in alone.values() if len(first) > 8)


def test_aborts_end_completions_where_they_are(theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine) -> None:
    running, asked = RunningBatch(make_engine(3), slots=3), requests()

    def between(number: int) -> Ended:
        if number == 10:
            return running.abort("p0")
        return running.pause("abort") if number == 16 else []

    done = drive(running, asked, between)
    assert done.keys() == {one.id for one in asked}
    aborted = [got for completions in done.values() for got in completions if got.finish_reason == "abort"]
    assert {len(got.token_ids) > 0 for got in aborted} == {True, False}  # some had no slot yet
    for one in asked:
        for got in done[one.id]:
            wanted = expected({0: theirs}, one, got, keep=False)
            np.testing.assert_allclose(got.logprobs, wanted, rtol=0, atol=1e-4)
            assert (got.finish_reason == "length") == (len(got.token_ids) == one.params.max_new_tokens)


def test_what_goes_on_after_an_abort_sees_its_whole_text_when_the_cache_wraps(
    theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine
) -> None:
    running = RunningBatch(make_engine(2), slots=2)
    older, younger = (request(name, (3, 5), most, seed=1, max_new_tokens=100) for name, most in (("a", 1), ("b", 1)))
    done: dict[str, list[Completion]] = {}
    running.start(older.id, older)
    for _ in range(60):
        running.step()
    running.start(younger.id, younger)
    running.step()
    running.abort(older.id)
    while running.unfinished:  # past the cache's 128 columns
        done |= dict(running.step())
    (got,) = done[younger.id]
    wanted = expected({0: theirs}, younger, got, keep=False)
    np.testing.assert_allclose(got.logprobs, wanted, rtol=0, atol=1e-4)


def test_weights_that_are_not_finite_end_every_request_and_leave_no_slot_taken(make_engine: MakeEngine) -> None:
    engine, (asked, other, *_) = make_engine(2), requests()
    running = RunningBatch(engine, slots=2)
    norm = engine.tensors["model.norm.weight"]
    kept = norm.clone()
    running.start(asked.id, asked)
    running.step()
    norm.fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        drive(running, [])
    assert running.drop() == [asked.id]
    norm.copy_(kept)
    assert [len(got.token_ids) for got in drive(running, [other])[other.id]] == [3, 3]
