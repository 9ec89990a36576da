"""What stands before a row's messages or its question: TRL's and verl's prompts, and texts of the system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_megatron.config.sections.data import FileRunData
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.samples import Pair, WrittenRow
from rl_megatron.environments.protocol import Observed
from rl_megatron.errors import DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.pairs import paired_answers, paired_texts
from rl_megatron.rollout.conversation.written import WrittenConversations
from rl_megatron.types import Prompt

TOKENIZER = byte_tokenizer()
TOKENIZER.split_special_tokens = False
TOKENIZER.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
TOKENIZER.chat_template += "{% if add_generation_prompt %}assistant:{% endif %}"
SAYS = {"role": "system", "content": "Be brief."}
ASKS, ANSWERS, AGAIN = (
    {"role": role, "content": text} for role, text in (("user", "1?"), ("assistant", "2"), ("user", "3?"))
)
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))
TRL = {"prompt": [ASKS, ANSWERS, AGAIN], "chosen": [GOOD], "rejected": [BAD], "system": SAYS["content"]}


def written(path: Path, rows: tuple[dict[str, Any], ...]) -> Path:
    """The file with these rows."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def loaded(
    folder: Path,
    suffix: str,
    *rows: dict[str, Any],
    teacher: str | None = None,
    samples: bool = False,
    begun: bool = False,
    held_out: tuple[dict[str, Any], ...] = (),
    **keys: Any,
) -> list[Prompt]:
    """The prompts of a file of these rows, without those that are held out."""
    path = written(folder / f"train{suffix}", rows)
    held = written(folder / "held_out.jsonl", held_out) if held_out else path
    data = FileRunData(type="files", train=path, eval=held, **keys)
    form: dict[str, Any] = {"max_prompt_tokens": 999, "on_long_prompt": "fail", "samples": samples}
    form |= {"on_leak": "drop" if held_out else "keep", "begun_by_messages": ["data"] if begun else []}
    taught = {} if teacher is None else {"t": TeacherSection(prompt=teacher, max_prompt_tokens=999)}
    return load_prompts(data, TOKENIZER, seed=0, teachers=taught, **form)[0][:]


def conversations() -> WrittenConversations:
    return WrittenConversations(TOKENIZER, [TOKENIZER.eos_token_id])


def shown(rows: list[WrittenRow] | Pair) -> list[tuple[list[int], Any]]:
    return [(row.token_ids.tolist(), row.turns) for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("system", [SAYS["content"], "", None])
def test_a_completion_is_learnt_behind_its_prompts_messages_which_are_context(
    tmp_path: Path, suffix: str, system: str | None
) -> None:
    """As the one conversation with weights of 0 says it."""
    rows = {**TRL, "system": system}, {**TRL, "prompt": None, "chosen": [ASKS, GOOD]}
    apart = loaded(tmp_path, suffix, *rows, messages_field="chosen", context_field="prompt", system_field="system")
    first = [SAYS] if system else []
    wholes = ([*first, ASKS, {**ANSWERS, "weight": 0}, AGAIN, GOOD], [SAYS, ASKS, GOOD])
    whole = loaded(tmp_path, ".jsonl", *({"m": one} for one in wholes), messages_field="m")
    made = conversations()
    assert shown(made.rows(apart)) == shown(made.rows(whole))
    assert [len(row.turns) for row in made.rows(apart)] == [1, 1]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_pair_beside_its_prompt_is_that_of_two_whole_conversations(tmp_path: Path, suffix: str) -> None:
    keys = {"messages_field": "chosen", "rejected_field": "rejected"}
    apart = loaded(tmp_path, suffix, TRL, **keys, context_field="prompt", system_field="system")
    before = [SAYS, ASKS, ANSWERS, AGAIN]
    whole = loaded(tmp_path, ".jsonl", {"chosen": [*before, GOOD], "rejected": [*before, BAD]}, **keys)
    made = conversations()
    ((one,), (other,)) = paired_answers(apart, made), paired_answers(whole, made)
    assert shown(one) == shown(other)
    assert paired_texts(apart, made) == paired_texts(whole, made)
    assert whole[0].text.startswith('{"messages": [')  # of which checkpoints have digests
    assert [*json.loads(whole[0].text)] == ["messages", "tools", "rejected"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_text_of_the_system_is_in_front_of_the_users_turn_for_teachers_too(tmp_path: Path, suffix: str) -> None:
    rows = [{"q": "1?", "a": "2", "s": text} for text in ("Be brief.", "Be long.", None, " ")]
    keys = {"prompt_field": "q", "answer_field": "a", "system_field": "s", "chat_template": True}
    found = loaded(tmp_path, suffix, *rows, teacher="{answer}: {prompt}", **keys)

    def rendered(text: str, *first: dict[str, str]) -> str:
        chat = [*first, {"role": "user", "content": text}]
        return str(TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    says = [[SAYS], [{**SAYS, "content": "Be long."}], []]  # the last two are equal
    assert [one.text for one in found] == [rendered("1?", *first) for first in says]
    assert [TOKENIZER.decode(one.read_by["t"]) for one in found] == [rendered("2: 1?", *first) for first in says]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**TRL, "system": [1]}, r"field 'system' is \[1\]; a system's message is a text"),
        ({**TRL, "prompt": [SAYS, ASKS]}, "field 'system' has a text, and the messages begin with the system's; keep"),
        ({**TRL, "rejected": [*TRL["prompt"], BAD]}, "field 'rejected' begins with the messages of 'prompt', so they"),
        ({**TRL, "prompt": "1?"}, "field 'prompt' is '1[?]'; it must be a list of objects$"),
        ({**TRL, "prompt": "\n\nHuman: 1?"}, "field 'prompt' is .*; it must be a list of objects. Texts of sever"),
        ({key: TRL[key] for key in ("chosen", "rejected", "prompt")}, "no field 'system'; it has"),
        ({key: TRL[key] for key in ("chosen", "rejected", "system")}, "no field 'prompt'; it has"),
    ],
)
def test_what_is_no_context_is_refused_by_its_place(tmp_path: Path, suffix: str, row: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"train\{suffix}(:1)?: {said}"):
        loaded(
            tmp_path,
            suffix,
            row,
            messages_field="chosen",
            rejected_field="rejected",
            context_field="prompt",
            system_field="system",
        )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"context_field": "p"}, "context_field='p' does nothing without messages_field"),
        ({"system_field": "s"}, "system_field='s' does nothing without chat_template=true or messages_field"),
    ],
)
def test_a_field_that_nothing_reads_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FileRunData(type="files", train=Path("a"), eval=Path("b"), **keys)


CALLS = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
CHATS = [
    [ASKS],
    [SAYS, AGAIN],
    [SAYS, ASKS, ANSWERS, AGAIN],
    [ASKS, CALLS, {"role": "tool", "content": "1", "name": "f"}],
]
VERL = {"prompt_field": "prompt", "answer_field": "reward_model.ground_truth", "chat_template": True}


def of_verl(*chats: list[dict[str, Any]], answer: str = "4") -> tuple[dict[str, Any], ...]:
    """Rows with these prompts, as verl has them."""
    said = {"data_source": "s", "reward_model": {"style": "rule", "ground_truth": answer}}
    return tuple({**said, "prompt": chat, "extra_info": {"index": at}} for at, chat in enumerate(chats))


def by_transformers(chat: list[dict[str, Any]]) -> list[int]:
    return list(TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_prompt_of_messages_has_the_tokens_that_transformers_gives(tmp_path: Path, suffix: str) -> None:
    """A template or a teacher's prompt is around the last one's text; rewards find the messages in the row."""
    keys: dict[str, Any] = {**VERL, "samples": True, "prompt_template": "{prompt} Why?"}
    found = loaded(tmp_path, suffix, *of_verl(*CHATS), teacher="{answer}: {prompt}", **keys)
    ends = [chat[-1]["content"] for chat in CHATS]
    for prompt, chat, end in zip(found, CHATS, ends, strict=True):
        asked, taught = ([*chat[:-1], {**chat[-1], "content": text}] for text in (f"{end} Why?", f"4: {end}"))
        assert list(prompt.token_ids) == by_transformers(asked)
        assert list(prompt.read_by["t"]) == by_transformers(taught)
        assert (prompt.answer, prompt.meta["data_source"]) == ("4", "s")
        assert [one["role"] for one in prompt.meta["prompt"]] == [one["role"] for one in chat]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_environment_begins_with_the_messages_of_a_row_or_with_its_text(tmp_path: Path, suffix: str) -> None:
    keys: dict[str, Any] = {**VERL, "chat_template": False, "samples": True, "prompt_template": "{prompt} Why?"}
    found = loaded(tmp_path, suffix, *of_verl(*CHATS), **keys, begun=True)
    for prompt, chat in zip(found, CHATS, strict=True):
        last = {**chat[-1], "content": f"{chat[-1]['content']} Why?"}
        assert Observed(said=prompt.messages or prompt.text).messages == (*chat[:-1], last)
        assert prompt.text == last["content"]
    (text,) = loaded(tmp_path, suffix, {"prompt": "1?", "reward_model": {"ground_truth": "2"}}, **keys)
    assert (text.messages, text.text) == ((), "1? Why?")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_question_in_another_context_is_another_problem_which_may_be_held_out(tmp_path: Path, suffix: str) -> None:
    """What is held out is so with any system, as a text or as a message; other earlier turns ask another thing."""
    long = {"role": "system", "content": "Be long."}
    chats = [
        [AGAIN],
        [SAYS, AGAIN],
        [long, AGAIN],
        [SAYS, AGAIN],
        [ASKS, ANSWERS, AGAIN],
        [ASKS, {**ANSWERS, "content": "3"}, AGAIN],
    ]
    found = loaded(tmp_path, suffix, *of_verl(*chats), **VERL, samples=True)
    assert [one.id for one in found] == [f"train:{line}" for line in (1, 2, 3, 5, 6)]
    held: tuple[dict[str, Any], ...] = of_verl([ASKS, {**ANSWERS, "tool_calls": None}, AGAIN])
    found = loaded(tmp_path, suffix, *of_verl(*chats), **VERL, samples=True, held_out=held)
    assert [one.id for one in found] == [f"train:{line}" for line in (1, 2, 3, 6)]
    found = loaded(tmp_path, suffix, *of_verl(*chats), **VERL, samples=True, held_out=of_verl("3? "))  # type: ignore[arg-type]
    assert [one.id for one in found] == [f"train:{line}" for line in (5, 6)]
    rows = [{"q": "1?", "a": "2", "s": text} for text in ("Be brief.", "Be long.", None, "Be  brief.")]
    keys = {"prompt_field": "q", "answer_field": "a", "system_field": "s", "chat_template": True}
    assert [one.id for one in loaded(tmp_path, suffix, *rows, **keys, samples=True)] == [
        "train:1",
        "train:2",
        "train:3",
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_developer_is_the_system_where_the_template_shows_that_alone(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As train --check has it, and conversations; a template that shows the role itself gets it."""
    chats = [[{**SAYS, "role": role}, ASKS] for role in ("developer", "system")]
    own, _ = loaded(tmp_path, suffix, *of_verl(*chats), **VERL, samples=True)
    assert own.text == TOKENIZER.apply_chat_template(chats[0], tokenize=False, add_generation_prompt=True)
    for lost in (
        TOKENIZER.chat_template.replace("for m in messages", "for m in messages if m.role != 'developer'"),
        "{% if messages[0].role == 'developer' %}{{ raise_exception('no') }}{% endif %}" + TOKENIZER.chat_template,
    ):
        monkeypatch.setattr(TOKENIZER, "chat_template", lost)
        both = loaded(tmp_path, suffix, *of_verl(chats[0]), **VERL, samples=True)
        system = TOKENIZER.apply_chat_template(chats[1], tokenize=False, add_generation_prompt=True)
        assert [one.text for one in both] == [system]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("chat", "keys", "said"),
    [
        ([ASKS, ANSWERS], {}, "its last message is what the model answers: one of the user or of a tool, with a text"),
        ([{**ASKS, "content": " "}], {}, "its last message is what the model answers"),
        ([SAYS], {}, "its last message is what the model answers"),
        ([], {}, "a prompt has a user's message at least"),
        ([{"from": "human", "value": "1?"}], {}, "item 1 must be a message, an object with role and content; from and"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, r"the content of message 1 is \[\{.*; it must be text"),
        (["1?"], {}, "item 1 must be a message"),
        (
            [SAYS, ASKS],
            {"system_field": "data_source"},
            "and field 'data_source' has a text of the system, too; keep one",
        ),
        (
            [ASKS],
            {"chat_template": False},
            "it must be text, or a list of messages, which data.chat_template=true rend",
        ),
        (
            [{**ASKS, "role": "lost"}],
            {},
            "the tokenizer's chat template does not write message 1, of the role 'lost', as",
        ),
    ],
)
def test_a_list_that_is_no_prompt_is_refused_by_its_place(
    tmp_path: Path, suffix: str, chat: list[Any], keys: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = TOKENIZER.chat_template.replace("for m in messages", "for m in messages if m.role != 'lost'")
    monkeypatch.setattr(TOKENIZER, "chat_template", shown)
    with pytest.raises(DataError, match=said) as caught:
        loaded(tmp_path, suffix, *of_verl(chat), **{**VERL, **keys}, samples=True)
    place = f"train{suffix}: column" if suffix == ".parquet" and "chat_template" in keys else f"train{suffix}:1: "
    assert place in str(caught.value)
