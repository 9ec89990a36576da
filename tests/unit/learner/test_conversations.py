"""Conversations with tools, by the templates of seven families: the Megatron learner scores a packed batch of their
rows as the embedded engine scored each turn behind its own prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from launcher.wire import Setup
from launcher.worker.models import RankModels
from rl_megatron.agents.conversation.conversation import Conversation
from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.columns import TokenIds
from rl_megatron.config.io import load_config
from rl_megatron.data.samples import to_samples
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.interfaces import ForwardPass
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import Completion, ParallelDims, Prompt, RolloutGroup, TokenSequence, Trajectory
from rl_megatron.weights.layouts.families import read_shape
from tests.samples import share_of
from tests.unit.rollout.conversation.families import FAMILIES, Reply, completion_of, message_of, tokenizer_of

REPLIES = (
    Reply(reasoning="I call.", calls=[{"a": 1}]),
    Reply(reasoning="Again.", calls=[{"a": -20, "b": "日"}]),
    Reply(reasoning="I say.", content=" It is so. "),
    Reply(reasoning="Now what?", calls=[{"a": 3}]),
    Reply(content="Three."),
    Reply(content="It is thr", cut=True),
)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TinySizes(), tmp_path_factory.mktemp("models"), seed=3, vocab_size=1152)


@pytest.fixture(scope="module")
def engine(hf: Path) -> LocalEngine:
    made = LocalEngine(read_shape(hf), slots=1, dtype=torch.float32, device="cpu", max_length=1024)
    checkpoint = load_file(hf / "model.safetensors")
    for name, tensor in made.tensors.items():
        tensor.copy_(checkpoint[name])
    return made


@pytest.fixture(scope="module")
def learner(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankModels]:
    folder, threads = tmp_path_factory.mktemp("run"), torch.get_num_threads()
    config = load_config("tiny_cpu", [f"model.path={hf}", "learner.ep=1"])
    rendezvous = f"file://{folder}/rendezvous"
    setup = Setup(config=config, model_folder=hf, run_folder=folder, rendezvous=rendezvous, role="learner")
    rank = RankModels(setup, 0, None)
    rank.load_weights("policy", hf)
    yield rank
    rank.close()
    torch.set_num_threads(threads)


def scored(engine: LocalEngine, prompt: TokenIds, completion: Completion) -> Completion:
    """The completion with the engine's log-probs of its tokens."""
    text = torch.tensor([[*prompt.tolist(), *completion.token_ids.tolist()]])
    own = engine.model.logits(text)[0, :-1].log_softmax(-1).gather(1, text[0, 1:, None])[:, 0]
    return replace(completion, logprobs=own[len(prompt) - 1 :].detach().numpy())


def played(name: str, engine: LocalEngine, thinking: Any) -> tuple[TokenSequence, ...]:
    """The rows of a conversation in which tools answer calls, and a user all else; prompts show them if they can."""
    rng = random.Random(name)
    template = ChatTemplate(tokenizer_of(name), thinking=thinking, options=FAMILIES[name].options)
    conversation, turns = Conversation(template), 0
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for reply in REPLIES:
        asked = conversation.prompt_for(messages, FAMILIES[name].tools)
        completion = completion_of(name, reply, rng)
        turns += len(completion.token_ids) > 0
        conversation.add(asked, scored(engine, asked.token_ids, completion), message_of(name, reply))
        messages.append(message_of(name, reply))
        messages.append({"role": "tool", "content": "1"} if reply.calls else {"role": "user", "content": "on"})
    assert sum(len(chain.turns) for chain in conversation.chains()) == turns >= 5
    return conversation.chains()


@pytest.mark.parametrize("thinking", ["template", "keep"])
def test_learner_and_engine_score_alike(thinking: str, engine: LocalEngine, learner: RankModels) -> None:
    groups = []
    for name in FAMILIES:
        prompt = Prompt(id=name, text="", token_ids=(1,), answer="")
        rows = Trajectory(chains=played(name, engine, thinking), reward=0.0)
        groups.append(RolloutGroup(prompt=prompt, trajectories=(rows,)))
    samples = to_samples(groups)
    share = share_of([samples], ParallelDims(), 0, to_score=True)
    ((found, _),) = learner.score([ForwardPass(role="policy", outputs=frozenset({"logprobs"}))], share)
    assert found is not None
    ours, engines = found["logprobs"][0][samples.mask], samples.rollout_logprobs[samples.mask]
    assert len(ours) > 400
    assert ours.std() > 0.1  # else any token would do
    torch.testing.assert_close(ours, engines, rtol=0, atol=1e-4)
