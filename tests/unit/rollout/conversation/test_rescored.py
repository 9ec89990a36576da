"""The rows of a conversation with a real engine, scored again by transformers' forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_megatron.data.samples import to_samples
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.conversation import Conversation
from rl_megatron.rollout.conversation.templates import PlainText
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.types import Chain, GenerationRequest, Prompt, RolloutGroup, SamplingParams, Trajectory
from rl_megatron.weights.layouts.families import read_shape


def rescored(model: Any, chains: tuple[Chain, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's log-probs of all masked-in targets, and the model's."""
    prompt = Prompt(id="p", text="", token_ids=(1,), answer="")
    trajectory = Trajectory(chains=chains, reward=0.0)
    samples = to_samples([RolloutGroup(prompt=prompt, trajectories=(trajectory,))])
    parts = []
    for first, stop in zip(samples.cu_seqlens.tolist(), samples.cu_seqlens.tolist()[1:], strict=False):
        with torch.no_grad():
            logits = model(samples.input_ids[None, first:stop]).logits[0]
        parts.append(logits.log_softmax(-1).gather(1, samples.targets[first:stop, None])[:, 0])
    return samples.rollout_logprobs[samples.mask], torch.cat(parts)[samples.mask]


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_a_forward_of_the_rows_gives_the_engines_logprobs(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_model(TinySizes(), tmp_path, seed=3)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = LocalEngine(read_shape(folder), slots=4, dtype=torch.float32, device="cpu", max_length=256)
    checkpoint = load_file(folder / "model.safetensors")
    for name, tensor in engine.tensors.items():
        tensor.copy_(checkpoint[name])
    conversation = Conversation(PlainText(tokenizer) if kind == "plain" else ChatTemplate(tokenizer))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "37*45="}]
    params = SamplingParams(
        temperature=1.0, top_p=1.0, max_new_tokens=12, stop_token_ids=(tokenizer.eos_token_id, *b" etaoin"), seed=0
    )
    for number in range(5):
        asked = conversation.prompt_for(messages)
        request = GenerationRequest(
            id=str(number),
            token_ids=tuple(asked.token_ids.tolist()),
            num_completions=1,
            params=replace(params, seed=number),
        )
        ((completion,),) = engine.generate([request])
        said = {"role": "assistant", "content": tokenizer.decode(completion.token_ids, skip_special_tokens=True)}
        conversation.add(asked, completion, said)
        messages += [said, {"role": "tool", "content": f":{number} 日"}]
        if number == 2:
            messages = [{"role": "user", "content": "again: 37*45="}]
    chains = conversation.chains()
    assert [len(chain.turns) for chain in chains] == [3, 2]
    theirs, ours = rescored(model, chains)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    shifted = tuple(
        replace(chain, turns=tuple(replace(turn, start=turn.start - 1) for turn in chain.turns)) for chain in chains
    )
    theirs, ours = rescored(model, shifted)
    assert (theirs - ours).abs().max() > 0.1
