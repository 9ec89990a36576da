"""What every rollout engine must do, embedded or a server, against transformers' forward, also at near ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from launcher.servers.engines import SERVERS
from rl_megatron.agents.conversation.conversation import TokenRows
from rl_megatron.engines.local.engine import make_decoder
from rl_megatron.errors import EngineError
from rl_megatron.types import Completion, Span
from tests.engines.benches import RETURN_ROUTES, Bench, ServedBench, logits_of, logprobs_of, request, routes_of, served
from tests.engines.conftest import needs

PROMPTS = [[(7 * i + j) % 256 for j in range(4 + 9 * i)] for i in range(6)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_of_the_weights_pushed_last(bench: Bench, models: tuple[Path, Path], temperature: float) -> None:
    requests = [request(prompt, n=3, temperature=temperature) for prompt in PROMPTS]
    for version, (folder, other) in enumerate([models, models[::-1], models], start=1):
        bench.push(folder, version)
        for asked, completions in zip(requests, bench.generate(*requests), strict=True):
            assert len(completions) == 3
            assert len({c.token_ids.tobytes() for c in completions}) > 1
            for c in completions:
                mine = torch.tensor(c.logprobs)
                expected = logprobs_of(folder, asked.token_ids, c, temperature)
                torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0)
                assert (mine - logprobs_of(other, asked.token_ids, c, temperature)).abs().max() > 0.1
                assert (c.finish_reason, c.spans, len(c.token_ids)) == ("length", ((0, version),), 16)


def test_a_server_judges_a_text_as_a_teacher(server: ServedBench, models: tuple[Path, Path]) -> None:
    server.push(models[0], 1)
    text = [(5 * i * i + 3) % 256 for i in range(90)]
    (at,) = server.engine.servers
    for top in (0, 1, 7):
        said = server.run(server.engine.adapter.score_top(at, text, top))
        wanted = logits_of(models[0], text)[:-1].log_softmax(-1)
        own = wanted.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(said.logprobs), own, atol=1e-4, rtol=0)
        best = wanted.topk(top)
        assert said.top_ids.tolist() == best.indices.tolist()
        torch.testing.assert_close(torch.from_numpy(said.top_logprobs), best.values, atol=1e-4, rtol=0)


def test_routes_are_transformers_of_every_position_once(bench: Bench, models: tuple[Path, Path]) -> None:
    bench.push(models[0], 1)
    requests = [
        replace(request(prompt, n=3, stop_token_ids=tuple(range(0, 259, 12))), columns=("routes",))
        for prompt in PROMPTS
    ]
    if bench.name not in RETURN_ROUTES:
        with pytest.raises(EngineError, match="it returned no routes; start it with --enable-return-routed-experts"):
            bench.generate(requests[0])
        return
    assert [c.columns for c in bench.generate(replace(requests[0], columns=()))[0]] == [{}] * 3
    for version, folder in enumerate(models, start=2):
        bench.push(folder, version)
        for asked, completions in zip(requests, bench.generate(*requests), strict=True):
            for c in completions:
                found = torch.tensor(c.columns["routes"]).sort(-1).values
                assert found.tolist() == routes_of(folder, (*asked.token_ids, *c.token_ids)[:-1]).tolist()


@pytest.mark.parametrize("pushed", [False, True])
def test_rows_of_two_turns_have_the_routes_that_computed_each_position_first(
    bench: Bench, models: tuple[Path, Path], pushed: bool
) -> None:
    """The second turn finds the first in the cache, or a push came between. A branch has its own request's routes."""
    if bench.name not in RETURN_ROUTES:
        return
    rows, old, new = TokenRows(), models[0], models[int(pushed)]
    bench.push(old, 1)

    def ask(prompt: Sequence[int]) -> list[int]:
        ((turn,),) = bench.generate(replace(request(prompt), columns=("routes",)))
        rows.add(np.array(prompt, np.int32), turn, "")
        return [*prompt, *turn.token_ids.tolist()]

    first = ask(PROMPTS[3])
    if pushed:
        bench.push(new, 2)
    ask([*first, 5, 6, 7])
    ask([*first[:-4], 8, 9])
    row, branch = rows.chains()
    for chain, cut in ((row, len(first) - 1), (branch, 0)):
        found = torch.tensor(chain.columns["routes"]).sort(-1).values
        of_old, wanted = (routes_of(folder, chain.token_ids[:-1].tolist()) for folder in (old, new))
        wanted[:cut] = of_old[:cut]
        assert found.shape == wanted.shape
        assert (found == wanted).double().mean() > 0.99  # a near tie may fall otherwise
        assert (found.roll(1, 0) == wanted).double().mean() < 0.8


def test_logprobs_under_top_p_are_of_the_nucleus(bench: Bench, models: tuple[Path, Path]) -> None:
    bench.push(models[0], 1)
    asked = request(n=4, top_p=0.5)
    if not bench.renormalizes_top_p:
        with pytest.raises(EngineError, match="top_p=1"):
            bench.generate(asked)
        return
    for c in bench.generate(asked)[0]:
        logits = logits_of(models[0], [*asked.token_ids, *c.token_ids])[len(asked.token_ids) - 1 : -1]
        ordered, ids = logits.softmax(-1).sort(dim=-1, descending=True)
        inside = ordered.cumsum(-1) - ordered < 0.5
        mass = (ordered * inside).sum(-1)
        rank = (ids == torch.tensor(c.token_ids)[:, None]).int().argmax(-1)
        assert inside.gather(1, rank[:, None]).all()
        expected = (ordered.gather(1, rank[:, None])[:, 0] / mass).log()
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_logprobs_are_over_the_tokens_that_sampling_kept(bench: Bench, models: tuple[Path, Path]) -> None:
    """Over what top_k and top_p leave; vLLM's first model runner returns no masks (rollout.sampling_masks)."""
    bench.push(models[0], 1)
    asked = replace(request(n=4, top_p=0.5, top_k=40), columns=("kept",))
    if bench.name == "vllm":
        return
    for c in bench.generate(asked)[0]:
        logits = logits_of(models[0], [*asked.token_ids, *c.token_ids])[len(asked.token_ids) - 1 : -1]
        kept = c.columns["kept"]
        assert len(kept) == len(c.token_ids)
        for at, (row, token) in enumerate(zip(logits, c.token_ids.tolist(), strict=True)):
            own = kept[at : at + 1].values.tolist()  # type: ignore[union-attr]
            assert 1 < len(own) <= 40
            assert set(own) == set(row.topk(len(own)).indices.tolist())
            assert c.logprobs[at] == pytest.approx(float(row[token] - row[own].logsumexp(0)), abs=1e-4)


@pytest.mark.parametrize("limit", ["top_p", "top_k", "min_p"])
def test_evaluations_draw_from_what_a_limit_leaves(bench: Bench, models: tuple[Path, Path], limit: str) -> None:
    bench.push(models[0], 1)
    value = {"top_p": 0.5, "top_k": 2, "min_p": 0.5}[limit]
    asked, firsts = replace(request(n=4, **{limit: value}), exact_logprobs=False), 0
    for c in bench.generate(asked)[0]:
        logits = logits_of(models[0], [*asked.token_ids, *c.token_ids])[len(asked.token_ids) - 1 : -1]
        ordered, ids = logits.softmax(-1).sort(dim=-1, descending=True)
        rank = (ids == torch.tensor(c.token_ids)[:, None]).int().argmax(-1)[:, None]
        before, share = (ordered.cumsum(-1) - ordered).gather(1, rank), ordered.gather(1, rank) / ordered[:, :1]
        left = {"top_p": before < 0.501, "top_k": rank < 2, "min_p": share > 0.499}[limit]
        assert left.all()
        firsts += int((rank == 0).sum())
    assert firsts < 4 * 16  # and not the most likely alone


@pytest.mark.slow  # 60 s each
@pytest.mark.parametrize("engine", sorted(SERVERS))
def test_the_token_that_completes_a_stop_text_is_the_last(
    engine: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    needs(engine)
    decode = make_decoder(models[0])
    stop = (*"abcdefgh", "é", "<pad>")  # some half of the completions reach one, for vLLM samples without a seed
    with served(engine, models[0], tmp_path, routes=False, more=["rollout.stop=a"]) as server:
        server.push(models[0], 1)
        asked = [request(prompt, n=4, stop=stop) for prompt in PROMPTS]
        reasons = set()
        for one, completions in zip(asked, server.generate(*asked), strict=True):
            for c in completions:
                ids = c.token_ids.tolist()
                assert not any(text in decode(ids[:-1]) for text in stop)
                assert (c.finish_reason == "stop") == any(text in decode(ids) for text in stop)
                assert c.finish_reason == "stop" or len(ids) == 16
                expected = logprobs_of(models[0], one.token_ids, c, 1.0)
                torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
                reasons.add(c.finish_reason)
    assert reasons == {"stop", "length"}


def test_temperature_0_takes_the_most_likely(bench: Bench, models: tuple[Path, Path]) -> None:
    bench.push(models[1], 1)
    asked = request(n=2, temperature=0.0)
    for c in bench.generate(asked)[0]:
        logits = logits_of(models[1], [*asked.token_ids, *c.token_ids])[len(asked.token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(c.token_ids)


def test_a_stop_token_ends_a_completion_and_is_its_last(bench: Bench, models: tuple[Path, Path]) -> None:
    bench.push(models[0], 1)
    stops = tuple(range(0, 259, 12))
    completions = bench.generate(request(n=32, new=12, stop_token_ids=stops))[0]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        ended = c.token_ids[-1] in stops
        assert c.finish_reason == ("stop" if ended else "length")
        assert not set(stops) & set(c.token_ids[:-1])
        assert len(c.logprobs) == len(c.token_ids) == (12 if not ended else len(c.token_ids))


def test_no_completions_are_none(bench: Bench, models: tuple[Path, Path]) -> None:
    bench.push(models[0], 1)
    assert list(bench.generate(request(n=0))[0]) == []


@pytest.mark.parametrize("bad", [request([9999]), request(range(100), new=2000)], ids=["token id", "length"])
def test_what_cannot_be_served_is_refused_by_its_id(bench: Bench, models: tuple[Path, Path], bad: object) -> None:
    bench.push(models[0], 1)
    with pytest.raises(EngineError, match="'test'"):
        bench.generate(bad)  # type: ignore[arg-type]
    assert len(bench.generate(request())[0]) == 1


# The oracle of log-probs takes an engine's side of a near tie between experts, and of nothing else.
@torch.no_grad()
def outputs_of(model: Any, text: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Log-probs of a text's tokens after the 20th, and the router logits of each layer."""
    out = model(text[None], output_router_logits=True)
    return out.logits[0, 19:-1].log_softmax(-1).gather(1, text[20:, None])[:, 0], out.router_logits


@pytest.mark.parametrize(
    ("seed", "layer", "tokens", "rounding"), [(44, 0, [191], 1e-4), (232, 1, [139], 1e-4), (307, 0, [84, 336], 2e-4)]
)
def test_near_ties_fall_as_the_engine_says(
    models: tuple[Path, Path], seed: int, layer: int, tokens: list[int], rounding: float
) -> None:
    """The texts have one, or two: 2e-7 to 2e-5 between the router's second and third logit. An engine's rounding is
    played by a router that multiplies one expert's logits by a little more than 1."""
    text = torch.randint(3, 259, (420,), generator=torch.Generator().manual_seed(seed))
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    plain, routers = outputs_of(model, text)
    best = routers[layer][tokens].topk(3)
    assert (best.values[:, 1] - best.values[:, 2] < 2e-5).all()
    (third,) = set(best.indices[:, 2].tolist())
    with torch.no_grad():
        model.model.layers[layer].mlp.gate.weight[third] *= 1 + rounding * best.values[0, 2].sign()
    said, routers = outputs_of(model, text)
    assert (routers[layer][tokens].topk(2).indices == third).any(1).all()
    assert (said - plain).abs().max() > 1e-3

    def gap(folder: Path, off: float = 0.0) -> float:
        """The largest distance from the oracle to what was said, whose last log-prob is ``off`` more."""
        told = said + off * (torch.arange(len(said)) == len(said) - 1)
        completion = Completion(
            token_ids=text[20:].numpy().astype(np.int32),
            logprobs=told.numpy(),
            finish_reason="length",
            spans=(Span(0, 1),),
        )
        return float((logprobs_of(folder, text[:20].tolist(), completion, 1.0) - told).abs().max())

    assert gap(models[0]) < 1e-4
    assert gap(models[0], off=1e-3) == pytest.approx(1e-3, rel=0.2)
    assert gap(models[1]) > 0.1
