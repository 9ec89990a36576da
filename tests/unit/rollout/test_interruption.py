"""Thinking that is too long is ended by a text, over a real engine; log-probs against transformers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import InterruptSection, RolloutSection
from rl_megatron.data.samples import to_samples
from rl_megatron.errors import ConfigError
from rl_megatron.rewards.threads import Plain
from rl_megatron.rollout.interruption import Interruption
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.rollout.policy_sampler import HeldOut
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.training.group_job import interrupted_row
from rl_megatron.types import Completion, GenerationRequest, Prompt, RolloutGroup
from tests.completions import completion, drawn

MakeEngine = Callable[[int], LocalEngine]
PROMPTS = [Prompt(id=f"p{i}", text="", token_ids=(3 + i, 5), answer="") for i in range(5)]
TEXT, ENDS = (39, 40, 38), (37, 36)


class AsyncEngine:
    """The in-process engine behind the RolloutEngine Protocol, which goes on from what has ended alone."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.asked.append(request)
        await asyncio.sleep(0)
        if request.begun is not None and len(request.begun.token_ids) >= request.params.max_new_tokens:
            return [request.begun]
        return self._engine.generate([request])[0]


def text(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def sampler(engine: LocalEngine, interrupt: dict[str, Any] | None, **options: Any) -> RolloutSampler:
    section = InterruptSection.model_validate({"thinking_ends": "none", **(interrupt or {"earliest": 1})})
    of = Interruption(section=section, token_ids=np.array(TEXT, np.int32), ends=np.array(ENDS, np.int32), decode=text)
    return RolloutSampler(
        engine=AsyncEngine(engine),
        reward_function=Plain(lambda prompt, completions, texts: [float(len(one.split())) for one in texts]),
        decode=text,
        rollout=RolloutSection(group_size=4, max_new_tokens=14),
        reward=RewardSection(),
        stop_token_ids=(7, 8, 9),
        seed=0,
        interruption=None if interrupt is None else of,
        **options,
    )


def groups(ours: RolloutSampler) -> list[RolloutGroup]:
    return [one.group for one in asyncio.run(ours.groups(drawn(PROMPTS, 3))) if one.group is not None]


@pytest.mark.parametrize("apart", [False, True])
def test_a_text_follows_where_thinking_goes_on_and_only_what_was_sampled_is_trained_on(
    theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine, apart: bool
) -> None:
    """Up to its place a completion is the one that nobody interrupts."""
    engine = make_engine(8)
    found, free = (groups(sampler(engine, each, apart=apart)) for each in ({"earliest": 5}, None))
    interrupted = 0
    for group, other in zip(found, free, strict=True):
        samples = to_samples([group])
        for number, (one, alone) in enumerate(zip(group.trajectories, other.trajectories, strict=True)):
            (chain,), (sampled,) = one.chains, (alone.chains[0].token_ids[2:].tolist(),)
            tokens = chain.token_ids[2:].tolist()
            assert tokens[:5] == sampled[:5]
            assert one.reward == len(tokens) <= 14
            if len(sampled) <= 5 and alone.stop == "done":
                assert tokens == sampled
                continue
            interrupted += 1
            assert tuple(tokens[5:8]) == TEXT
            assert [(turn.start, turn.stop) for turn in one.turns] == [(2, 7), (10, 2 + len(tokens))]
            assert [turn.text for turn in one.turns] == [text(tokens[:5]), text(tokens[8:])]
            assert all([span[0] for span in turn.spans] == [0] for turn in one.turns)
            with torch.no_grad():
                logits = theirs(torch.tensor([chain.token_ids.tolist()])).logits[0].double().log_softmax(-1)
            for turn in one.turns:
                places = range(turn.start, turn.stop)
                wanted = [float(logits[at - 1, chain.token_ids[at]]) for at in places]
                assert turn.logprobs.tolist() == pytest.approx(wanted, abs=1e-4)
            row = slice(*samples.cu_seqlens[number : number + 2].tolist())
            trained = [at + 1 for at, on in enumerate(samples.mask[row].tolist()) if on]
            assert trained == [*range(2, 7), *range(10, 2 + len(tokens))]
    assert 5 < interrupted < 20
    every = [one for group in found for one in group.trajectories]
    section = RolloutSection(max_new_tokens=14, interrupt=InterruptSection(earliest=5))
    assert interrupted_row(every, section) == {"response/interrupted_fraction": pytest.approx(interrupted / 20)}
    assert interrupted_row(every, RolloutSection()) == {}


def test_a_completion_whose_thinking_has_ended_goes_on_without_the_text(make_engine: MakeEngine) -> None:
    """Whether the end is in the text, or is a token that is not decoded."""
    engine = make_engine(8)
    first = groups(sampler(engine, {"earliest": 5}))[0].trajectories
    cut = next(one for one in first if len(one.turns) == 2)
    said = cut.chains[0].token_ids[2:7]
    for change in ({"section": InterruptSection(earliest=5, thinking_ends=text(said[1:4]))}, {"ends": said[3:5]}):
        ours = sampler(engine, {"earliest": 5})
        assert ours.interruption is not None
        ours = replace(ours, interruption=replace(ours.interruption, **change))
        found = [one for one in groups(ours)[0].trajectories if one.chains[0].token_ids[2:7].tolist() == said.tolist()]
        assert found
        for one in found:
            assert len(one.turns) == 1
            assert len(one.chains[0].token_ids) > 7


def test_long_texts_are_decoded_beside_the_event_loop_which_other_requests_need(make_engine: MakeEngine) -> None:
    seen = set[threading.Thread]()

    def decode(tokens: Sequence[int]) -> str:
        seen.add(threading.current_thread())
        return text(tokens)

    ours = sampler(make_engine(8), {"earliest": 5})
    assert ours.interruption is not None
    found = groups(replace(ours, interruption=replace(ours.interruption, decode=decode)))
    assert any(len(one.turns) == 2 for one in found[0].trajectories)
    assert seen
    assert threading.current_thread() not in seen


def test_an_end_of_thinking_without_tokens_of_its_own_is_looked_for_in_the_text_alone(make_engine: MakeEngine) -> None:
    ours = sampler(make_engine(8), {"earliest": 5})
    assert ours.interruption is not None
    nothing = replace(ours.interruption, ends=np.zeros(0, np.int32))
    assert any(len(one.turns) == 2 for one in groups(replace(ours, interruption=nothing))[0].trajectories)


def test_places_are_drawn_for_each_group_and_do_not_depend_on_how_it_is_asked_for(make_engine: MakeEngine) -> None:
    engine, seen = make_engine(8), []
    for apart in (False, True):
        found = groups(sampler(engine, {"earliest": 0.3, "latest": 9}, apart=apart))
        seen.append([{len(one.turns[0].logprobs) for one in g.trajectories if len(one.turns) == 2} for g in found])
    assert all(one == other for one, other in zip(*seen, strict=True) if one and other)
    assert all(sum(map(bool, places)) >= 4 for places in seen)
    drawn_places = [place for places in seen[0] for place in places]
    assert all(len(places) <= 1 for places in seen[0])
    assert len(set(drawn_places)) > 1
    assert all(4 <= place <= 9 for place in drawn_places)


def test_a_resume_goes_on_behind_the_text_from_what_a_checkpoint_has(make_engine: MakeEngine) -> None:
    """Of a completion that was at the text, or that had ended behind it."""
    engine = make_engine(8)
    whole = groups(sampler(engine, {"earliest": 5}, apart=True))
    ours = sampler(engine, {"earliest": 5}, apart=True)
    for kept in ("first part", "all"):
        known = []
        for one in whole[0].trajectories:
            (chain,) = one.chains
            logprobs = np.zeros(len(chain.token_ids) - 2, np.float32)
            for turn in one.turns:
                logprobs[turn.start - 2 : turn.stop - 2] = turn.logprobs
            count = 5 if kept == "first part" and len(one.turns) == 2 else len(logprobs)
            reason = "stop" if one.stop == "done" and count == len(logprobs) else "length"
            known.append(
                Completion(
                    token_ids=chain.token_ids[2 : 2 + count].copy(),
                    logprobs=logprobs[:count].copy(),
                    finish_reason=reason,
                    spans=one.turns[0].spans,
                )
            )
        known = [one if len(one.token_ids) in (5, 14) else None for one in known]  # that this engine can go on from
        assert any(known)
        (place,) = drawn(PROMPTS[:1], 3)
        (answered,) = asyncio.run(ours.groups([replace(place, begun=tuple(known))]))
        assert answered.group is not None
        for one, other in zip(answered.group.trajectories, whole[0].trajectories, strict=True):
            assert one.chains[0].token_ids.tolist() == other.chains[0].token_ids.tolist()
            assert [turn.start for turn in one.turns] == [turn.start for turn in other.turns]


def test_nothing_is_interrupted_where_no_token_would_follow_and_in_evaluations(make_engine: MakeEngine) -> None:
    engine = make_engine(8)
    late = groups(sampler(engine, {"earliest": 11}))
    assert all(len(one.turns) == 1 for group in late for one in group.trajectories)
    ours = sampler(engine, {"earliest": 5})
    held = asyncio.run(ours.held_out(HeldOut(prompts=PROMPTS, params=ours.params(temperature=1.0))))
    assert all(len(one.turns) == 1 for each in held if each.group for one in each.group.trajectories)


def test_a_demonstration_is_shown_whole_beside_completions_that_are_interrupted(make_engine: MakeEngine) -> None:
    def shown(prompt: Prompt) -> Completion:
        return completion([*range(20, 31), 7], [0.0] * 12, spans=())

    ours = sampler(make_engine(8), {"earliest": 5})
    plain, beside = groups(ours), groups(replace(ours, demonstrate=shown))
    assert any(len(one.turns) == 2 for group in plain for one in group.trajectories)
    for alone, group in zip(plain, beside, strict=True):
        assert [one.turns[-1].text for one in group.trajectories] == [one.turns[-1].text for one in alone.trajectories]
        assert group.demonstration is not None
        ((row,),) = (one.chains for one in group.demonstration.trajectories)
        assert [(turn.start, turn.stop) for turn in row.turns] == [(2, 14)]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["rollout.interrupt.latest=9"], "^rollout.interrupt.latest does nothing without earliest"),
        (["algorithm=scalerl", "rollout.interrupt.earliest=0"], "^rollout.interrupt.latest does nothing without earl"),
        (["rollout.interrupt.earliest=6"], "after 6 to 6 sampled tokens; make the first at most the second"),
        (["rollout.interrupt.earliest=4", "rollout.interrupt.latest=0.5"], "after 4 to 3 sampled tokens"),
        (["rollout.interrupt.earliest=0.5", "algorithm=dpo"], "with algorithm.preference.beta=0.1: only single compl"),
        (["rollout.interrupt.earliest=0.5", "train.route_flips=true"], "routes are of one request"),
    ],
)
def test_what_cannot_be_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)
