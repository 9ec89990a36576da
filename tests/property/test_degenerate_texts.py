"""Work on a text that a model wrote is linear in its length, whatever is in it: a model may repeat a mark for ever.

Twice a text may take 2.6 times its processor time, from the length at which it takes 5 ms.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from itertools import product

import pytest

from rl_megatron.agents.conversation.messages import normalize_messages
from rl_megatron.agents.conversation.written import _marked, _parted
from rl_megatron.agents.parsers import PARSERS
from rl_megatron.environments.shipped import evaluated
from rl_megatron.rewards.math_verify_worker import _readable
from rl_megatron.rewards.rules import is_formula, last_number
from rl_megatron.rewards.symbols import mark_formulas, to_latex
from rl_megatron.rewards.tests import extract_code, same_output

FIRST, LAST = 1 << 10, 1 << 15  # characters
ENOUGH_SECONDS, MOST_TIMES = 0.005, 2.6
THINKING = ("<think>", "</think>", "\n")
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', *THINKING),
    "llama3_json": ("<|python_tag|>", '{"name": "a", "parameters": {}}', "{", "}", '"', ";", " "),
    "deepseek": ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n```json\n{}\n```", *THINKING),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", " ", *THINKING),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "to=a", "analysis", "{}", " "),
}
AROUND = {  # what makes a parser read the marks as those of a call
    "hermes": (("", ""), ("<tool_call>", "</tool_call>")),
    "llama3_json": (("", ""), ('<|python_tag|>{"name": "a", "parameters": {"b": "', '"}}')),
    "deepseek": (
        ("<｜tool▁calls▁begin｜>", ""),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a", "<｜tool▁call▁end｜>"),
    ),
    "glm": (
        ("<tool_call>a", "</tool_call>"),
        ("<tool_call>a<arg_key>b</arg_key><arg_value>", "</arg_value></tool_call>"),
    ),
    "harmony": (("", ""), ("<|channel|>commentary to=functions.a<|message|>", "<|call|>")),
}
PIECES = (
    *(
        " ",
        "\t",
        "\n",
        "\n ",
        "{",
        "[",
        '{"a":',
        "}",
        '"',
        "'",
        "\\",
        '\\"',
        "\\u",
        "`",
        "```",
        "```\n",
        "\n```",
        "~~~\n",
    ),
    *("1", "1,", "1,111", ",111", "1.", ".1", "1/", "-", "$-", "1e", "1e9", "9**", "(", "2*(", "a", "é", "\r\n"),
    *(
        "\\boxed{",
        "\\frac{1}",
        "$",
        "^{9",
        "\\(",
        "####",
        "answer A ",
        "7 (as ",
        "answer: 7 since ",
        "√(",
        "√((a)",
        "2√3 ",
        "2 1/2 ",
        "\\sqrt{3}",
        "½",
        "10²",
        "×10⁸",
        "1.0̅",
        "</think>",
        "```python\n",
        "\n    ",
        "<",
        "&",
    ),
)


def message_of(text: str) -> None:
    call = {"function": {"name": "a", "arguments": text}}
    (message,) = normalize_messages([{"role": "assistant", "content": text, "tool_calls": [call]}])
    _parted(text, _marked(message, False))


def calculated(text: str) -> None:
    with contextlib.suppress(ValueError):
        evaluated(text)


READERS: dict[str, Callable[[str], object]] = {
    "code": extract_code,
    "output": lambda text: same_output(text, f"{text} 1"),
    "number": last_number,
    "formula": is_formula,
    "math": lambda text: _readable(text, "A"),
    "symbols": lambda text: mark_formulas(to_latex(text)),
    "message": message_of,
    "calculator": calculated,
    **{f"parser {name}": parser for name, parser in PARSERS.items()},
}


def seconds(read: Callable[[str], object], text: str) -> float:
    begun = time.thread_time()
    read(text)
    return time.thread_time() - begun


def times_of_double(read: Callable[[str], object], text: Callable[[int], str]) -> float:
    """How many times the processor time twice a text takes, at best of six."""
    length = FIRST
    while seconds(read, text(length)) < ENOUGH_SECONDS:
        length *= 2
        if length > LAST:
            return 0.0
    best = 9.0
    for _ in range(6):
        best = min(best, seconds(read, text(2 * length)) / seconds(read, text(length)))
        if best <= MOST_TIMES:
            break
    return best


def check(read: Callable[[str], object], texts: dict[str, Callable[[int], str]]) -> None:
    assert not {name: times for name, text in texts.items() if (times := times_of_double(read, text)) > MOST_TIMES}


def again(unit: str, front: str = "", end: str = "") -> Callable[[int], str]:
    return lambda length: front + unit * (length // len(unit)) + end


def one_then_other(one: str, other: str, front: str, end: str) -> Callable[[int], str]:
    return lambda length: front + one * (length // len(one) // 2) + other * (length // len(other) // 2) + end


@pytest.mark.parametrize("name", READERS)
def test_a_piece_again_and_again(name: str) -> None:
    check(READERS[name], {piece: again(piece, end="x") for piece in PIECES})


@pytest.mark.parametrize("name", PARSERS)
def test_two_marks_in_turn_and_one_after_the_other(name: str) -> None:
    pairs = [(pair, around) for pair in product(MARKS[name], repeat=2) for around in AROUND[name]]
    check(PARSERS[name], {f"{pair} {around}": again("".join(pair), *around) for pair, around in pairs})
    check(PARSERS[name], {f"{pair} {around}": one_then_other(*pair, *around) for pair, around in pairs})
