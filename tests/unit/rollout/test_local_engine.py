"""The in-process engine against transformers, and its own promises: order, limits, independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    MinPLogitsWarper,
    Qwen3MoeForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicCache

from rl_megatron.columns import Ragged
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.engines.local.engine import LocalEngine, RowSampling, choose_tokens, stream_keys, uniforms
from rl_megatron.engines.local.server import Ended, RunningBatch
from rl_megatron.errors import EngineError
from rl_megatron.models import kv_cache, reference
from rl_megatron.models.delta import DeltaStates
from rl_megatron.models.named import NAMED
from rl_megatron.types import Completion, GenerationRequest, SamplingParams
from rl_megatron.weights.formats.hf_folder import is_draft
from rl_megatron.weights.layouts.families import FAMILIES, hf_layout, read_shape
from rl_megatron.weights.layouts.layout import float32_in_files
from tests.completions import plain
from tests.family_models import MODELS, SPARSE, save_model
from tools.planner.memory import fullest

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


@pytest.mark.parametrize("pushed", [False, True])
def test_kept_tokens_are_those_of_the_draw(theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine, pushed: bool) -> None:
    """Also of a completion in two parts; none where the whole vocabulary is kept."""
    asked = [replace(one, columns=("kept",)) for one in ragged(num=3, top_p=0.9, top_k=9)]
    others = [
        request("unasked", (3, 4), top_p=0.9),
        replace(request("greedy", (5,), temperature=0.0, top_k=9), columns=("kept",)),
    ]
    running, every = RunningBatch(make_engine(5), slots=5), [*asked, *others]

    def push(number: int) -> Ended:  # the same weights again
        if pushed and number % 5 == 4:
            running.pause("recompute")
            running.resume()
        return []

    done = drive(running, every, push)
    for one in asked:
        for got in done[one.id]:
            kept, ids = got.columns["kept"], torch.tensor([[*one.token_ids, *got.token_ids.tolist()]])
            assert isinstance(kept, Ragged)
            assert kept.values.dtype == kept.counts.dtype == np.int32
            assert kept.counts.max() <= 9
            with torch.no_grad():
                logits = theirs(ids).logits[0, len(one.token_ids) - 1 : -1].double()
            for at, (row, token) in enumerate(zip(logits, got.token_ids.tolist(), strict=True)):
                own = kept[at : at + 1].values.tolist()
                assert own == row.topk(len(own)).indices.tolist()
                mass = row[own].logsumexp(0)
                assert got.logprobs[at] == pytest.approx(float(row[token] - mass), abs=1e-4)
                assert token in own
    assert "kept" not in done["unasked"][0].columns
    (greedy,) = done["greedy"]
    assert greedy.columns["kept"].counts.tolist() == [0] * len(greedy.token_ids)  # type: ignore[union-attr]


@pytest.mark.parametrize("slots", [64, 2])
def test_greedy_tokens_are_transformers(theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine, slots: int) -> None:
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
    together, few = wide.generate(requests), narrow.generate(requests)
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


def in_bytes(ids: Sequence[int]) -> str:
    """Below 14 a token is the first byte of a character, else the second of some."""
    return bytes(0xC3 if one < 14 else 0x80 + one for one in ids).decode(errors="replace")


@pytest.mark.parametrize("slots", [16, 2])
def test_the_token_that_completes_a_stop_text_is_the_last(make_engine: MakeEngine, slots: int) -> None:
    """Texts of two tokens each; a longer one has the engine look back further, and never at all tokens."""
    engine, seen = make_engine(slots), list[int]()
    with pytest.raises(EngineError, match="needs the model's tokenizer"):
        engine.generate([request("x", (3,), stop=("é",))])

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return in_bytes(ids)

    engine.decode, stop = decode, ("Ó", "Õ", "Ñ", "ÖÖ")
    free = engine.generate(ragged(num=6, max_new_tokens=40))
    assert not seen
    ended = engine.generate(ragged(num=6, max_new_tokens=40, stop=stop))
    assert max(seen) == 5
    reasons = set()
    for whole, cut in zip(chain(*free), chain(*ended), strict=True):
        ids = whole.token_ids.tolist()
        length = next((i for i in range(1, 41) if any(one in in_bytes(ids[:i]) for one in stop)), None)
        assert cut.token_ids.tolist() == ids[:length]
        assert cut.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert cut.finish_reason == ("length" if length is None else "stop")
        reasons.add(cut.finish_reason)
    assert reasons == {"length", "stop"}


def test_a_stop_token_at_the_limit_is_a_stop(make_engine: MakeEngine) -> None:
    ((got,),) = make_engine(1).generate([request("p", (3,), max_new_tokens=1, stop_token_ids=tuple(range(41)))])
    assert (len(got.token_ids), got.finish_reason) == (1, "stop")


@pytest.mark.parametrize("slots", [64, 3])
def test_routes_are_transformers_top_k(theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine, slots: int) -> None:
    asked = [
        replace(r, columns=("routes",) if i != 2 else ())
        for i, r in enumerate(ragged(num=3, stop_token_ids=tuple(range(0, 41, 6))))
    ]
    answers = make_engine(slots).generate(asked)
    assert [[got.columns == {} for got in group] for group in answers] == [[i == 2] * 3 for i in range(len(asked))]
    unrouted = make_engine(slots).generate([replace(r, columns=()) for r in asked])
    without = [[plain(replace(got, columns={})) for got in group] for group in answers]
    assert without == [list(map(plain, group)) for group in unrouted]
    lengths = set()
    for request, group in zip(asked, answers, strict=True):
        for got in group if request.columns else ():
            lengths.add(len(got.token_ids))
            tokens = torch.tensor([[*request.token_ids, *got.token_ids.tolist()]])[:, :-1]
            with torch.no_grad():
                logits = theirs(tokens, output_router_logits=True).router_logits
            wanted = torch.stack([x.topk(2, -1).indices.sort(-1).values for x in logits], 1)
            assert torch.tensor(got.columns["routes"]).sort(-1).values.tolist() == wanted.tolist()
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
        (request("x", (3,), temperature=1e-300), r"temperature=1e-300 must be 0 \(greedy\), or from 1e-06 to 1e\+06"),
        (request("x", (3,), top_p=0.0), "top_p=0.0"),
        (request("x", (3,), stop_token_ids=(41,)), r"stop_token_ids=\(41,\)"),
    ],
)
def test_unservable_requests_are_refused(make_engine: MakeEngine, bad: GenerationRequest, message: str) -> None:
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
    assert planned == (2 * layers * torch.empty(row, device=meta).nbytes) + states.taps.nbytes + states.states.nbytes


# Each family's models: the engine's own tensors, and log-probs of long ragged completions as transformers' forward.
PROMPT_LENGTHS = (1, 9, 2, 17, 5)
VOCABULARY = 61


@pytest.fixture(params=[name for name in MODELS if FAMILIES[MODELS[name][0]].serves])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, LocalEngine]:
    theirs, shape = save_model(request.param, tmp_path), read_shape(tmp_path)
    engine = LocalEngine(shape, slots=4, dtype=torch.float32, device="cpu", max_length=128)
    saved = load_file(tmp_path / "model.safetensors")
    checkpoint = {name: tensor for name, tensor in saved.items() if not is_draft(name, shape)}
    assert {n: t.shape for n, t in engine.tensors.items()} == {n: t.shape for n, t in checkpoint.items()}
    for name, tensor in checkpoint.items():
        engine.tensors[name].copy_(tensor)
    return request.param, theirs, engine


def requests(*, routes: bool) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(7)
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=30, stop_token_ids=(), seed=5)
    return [
        GenerationRequest(
            id=str(length),
            token_ids=tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()),
            num_completions=2,
            params=replace(params, stop_token_ids=(3, 19, 42)) if length > 2 else params,
            columns=("routes",) if routes else (),
        )
        for length in PROMPT_LENGTHS
    ]


@torch.no_grad()
def expected(theirs: Any, asked: GenerationRequest, got: Completion) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """By one plain forward of the whole text: log-probs of the completion's tokens, and the experts [positions, k] that
    each layer with experts computes."""
    text = [*asked.token_ids, *got.token_ids.tolist()]
    chosen: list[torch.Tensor] = []
    experts = [module for name, module in theirs.named_modules() if name.endswith(".experts")]
    hooks = [one.register_forward_pre_hook(lambda _, given: chosen.append(given[1])) for one in experts]
    logits = theirs(torch.tensor([text[:-1]])).logits[0, len(asked.token_ids) - 1 :]
    for hook in hooks:
        hook.remove()
    return logits.log_softmax(-1).gather(1, torch.tensor(text[len(asked.token_ids) :])[:, None])[:, 0], chosen


def test_what_it_samples_has_the_log_probs_and_routes_of_transformers(served: tuple[str, Any, LocalEngine]) -> None:
    name, theirs, engine = served
    shape, asked, lengths = engine.model.shape, requests(routes=name in SPARSE), set()
    for request, group in zip(asked, engine.generate(asked), strict=True):
        for got in group:
            lengths.add(len(got.token_ids))
            logprobs, chosen = expected(theirs, request, got)
            assert (torch.tensor(got.logprobs) - logprobs).abs().max() < 1e-4
            assert len(chosen) == len(shape.moe_layers)
            assert ("routes" in got.columns) == bool(chosen) == (name in SPARSE)
            if "routes" in got.columns:
                own = torch.tensor(got.columns["routes"]).long()
                torch.testing.assert_close(own.sort(-1).values, torch.stack(chosen, 1).sort(-1).values)
    assert max(lengths) == 30 > max(shape.windows or (0,))
    assert min(lengths) < 30


def test_logits_of_whole_texts_are_those_of_transformers(served: tuple[str, Any, LocalEngine]) -> None:
    _, theirs, engine = served
    # Two of a delta net's chunks, whose rounding is 1.2e-4 on a Xeon; from 140 tokens on it is 1e-3.
    length, gap = (80, 5e-4) if engine.model.shape.delta else (40, 1e-4)
    ids = torch.randint(0, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(engine.model.logits(ids), theirs(ids).logits, rtol=1e-4, atol=gap)


@pytest.fixture(params=["deepseek_v32", "glm_moe_dsa"])
def sparse(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, LocalEngine]:
    """A model whose queries choose 8 keys, the latter with a choice that two layers share."""
    theirs, slots = save_model(request.param, tmp_path, index_topk=8, index_n_heads=16), 3
    engine = LocalEngine(read_shape(tmp_path), slots=slots, dtype=torch.float32, device="cpu", max_length=64)
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in engine.tensors.items():
        tensor.copy_(saved[name])
    return theirs, engine


@pytest.mark.parametrize("room", [2**22, 200], ids=["whole", "blocks"])
def test_logits_past_an_indexers_top_k_are_those_of_transformers(
    sparse: tuple[Any, LocalEngine], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At four times as many positions, in whole and in blocks of few queries."""
    theirs, engine = sparse
    monkeypatch.setattr(reference, "_SCORES", room)
    ids = torch.randint(0, VOCABULARY, (3, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(engine.model.logits(ids), theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_past_an_indexers_top_k_are_those_of_transformers(
    sparse: tuple[Any, LocalEngine], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that cross it while decoding or in the prompt, move, share prompts, and wrap round a ring of 45 columns."""
    monkeypatch.setattr(kv_cache, "BLOCK_COLUMNS", 5)
    theirs, engine = sparse
    asked = [
        replace(
            one,
            token_ids=one.token_ids * times,
            params=replace(one.params, temperature=temperature, max_new_tokens=most, stop_token_ids=()),
        )
        for one, most, times in zip(requests(routes=False), (30, 9, 23, 29, 4), (12, 1, 1, 1, 3), strict=True)
    ]
    for request, group in zip(asked, engine.generate(asked), strict=True):
        for got in group:
            assert len(got.token_ids) == request.params.max_new_tokens
            logprobs, _ = expected(theirs, request, got)
            assert (torch.tensor(got.logprobs) - logprobs).abs().max() < 1e-4
        if not temperature:
            alone = theirs.generate(
                torch.tensor([request.token_ids]), do_sample=False, eos_token_id=None,
                max_new_tokens=request.params.max_new_tokens,
            )[0, len(request.token_ids) :]  # fmt: skip
            assert group[0].token_ids.tolist() == group[1].token_ids.tolist() == alone.tolist()


def test_rows_that_an_indexer_chooses_whole_hold_no_keys_of_it(sparse: tuple[Any, LocalEngine]) -> None:
    shape, held = sparse[1].model.shape, list[torch.Tensor]()
    for columns in (8, 9):
        cache = kv_cache.KVCache(shape, rows=2, columns=columns, dtype=torch.float32, device=torch.device("cpu"))
        held.append(cache._index_keys)
    assert shape.indexer is not None
    assert [x.numel() for x in held] == [0, len(shape.indexer.layers) * 2 * 9 * shape.indexer.head_dim]


def test_every_family_is_served() -> None:
    assert [kind for kind, family in FAMILIES.items() if not family.serves] == []


@pytest.mark.parametrize("name", ["deepseek-v3.2", "hunyuan-3"])
@pytest.mark.parametrize("drafts", [False, True])
def test_it_holds_in_float32_what_files_of_weights_in_bfloat16_do(name: str, drafts: bool) -> None:
    """So that its checksums are those of what it loads, and no export rounds."""
    shape = replace(NAMED[name], num_layers=4, num_draft_layers=drafts)
    if shape.indexer is not None:
        shape = replace(shape, indexer=replace(shape.indexer, layers=(0, 1, 2, 3, *range(4, 4 + shape.draft_layers))))
    engine = LocalEngine(shape, slots=1, dtype=torch.bfloat16, device="meta", max_length=8)
    found = {tensor for tensor, held in engine.tensors.items() if held.dtype == torch.float32}
    assert found == float32_in_files(hf_layout(shape))
    assert found


# Requests that come and go in a server of the in-process engine, and pushes while they run, against transformers.
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


def staggered() -> list[GenerationRequest]:
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
def expected_by_version(
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


@torch.no_grad()
def routes_by_version(
    models: dict[int, Qwen3MoeForCausalLM], asked: GenerationRequest, got: Completion, *, keep: bool, late: int = 0
) -> np.ndarray:
    """The experts of each position, [positions, layers, k], ascending: those of the version that computed it first, so
    that sampled the token after it. Versions change ``late`` positions later."""
    text = [*asked.token_ids, *got.token_ids.tolist()]
    out, cache, have = [], DynamicCache(), 0
    for span, stop in zip(got.spans, [*(span.start for span in got.spans[1:]), len(got.token_ids)], strict=True):
        end = min(len(asked.token_ids) - 1 + stop + late, len(text) - 1)
        cache = cache if keep else DynamicCache()
        ids = torch.tensor([text[have if keep else 0 : end]])
        said = models[span.version](ids, past_key_values=cache, use_cache=True, output_router_logits=True)
        chosen = torch.stack([one.topk(2).indices.sort(-1).values for one in said.router_logits], 1)
        out.append(chosen[len(chosen) - (end - have) :])
        have = end
    return torch.cat(out).numpy()


@pytest.mark.parametrize("slots", [32, 3])
@pytest.mark.parametrize("mode", ["recompute", "keep_cache"])
def test_each_token_and_its_routes_are_of_its_version_whatever_came_and_went(
    theirs: Qwen3MoeForCausalLM, newer: Qwen3MoeForCausalLM, make_engine: MakeEngine, slots: int, mode: RunningRequests
) -> None:
    engine, asked, models = make_engine(slots), staggered(), {0: theirs, 1: newer, 2: theirs}
    asked = [replace(one, columns=("routes",)) for one in asked]
    running, late = RunningBatch(engine, slots=slots), list[bool]()

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
            keep = mode == "keep_cache"
            wanted = expected_by_version(models, one, got, keep=keep)
            np.testing.assert_allclose(got.logprobs, wanted, rtol=0, atol=1e-4)
            routes = np.sort(got.columns["routes"], -1)
            np.testing.assert_array_equal(routes, routes_by_version(models, one, got, keep=keep))
            if len(got.spans) > 1:
                late.append(np.array_equal(routes, routes_by_version(models, one, got, keep=keep, late=1)))
    assert not all(late)  # a version's routes that begin one position late are seen
    assert len(versions) >= 3
    assert (0, 1, 2) in versions


def test_what_was_cached_before_a_push_shows_in_later_tokens(
    theirs: Qwen3MoeForCausalLM, newer: Qwen3MoeForCausalLM, make_engine: MakeEngine
) -> None:
    """Else the test above would not tell the modes apart."""
    engine, (asked, *_) = make_engine(4), staggered()
    running = RunningBatch(engine, slots=4)

    def push(number: int) -> Ended:
        if number == 12:
            running.pause("keep_cache")
            load(engine, newer, 1)
            running.resume()
        return []

    for got in drive(running, [asked], push)[asked.id]:
        again = expected_by_version({0: theirs, 1: newer}, asked, got, keep=False)
        assert np.abs(got.logprobs - again.numpy())[13:].max() > 0.01


def test_a_completion_depends_on_its_request_alone_and_its_own_random_numbers(make_engine: MakeEngine) -> None:
    def tokens(slots: int, asked: list[GenerationRequest], *, pushed: bool) -> dict[str, list[list[int]]]:
        running = RunningBatch(make_engine(slots), slots=slots)

        def push(number: int) -> Ended:
            if pushed and number % 5 == 4:  # the same weights again
                running.pause("recompute")
                running.resume()
            return []

        done = drive(running, asked, push)
        return {name: [one.token_ids.tolist() for one in completions] for name, completions in done.items()}

    asked = staggered()
    alone = {name: made for one in asked for name, made in tokens(32, [one], pushed=False).items()}
    assert tokens(3, asked, pushed=False) == alone
    assert tokens(3, asked, pushed=True) == alone
    assert all(first != second for first, second in alone.values() if len(first) > 8)


def test_aborts_end_completions_where_they_are(theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine) -> None:
    running, asked = RunningBatch(make_engine(3), slots=3), staggered()

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
            wanted = expected_by_version({0: theirs}, one, got, keep=False)
            np.testing.assert_allclose(got.logprobs, wanted, rtol=0, atol=1e-4)
            assert (got.finish_reason == "length") == (len(got.token_ids) == one.params.max_new_tokens)


def test_after_an_abort_whole_texts_are_seen_in_a_ring(theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine) -> None:
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
    wanted = expected_by_version({0: theirs}, younger, got, keep=False)
    np.testing.assert_allclose(got.logprobs, wanted, rtol=0, atol=1e-4)


def test_weights_that_are_not_finite_end_every_request_and_leave_no_slot_taken(make_engine: MakeEngine) -> None:
    engine, (asked, other, *_) = make_engine(2), staggered()
    running, norm = RunningBatch(engine, slots=2), engine.tensors["model.norm.weight"]
    kept = norm.clone()
    running.start(asked.id, asked)
    running.step()
    norm.fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        drive(running, [])
    assert running.drop() == [asked.id]
    norm.copy_(kept)
    assert [len(got.token_ids) for got in drive(running, [other])[other.id]] == [3, 3]


# Token choice against closed-form distributions.
LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -3.0, 1.9, -math.inf, 0.0])
DRAWS = 40_000


def splitmix64(state: int) -> int:
    """The published generator's output function (Steele, Lea and Flood, 2014), in Python's exact integers."""
    z = state & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def rows(
    num: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    greedy: bool = False,
    top_k: float = math.inf,
    min_p: float = 0.0,
) -> RowSampling:
    return RowSampling(
        inverse_temperature=torch.full((num, 1), 1 / temperature),
        top_p=torch.full((num, 1), top_p),
        top_k=torch.full((num, 1), top_k),
        min_p=torch.full((num, 1), min_p),
        greedy=torch.full((num, 1), greedy),
        any_greedy=greedy,
        any_limit=top_p < 1 or top_k < math.inf or min_p > 0,
    )


def test_uniforms_are_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15
    seeds, completions, counters = [0, 1, -5, 2**63 - 1], [0, 3, 1, 7], [0, 1, 100, 2**31]
    got = uniforms(stream_keys(torch.tensor(seeds), torch.tensor(completions)), torch.tensor(counters))
    keys = [splitmix64(splitmix64(s * golden) + c * golden) for s, c in zip(seeds, completions, strict=True)]
    expected = [(splitmix64(k + (n + 1) * golden) >> 40) / 2**24 for k, n in zip(keys, counters, strict=True)]
    assert got.tolist() == expected


def test_streams_are_uniform_and_unrelated() -> None:
    keys = stream_keys(torch.arange(50).repeat_interleave(50), torch.arange(50).repeat(50))
    draws = torch.stack([uniforms(keys, torch.full_like(keys, step)) for step in range(32)]).double()
    assert len(set(keys.tolist())) == 2500
    assert float(((torch.histc(draws, bins=64, min=0, max=1) - 1250) ** 2 / 1250).sum()) < 63 + 4 * math.sqrt(2 * 63)
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 5 / math.sqrt(2500)
    assert torch.corrcoef(draws.T.reshape(50, -1)).fill_diagonal_(0).abs().max() < 5 / math.sqrt(1600)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.7), (1.5, 0.9), (1.0, 1e-6)]
)
def test_frequencies_and_logprobs_follow_the_closed_form(temperature: float, top_p: float) -> None:
    exact = (LOGITS.double() / temperature).softmax(-1)
    kept, mass = torch.zeros(8, dtype=torch.bool), 0.0
    for token in exact.argsort(descending=True).tolist():
        if mass < top_p and exact[token] > 0:
            kept[token] = True
            mass += float(exact[token])
    exact = torch.where(kept, exact, 0.0) / mass

    keys = stream_keys(torch.full((DRAWS,), 17), torch.arange(DRAWS))
    uniform = uniforms(keys, torch.zeros_like(keys))
    tokens, logprobs, _ = choose_tokens(LOGITS.repeat(DRAWS, 1), uniform, rows(DRAWS, temperature, top_p))
    torch.testing.assert_close(logprobs.double(), exact.log()[tokens], rtol=0, atol=1e-5)
    counts, expected = tokens.bincount(minlength=8)[kept], exact[kept] * DRAWS
    assert counts.sum() == DRAWS
    degrees = int(kept.sum()) - 1
    assert float(((counts - expected) ** 2 / expected).sum()) <= degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [(1.0, 1.0, 3, 0.0), (1.5, 1.0, math.inf, 0.2), (0.7, 0.8, 4, 0.0), (2.0, 0.9, 5, 0.3), (1.0, 0.8, 3, 0.0)],
)
def test_top_k_and_min_p_are_as_in_transformers(temperature: float, top_p: float, top_k: float, min_p: float) -> None:
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    warpers += [TopKLogitsWarper(int(top_k))] if top_k < math.inf else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    left = LOGITS.double()[None]
    for warper in warpers:
        left = warper(None, left)
    exact = left[0].softmax(-1)
    uniform = (torch.arange(DRAWS) + 0.5) / DRAWS  # each token as often as its probability says, to one draw
    wanted = replace(rows(DRAWS, temperature, top_p, top_k=top_k, min_p=min_p), any_kept=True)
    tokens, logprobs, kept = choose_tokens(LOGITS.repeat(DRAWS, 1), uniform, wanted)
    assert kept is not None
    for of_row in kept.values.split(kept.counts.tolist())[::997]:
        assert sorted(of_row.tolist()) == exact.nonzero().flatten().tolist()
    torch.testing.assert_close(logprobs.double(), exact.log()[tokens], rtol=0, atol=1e-5)
    assert (tokens.bincount(minlength=8) - exact * DRAWS).abs().max() <= 1


def test_limits_of_one_row_change_no_bit_of_another() -> None:
    uniform, mixed = torch.linspace(0.0, 0.999, 64), rows(64, 1.3, 0.9)
    alone = choose_tokens(LOGITS.repeat(64, 1), uniform, mixed)
    mixed.top_k[::2] = 2.0
    beside = choose_tokens(LOGITS.repeat(64, 1), uniform, mixed)
    assert [one[1::2].tolist() for one in beside[:2]] == [one[1::2].tolist() for one in alone[:2]]


def test_greedy_takes_the_first_best_and_reports_the_models_logprob() -> None:
    tokens, logprobs, _ = choose_tokens(LOGITS.repeat(4, 1), torch.tensor([0.0, 0.3, 0.7, 0.999]), rows(4, greedy=True))
    assert tokens.tolist() == [2] * 4
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[2].expand(4))


def test_the_ends_of_the_unit_interval_never_hit_an_impossible_token() -> None:
    logits = torch.tensor([-math.inf, 3.0, -math.inf, 1.0, -math.inf]).repeat(2, 1)
    for top_p in (1.0, 0.999):
        tokens, *_ = choose_tokens(logits.clone(), torch.tensor([0.0, 1 - 2.0**-24]), rows(2, top_p=top_p))
        assert tokens.tolist() == [1, 3]


def test_rows_keep_their_own_parameters() -> None:
    mixed = RowSampling(
        inverse_temperature=torch.tensor([[1.0], [1.0], [4.0], [1.0]]),
        top_p=torch.tensor([[1.0], [1.0], [1.0], [0.3]]),
        greedy=torch.tensor([[True], [False], [False], [False]]),
        any_greedy=True,
        top_k=torch.full((4, 1), math.inf),
        min_p=torch.zeros(4, 1),
        any_limit=True,
    )
    uniform = torch.full((4,), 0.99)
    together = choose_tokens(LOGITS.repeat(4, 1), uniform, mixed)
    singles = [(1.0, 1.0, True), (1.0, 1.0, False), (0.25, 1.0, False), (1.0, 0.3, False)]
    for row, (temperature, top_p, greedy) in enumerate(singles):
        alone = choose_tokens(LOGITS.repeat(1, 1), uniform[:1], rows(1, temperature, top_p, greedy))
        assert (together[0][row], together[1][row]) == (alone[0][0], alone[1][0])
