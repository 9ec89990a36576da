"""Chat templates of six families as their models publish them, tokenizers trained here, and turns as models write."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl_megatron.columns import TokenIds
from rl_megatron.types import Completion, Span

TEMPLATES = Path(__file__).parent / "templates"
CHATML = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
DEEPSEEK = (
    *("User", "Assistant", "begin▁of▁sentence", "end▁of▁sentence"),
    *(f"tool▁{what}▁{end}" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "one"}},
                "required": ["a"],
            },
        },
    }
]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's models write turns, behind the generation prompt."""

    template: str
    special: tuple[str, ...]
    stop: str  # ends an answer
    stop_of_calls: str
    thought: str | None = None  # a format of the reasoning; None: it is not written
    call: str = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    answer: str = "{content}"
    one_call: bool = False
    tools: Sequence[Mapping[str, Any]] = field(default_factory=lambda: TOOLS)  # empty: the template shows none
    options: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen3": Family(
        template="qwen3",
        special=CHATML,
        stop="<|im_end|>",
        stop_of_calls="<|im_end|>",
        thought="<think>\n{reasoning}\n</think>\n\n",
    ),
    "qwen3_without_thinking": Family(
        template="qwen3",
        special=CHATML,
        stop="<|im_end|>",
        stop_of_calls="<|im_end|>",
        options={"enable_thinking": False},
    ),
    "chatml": Family(template="qwen2_5", special=CHATML, stop="<|im_end|>", stop_of_calls="<|im_end|>"),
    "llama3": Family(
        template="llama3_1",
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        stop="<|eot_id|>",
        stop_of_calls="<|eot_id|>",
        call='{{"name": "{name}", "parameters": {arguments}}}',
        one_call=True,
    ),
    "glm": Family(
        template="glm4moe",
        special=(
            *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>"),
            *("</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        stop="<|user|>",
        stop_of_calls="<|observation|>",
        thought="\n<think>{reasoning}</think>\n",
        call="\n<tool_call>{name}\n<arg_key>a</arg_key>\n<arg_value>{arguments}</arg_value>\n</tool_call>",
    ),
    "deepseek": Family(
        template="deepseekv3",
        special=("<think>", "</think>", *(f"<｜{name}｜>" for name in DEEPSEEK), "<｜tool▁sep｜>"),
        stop="<｜end▁of▁sentence｜>",
        stop_of_calls="<｜end▁of▁sentence｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        tools=(),
    ),
    "gptoss": Family(
        template="gptoss",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>"),
        stop="<|return|>",
        stop_of_calls="<|call|>",
        thought="<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant",
        call=" to=functions.{name}<|channel|>commentary json<|message|>{arguments}",
        answer="<|channel|>final<|message|>{content}",
        one_call=True,
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,000 tokens, trained on the templates, with the family's special tokens."""
    family, tokenizer = FAMILIES[name], Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = (path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.jinja")))
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in family.special])
    template = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=family.special[0], chat_template=template)


def pieces(rng: random.Random, tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Tokens of the text that an encoder would not give: it is cut anywhere, and each piece is encoded alone."""
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(1 + len(text) // 4))})
    parts = (text[a:b] for a, b in pairwise(cuts))
    return [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model says in a turn: its parts, and how it ends."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()  # arguments
    cut: bool = False


def written(name: str, reply: Reply) -> tuple[str, str]:
    """The text that the family's model writes for it, and the stop token's."""
    family = FAMILIES[name]
    text = family.thought.format(reasoning=reply.reasoning) if family.thought and reply.reasoning else ""
    if not reply.calls:
        return text + family.answer.format(content=reply.content), family.stop
    if family.answer == "{content}":
        text += reply.content
    arguments = (json.dumps(one, ensure_ascii=False, separators=(",  ", " :")) for one in reply.calls)
    return text + "".join(family.call.format(name="add", arguments=one) for one in arguments), family.stop_of_calls


def message_of(name: str, reply: Reply) -> dict[str, Any]:
    """The message that a parser makes of it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning and FAMILIES[name].thought:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": "add", "arguments": json.dumps(one)}}
            for i, one in enumerate(reply.calls)
        ]
    return message


def completion_of(name: str, reply: Reply, rng: random.Random) -> Completion:
    """The tokens that an engine might sample for it, with random log-probs."""
    tokenizer = tokenizer_of(name)
    text, stop = written(name, reply)
    tokens = pieces(rng, tokenizer, text)
    if reply.cut:
        tokens = tokens[: rng.randrange(len(tokens) + 1)]
    else:
        tokens.append(tokenizer.convert_tokens_to_ids(stop))
    return completion(tokens, rng, cut=reply.cut)


def completion(tokens: Sequence[int], rng: random.Random, *, cut: bool = False) -> Completion:
    """An engine's answer of these tokens with random log-probs."""
    ids: TokenIds = np.array(tokens, np.int32)
    logprobs = np.array([-rng.random() for _ in tokens], np.float32)
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason="length" if cut else "stop", spans=(Span(0, 0),))
