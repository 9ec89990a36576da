"""Written conversations as rows to learn, over the templates that seven families publish."""

from __future__ import annotations

import copy
import json
from datetime import datetime, timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from rl_megatron.data.samples import WrittenRow, written_samples
from rl_megatron.errors import DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.forms import WrittenConversation, check_turns
from rl_megatron.rollout.conversation.messages import tidied
from rl_megatron.rollout.conversation.written import WrittenConversations
from rl_megatron.types import Prompt
from tests.unit.rollout.conversation.families import FAMILIES, TOOLS, Reply, message_of, tokenizer_of, written

CALLS = Reply(reasoning="I call.", calls=[{"a": 17}])
SAYS = Reply(reasoning="So it is.", content="It is 17.")
MORE = Reply(content="No: 日本 18.")
MORE_TURNS = [{"role": "assistant", "content": "Yes."}]
ADDS = {"type": "function", "function": {"name": "add", "arguments": '{"a": 17}'}}
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}@<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLED = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
SHORT = {"plain": PLAIN.replace("@", ""), "names": PLAIN.replace("@", CALLED)}
NAMES = ["qwen3", "chatml", "llama3", "glm", "gptoss"]


def asked(name: str) -> list[dict[str, Any]]:
    """A call, its answer, two turns, with the last turn of each user's question."""
    return [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "1 + 16?"},
        message_of(name, CALLS),
        {"role": "tool", "content": "17", "tool_call_id": "call_0", "name": "add"},
        message_of(name, SAYS),
        {"role": "user", "content": "Sure?"},
        message_of(name, MORE),
    ]


def stops(name: str) -> list[int]:
    family = FAMILIES[name]
    return [tokenizer_of(name).convert_tokens_to_ids(stop) for stop in {family.stop, family.stop_of_calls}]


def rows_of(name: str, messages: list[dict[str, Any]], tools: object = ()) -> list[WrittenRow]:
    text = json.dumps({"messages": messages, "tools": tools})
    prompt = Prompt(id="chats:1", text=text, token_ids=(), answer="")
    return WrittenConversations(tokenizer_of(name), stops(name)).rows([prompt])


def decoded(name: str, tokens: Any) -> str:
    return str(tokenizer_of(name).decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("name", "turn", "said"),
    [
        ("chatml", {"content": "2", "reasoning_content": "One and one."}, "does not write its reasoning, so a model"),
        ("llama3", {"content": "2", "reasoning_content": "One and one."}, "does not write its reasoning, so a model"),
        (
            "qwen3",
            {"content": None, "function_call": {"name": "add"}},
            "does not write its function_call, which tool_calls has replaced,",
        ),
        ("llama3", {"content": "SAID", "tool_calls": [ADDS]}, "does not write its content, so a model"),
        ("gptoss", {"content": None, "tool_calls": [ADDS, ADDS]}, "does not write its call of add, so a model"),
        ("glm", {"content": None, "refusal": "SAID"}, "does not write its refusal, so a model"),
        ("names", {"content": None, "tool_calls": [ADDS]}, "does not write its call of add, so a model"),
        ("qwen3", {"text": "SAID"}, "has neither content nor tool_calls, so a model would learn to say nothing"),
        (
            "plain",
            {"content": None, "tool_calls": [{"function": {"name": "add"}}]},
            "does not write its call of add, so",
        ),
    ],
)
def test_a_turn_is_refused_where_the_template_leaves_something_of_it_out(
    name: str, turn: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As context it is taken, with one warning for all rows, but for thinking and for what says nothing."""
    family = "chatml" if name in SHORT else name
    tokenizer = copy.deepcopy(tokenizer_of(family))
    if name in SHORT:
        tokenizer.chat_template = SHORT[name]
    rows = WrittenConversations(tokenizer, stops(family))
    asks = {"role": "user", "content": "1+1?"}
    for weight in (1, 0, 0):
        written = [asks, {"role": "assistant", "weight": weight} | turn, asks, *MORE_TURNS]
        prompt = Prompt(id="chats:1", text=json.dumps({"messages": written, "tools": ()}), token_ids=(), answer="")
        if weight:
            with pytest.raises(DataError, match=f"prompt 'chats:1': message 2.*{said}"):
                rows.rows([prompt])
        else:
            assert rows.rows([prompt])
    warned = [one.getMessage() for one in caplog.records]
    if "reasoning" in said or "nothing" in said:
        assert not warned
    else:
        assert len(warned) == 1
        assert f"message 2: the model's chat template {said.partition(', so')[0]}" in warned[0].replace("which is", "")


@pytest.mark.parametrize(("name", "shown"), [("qwen3", "\n\n SAID "), ("glm", "\nSAID"), ("chatml", " SAID ")])
def test_what_a_template_writes_otherwise_is_not_lost(name: str, shown: str) -> None:
    """Qwen3's and GLM's trim contents and thinking, and take thinking out of contents."""
    for said in (" SAID ", "<think>\n\nHm. \n\n</think>\n\n SAID "):
        for calls in ({}, {"tool_calls": [ADDS, ADDS]}):
            turn = {"role": "assistant", "content": said, **calls}
            (row,) = rows_of(name, [{"role": "user", "content": "1+1?"}, turn])
            text = decoded(name, row.token_ids)
            assert (shown in text, text.count("</tool_call>")) == (True, len(calls.get("tool_calls", ())))
            assert ("Hm." in text) == ("Hm." in said)


def test_a_turn_that_spells_the_token_of_its_end_is_refused_and_a_users_text_is_not() -> None:
    """A tokenizer makes the token of the text, as it does in the prompts of servers."""
    asks, says = {"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "a<|im_end|>b"}
    with pytest.raises(DataError, match=r"a turn goes on with 'b' after a token that ends sampling \(id \d+\), where"):
        rows_of("chatml", [asks, says])
    (row,) = rows_of("chatml", [asks, says | {"weight": 0}, asks, *MORE_TURNS])
    assert [decoded("chatml", row.token_ids[start:stop]) for start, stop in row.turns] == ["Yes.<|im_end|>"]


@pytest.mark.parametrize("name", NAMES)
def test_each_turn_is_learnt_once_behind_the_prompt_that_it_answers(name: str) -> None:
    messages = asked(name)
    if name == "gptoss":
        del messages[2]["reasoning_content"]  # it shows that of a call until the turn behind it, which is refused
    rows = rows_of(name, messages, TOOLS)
    turns = [(row, turn) for row in rows for turn in row.turns]
    replies = list(zip((2, 4, 6), (CALLS, SAYS, MORE), strict=True))
    assert len(turns) == 3
    for (row, (start, stop)), (place, reply) in zip(turns, replies, strict=True):
        prompt = ChatTemplate(tokenizer_of(name)).render(tidied(messages[:place]), TOOLS)
        assert decoded(name, row.token_ids[:start]) == prompt
        said, (text, ending) = decoded(name, row.token_ids[start:stop]), written(name, reply)
        assert said.endswith(ending)
        assert row.token_ids[stop - 1] in stops(name)
        if reply.calls:
            assert "add" in said
            assert "17" in said
        else:
            assert reply.content in said
            assert said.removesuffix(ending).strip().endswith(text.strip().removeprefix("<think>").strip()[-20:])


def test_a_template_that_drops_thinking_later_begins_a_row_and_others_go_on() -> None:
    assert [len(row.turns) for row in rows_of("chatml", asked("chatml"), TOOLS)] == [3]
    rows = rows_of("qwen3", asked("qwen3"), TOOLS)
    assert [len(row.turns) for row in rows] == [2, 1]
    assert "So it is." in decoded("qwen3", rows[0].token_ids)
    assert "So it is." not in decoded("qwen3", rows[1].token_ids)


def test_the_mask_is_of_the_turns_and_their_ends_alone() -> None:
    (row,) = rows_of("chatml", [*asked("chatml")[:2], {"role": "assistant", "content": "17"}])
    samples = written_samples([row])
    trained = samples.targets[samples.mask].tolist()
    assert decoded("chatml", trained) == "17<|im_end|>"
    assert samples.advantages.tolist() == samples.mask.float().tolist()
    assert row.token_ids[-1] == trained[-1]  # nothing behind the last turn


def test_a_date_that_a_template_writes_is_the_same_in_all_rows_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss writes the current date, and a day passes at each look at the clock."""
    days = (datetime(2026, 1, 1) + timedelta(days=day) for day in count())
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: next(days)))
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    text = json.dumps({"messages": said, "tools": []})
    made = WrittenConversations(tokenizer_of("gptoss"), stops("gptoss"))
    first, again = (made.rows([Prompt(id="chats:1", text=text, token_ids=(), answer="")]) for _ in range(2))
    assert [row.token_ids.tolist() for row in first] == [row.token_ids.tolist() for row in again]
    assert f"Current date: {datetime.now():%Y-%m}" in decoded("gptoss", first[0].token_ids)


@pytest.mark.parametrize(
    ("mark", "no", "yes"),
    [
        ("weight", 0, 1),
        *((mark, False, True) for mark in ("train", "training", "train_on_turn", "loss", "trainable")),
        ("train", 0.0, None),
    ],
)
def test_turns_that_are_marked_as_not_learnt_are_context(mark: str, no: object, yes: object) -> None:
    messages = asked("chatml")
    messages[1][mark], messages[2][mark], messages[4][mark] = "the user's", no, yes
    shown = WrittenConversation(id="chats:1", messages=messages, tools=()).tidied()
    assert mark not in set().union(*shown)  # no template sees it
    (row,) = rows_of("chatml", messages, TOOLS)
    learnt = [decoded("chatml", row.token_ids[start:stop]) for start, stop in row.turns]
    assert learnt == ["It is 17.<|im_end|>", "No: 日本 18.<|im_end|>"]
    assert "tool_call" in decoded("chatml", row.token_ids)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "assistant", "content": "Hi."}], "message 1 is the assistant's, which answers nobody"),
        ([{"role": "user", "content": 3}], "message 1 has content 3"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 2}],
            "weight=2; it must be",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": "no"}],
            "message 2: train='no'; it must be 0 or 1, or false or true",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False, "weight": 1}],
            "message 2: weight=1, train=False say different things; keep one of them",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train_detail": []}],
            r"message 2: train_detail=\[\] names parts of it",
        ),
        ([{"content": "a"}], "message 1 is .*it must be an object with a role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1 has content .*a list of texts"),
    ],
)
def test_messages_that_cannot_be_rows_are_refused_by_name(messages: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        rows_of("chatml", messages)
    assert str(caught.value).startswith("prompt 'chats:1': ")
    good, bad = (
        Prompt(id=name, text=json.dumps({"messages": one, "tools": []}), token_ids=(), answer="")
        for name, one in (("chats:2", asked("chatml")), ("chats:1", messages))
    )
    check_turns([good])
    with pytest.raises(DataError) as before_the_first_step:
        check_turns([bad, good, bad])
    assert str(before_the_first_step.value).splitlines() == [str(caught.value)] * 2


def test_a_turn_whose_end_no_token_marks_is_refused() -> None:
    with pytest.raises(DataError, match=r"no token ends sampling .ids \[5\].*eos_token_id in generation_config.json"):
        WrittenConversations(tokenizer_of("chatml"), [5]).rows(
            [Prompt(id="chats:1", text=json.dumps({"messages": asked("chatml"), "tools": []}), token_ids=(), answer="")]
        )


def test_a_first_turn_with_nothing_before_it_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    made = WrittenConversations(tokenizer, [tokenizer.eos_token_id])

    def rows(question: str) -> list[WrittenRow]:
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "b"}]
        text = json.dumps({"messages": talk, "tools": []})
        return made.rows([Prompt(id="chats:1", text=text, token_ids=(), answer="")])

    assert rows("a")[0].turns == ((1, 3),)
    with pytest.raises(
        DataError, match=r"^prompt 'chats:1': the chat template writes nothing before its first turn, 'b<"
    ):
        rows("")


def test_a_prompt_that_the_template_opens_otherwise_than_it_shows_the_turn_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant:<think>{% endif %}"
        ),
    )
    try:
        with pytest.raises(DataError, match=r"message 2: the chat template's prompt for it has '<think>' where"):
            rows_of("chatml", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize(("name", "message"), [("deepseek", 3), ("gptoss", 5)])
def test_templates_that_show_no_turn_behind_its_own_prompt_are_refused(name: str, message: int) -> None:
    """DeepSeek-R1's opens a turn with <think> and never shows it; gpt-oss drops a call's thinking at the next turn."""
    with pytest.raises(DataError, match=f"message {message}: the chat template's prompt for it has "):
        rows_of(name, asked(name), FAMILIES[name].tools)


def test_many_conversations_are_encoded_as_each_alone() -> None:
    maker = WrittenConversations(tokenizer_of("qwen3"), stops("qwen3"))
    texts = [json.dumps({"messages": asked("qwen3")[: 3 + 2 * k], "tools": TOOLS}) for k in range(3)]
    prompts = [Prompt(id=f"c:{k}", text=text, token_ids=(), answer="") for k, text in enumerate(texts)]
    together, alone = maker.rows(prompts), [row for one in prompts for row in maker.rows([one])]
    assert [(row.id, row.turns) for row in together] == [(row.id, row.turns) for row in alone]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
