"""An engine that says what a script has it say, under the sampler of environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rl_megatron.agents.conversation.templates import PlainText, encode_text
from rl_megatron.agents.source import EnvironmentSampler
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.environments.registry import resolve_environment
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.stream import GroupResult
from rl_megatron.types import Completion, GenerationRequest, Trajectory
from tests.completions import completion

TOKENIZER, EOS = byte_tokenizer(), 257
Script = Callable[[str], str]


class Scripted:
    """Completes a text as ``script`` says; a reply of as many tokens as are allowed, or more, is cut."""

    def __init__(self, script: Script) -> None:
        self.script, self.asked = script, list[GenerationRequest]()
        self.sampled = dict[str, list[int]]()

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.asked.append(request)
        ids = [*self.script(bytes(token for token in request.token_ids if token != EOS).decode()).encode(), EOS]
        most = request.params.max_new_tokens
        self.sampled[request.id] = ids[:most]
        logprobs = np.linspace(-0.5, -0.1, len(ids[:most]), dtype=np.float32).tolist()
        return [completion(ids[:most], logprobs, finish="length" if len(ids) > most else "stop", spans=((0, 3),))]


def sampler(engine: Any, made: Any = None, *, group_size: int = 3, **section: Any) -> EnvironmentSampler:
    keys = EnvironmentSection(**{"function": "calculator", "min_turn_tokens": 4, **section})
    return EnvironmentSampler(
        engine=engine,
        factory=made or resolve_environment(keys),
        template=PlainText(TOKENIZER),
        encode=partial(encode_text, TOKENIZER),
        rollout=RolloutSection(group_size=group_size, max_new_tokens=12, max_prompt_tokens=40),
        section=keys,
        vocab_size=259,
        stop_token_ids=(EOS,),
        seed=0,
    )


def trajectories(found: Sequence[GroupResult]) -> list[Trajectory]:
    return [one for each in found if each.group is not None for one in each.group.trajectories]
