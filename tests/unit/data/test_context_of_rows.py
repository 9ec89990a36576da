"""What rows hold beside their question: context, demonstrations, and prompts that teachers read in place of it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.build.data import load_data, training_data
from launcher.build.sampler import Demonstrations
from rl_megatron.agents.conversation.written import ConversationRows, split_answer_pair, split_text_pair
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.data import ArithmeticRunData, FileRunData, MixtureData
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.data.problems.mixture import MixtureState
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.data.samples import Pair, SupervisedRow, single_turns, to_samples, with_demonstrations
from rl_megatron.environments.protocol import Observation
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Prompt, RolloutGroup
from tests.completions import completion
from tests.data_files import written

TOKENIZER = byte_tokenizer()
TOKENIZER.split_special_tokens = False
TOKENIZER.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
TOKENIZER.chat_template += "{% if add_generation_prompt %}assistant:{% endif %}"
SAYS = {"role": "system", "content": "Be brief."}
ASKS, ANSWERS, AGAIN = (
    {"role": one, "content": text} for one, text in (("user", "1?"), ("assistant", "2"), ("user", "3?"))
)
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))
TRL = {"prompt": [ASKS, ANSWERS, AGAIN], "chosen": [GOOD], "rejected": [BAD], "system": SAYS["content"]}


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
    form = RowForm(tokenizer=TOKENIZER, max_tokens=999, on_long_prompt="fail")
    more: Any = {"on_leak": "drop" if held_out else "keep", "message_prompt_keys": ["data"] if begun else []}
    taught = {} if teacher is None else {"t": TeacherSection(prompt=teacher, max_prompt_tokens=999)}
    return load_prompts(data, form, seed=0, teachers=taught, samples=samples, **more)[0][:]


def conversations() -> ConversationRows:
    return ConversationRows(TOKENIZER, [TOKENIZER.eos_token_id])


def shown(rows: list[SupervisedRow] | Pair) -> list[tuple[list[int], Any]]:
    return [(row.token_ids.tolist(), row.turns) for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("system", [SAYS["content"], "", None])
def test_a_completion_is_learned_after_its_prompts_messages(tmp_path: Path, suffix: str, system: str | None) -> None:
    """As the one conversation with weights of 0 says it."""
    rows = {**TRL, "system": system}, {**TRL, "prompt": None, "chosen": [ASKS, GOOD]}
    apart = loaded(tmp_path, suffix, *rows, fields={"messages": "chosen", "context": "prompt", "system": "system"})
    first = [SAYS] if system else []
    wholes = ([*first, ASKS, {**ANSWERS, "weight": 0}, AGAIN, GOOD], [SAYS, ASKS, GOOD])
    whole = loaded(tmp_path, ".jsonl", *({"m": one} for one in wholes), fields={"messages": "m"})
    made = conversations()
    assert shown(made.rows(apart)) == shown(made.rows(whole))
    assert [len(row.turns) for row in made.rows(apart)] == [1, 1]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_pair_beside_its_prompt_is_that_of_two_whole_conversations(tmp_path: Path, suffix: str) -> None:
    fields = {"messages": "chosen", "rejected": "rejected"}
    apart = loaded(tmp_path, suffix, TRL, fields={**fields, "context": "prompt", "system": "system"})
    before = [SAYS, ASKS, ANSWERS, AGAIN]
    whole = loaded(tmp_path, ".jsonl", {"chosen": [*before, GOOD], "rejected": [*before, BAD]}, fields=fields)
    made = conversations()
    ((one,), (other,)) = split_answer_pair(apart, made), split_answer_pair(whole, made)
    assert shown(one) == shown(other)
    assert split_text_pair(apart, made) == split_text_pair(whole, made)
    assert whole[0].text.startswith('{"messages": [')  # of which checkpoints have digests
    assert [*json.loads(whole[0].text)] == ["messages", "tools", "rejected"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_text_of_the_system_is_in_front_of_the_users_turn_for_teachers_too(tmp_path: Path, suffix: str) -> None:
    rows = [{"q": "1?", "a": "2", "s": text} for text in ("Be brief.", "Be long.", None, " ")]
    keys = {"fields": {"prompt": "q", "answer": "a", "system": "s"}, "chat_template": True}
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
    fields = {"messages": "chosen", "rejected": "rejected", "context": "prompt", "system": "system"}
    with pytest.raises(DataError, match=rf"train\{suffix}(:1)?: {said}"):
        loaded(tmp_path, suffix, row, fields=fields)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fields": {"context": "p"}}, "fields.context='p' does nothing without fields.messages"),
        ({"fields": {"system": "s"}}, "fields.system='s' does nothing without chat_template=true or fields.messages"),
    ],
)
def test_a_field_that_nothing_reads_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FileRunData(type="files", train=Path("a"), eval=Path("b"), **keys)


CALLS = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
TOOL = {"role": "tool", "content": "1", "name": "f"}
CHATS = [[ASKS], [SAYS, AGAIN], [SAYS, ASKS, ANSWERS, AGAIN], [ASKS, CALLS, TOOL]]
VERL: dict[str, Any] = {"fields": {"prompt": "prompt", "answer": "reward_model.ground_truth"}, "chat_template": True}


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
    for prompt, chat, end in zip(found, CHATS, [chat[-1]["content"] for chat in CHATS], strict=True):
        asked, taught = ([*chat[:-1], {**chat[-1], "content": text}] for text in (f"{end} Why?", f"4: {end}"))
        assert list(prompt.token_ids) == by_transformers(asked)
        assert list(prompt.read_by["t"]) == by_transformers(taught)
        assert (prompt.answer, prompt.meta["data_source"]) == ("4", "s")
        assert [one["role"] for one in prompt.meta["prompt"]] == [one["role"] for one in chat]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_environment_begins_with_the_messages_of_a_row_or_with_its_text(tmp_path: Path, suffix: str) -> None:
    keys: dict[str, Any] = {**VERL, "chat_template": False, "samples": True, "prompt_template": "{prompt} Why?"}
    for prompt, chat in zip(loaded(tmp_path, suffix, *of_verl(*CHATS), **keys, begun=True), CHATS, strict=True):
        last = {**chat[-1], "content": f"{chat[-1]['content']} Why?"}
        assert Observation(content=prompt.messages or prompt.text).messages == (*chat[:-1], last)
        assert prompt.text == last["content"]
    (text,) = loaded(tmp_path, suffix, {"prompt": "1?", "reward_model": {"ground_truth": "2"}}, **keys)
    assert (text.messages, text.text) == ((), "1? Why?")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_question_in_another_context_is_another_problem_which_may_be_held_out(tmp_path: Path, suffix: str) -> None:
    """As a text or as a message; with another system's message, or other earlier turns, another thing is asked."""
    long = {"role": "system", "content": "Be long."}
    chats = [
        *([AGAIN], [SAYS, AGAIN], [long, AGAIN], [SAYS, AGAIN], [ASKS, ANSWERS, AGAIN]),
        [ASKS, {**ANSWERS, "content": "3"}, AGAIN],
    ]
    found = loaded(tmp_path, suffix, *of_verl(*chats), **VERL, samples=True)
    assert [one.id for one in found] == [f"train:{line}" for line in (1, 2, 3, 5, 6)]
    held: tuple[dict[str, Any], ...] = of_verl([ASKS, {**ANSWERS, "tool_calls": None}, AGAIN])
    found = loaded(tmp_path, suffix, *of_verl(*chats), **VERL, samples=True, held_out=held)
    assert [one.id for one in found] == [f"train:{line}" for line in (1, 2, 3, 6)]
    found = loaded(tmp_path, suffix, *of_verl(*chats), **VERL, samples=True, held_out=of_verl("3? "))  # type: ignore[arg-type]
    assert [one.id for one in found] == [f"train:{line}" for line in (2, 3, 5, 6)]
    rows = [{"q": "1?", "a": "2", "s": text} for text in ("Be brief.", "Be long.", None, "Be  brief.")]
    keys = {"fields": {"prompt": "q", "answer": "a", "system": "s"}, "chat_template": True}
    found = loaded(tmp_path, suffix, *rows, **keys, samples=True)  # type: ignore[arg-type]
    assert [one.id for one in found] == ["train:1", "train:2", "train:3"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_developer_may_be_the_templates_system(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
            {"fields": {**VERL["fields"], "system": "data_source"}},
            "and field 'data_source' has a text of the system, too; keep",
        ),
        ([ASKS], {"chat_template": False}, "it must be text, or a list of messages, which data.chat_template=true"),
        (
            [{**ASKS, "role": "ipython"}],
            {},
            "the tokenizer's chat template does not write message 1, of the role 'ipyt",
        ),
        ([{**ASKS, "role": "User"}], {}, r"the role of message 1 is 'User' \(allowed: system, developer, user, assist"),
        ([{**ASKS, "content": None}, ASKS], {}, "the content of message 1 is None; it must be text"),
        ([ASKS, {**ANSWERS, "content": None}, AGAIN], {}, "the content of message 2 is None; it must be text"),
    ],
)
def test_a_list_that_is_no_prompt_is_refused_by_its_place(
    tmp_path: Path, suffix: str, chat: list[Any], keys: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = TOKENIZER.chat_template.replace("for m in messages", "for m in messages if m.role != 'ipython'")
    monkeypatch.setattr(TOKENIZER, "chat_template", shown)
    with pytest.raises(DataError, match=said) as caught:
        loaded(tmp_path, suffix, *of_verl(chat), **{**VERL, **keys}, samples=True)
    place = f"train{suffix}: column" if suffix == ".parquet" and "chat_template" in keys else f"train{suffix}:1: "
    assert place in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_in_json_text_are_those_of_a_list(tmp_path: Path, suffix: str) -> None:
    """Other lists in JSON, without roles, are a user's text."""
    texts = [" \n" + json.dumps(chat) for chat in CHATS] + ["[1, 2]", '[{"a": 1}]', "[1, 3", '[{"role": "\\ud800"}]']
    rows = tuple({"q": text, "reward_model": {"ground_truth": "4"}} for text in texts)
    keys = {**VERL, "fields": {**VERL["fields"], "prompt": "q"}}
    found = loaded(tmp_path, suffix, *rows, *rows, **keys, samples=True)  # type: ignore[arg-type]
    chats = [*CHATS, *([{"role": "user", "content": text}] for text in texts[len(CHATS) :])]
    assert [list(one.token_ids) for one in found] == list(map(by_transformers, chats))
    held = tuple({"q": chat, "reward_model": {"ground_truth": "4"}} for chat in CHATS)
    left = loaded(tmp_path, suffix, *rows, **keys, samples=True, held_out=held)  # type: ignore[arg-type]
    assert [one.id for one in left] == [f"train:{line}" for line in range(len(CHATS) + 1, len(rows) + 1)]
    with pytest.raises(
        DataError, match=rf"train\{suffix}:1: field 'q' is .*; its last message is what the model answers"
    ):
        loaded(tmp_path, suffix, {**rows[0], "q": json.dumps([ASKS, ANSWERS])}, **keys, samples=True)  # type: ignore[arg-type]


# Demonstrations of rows: the text of a field or the answer, its end, and what is refused before a run or in it.
BYTES = byte_tokenizer()
END = BYTES.eos_token_id
DEMONSTRATED = [
    {"question": "1+1", "answer": "2", "of": {"target": "one and one: 2"}},
    {"question": "3+1", "answer": "4", "of": {"target": " 4 "}},
]


def demonstrations(**fields: str | None) -> Demonstrations:
    return Demonstrations(
        fields=fields,
        tokenizer=BYTES,
        end_token_ids=dict.fromkeys(fields, END),
        stop_token_ids=(END, ord("|")),
        vocab_size=len(BYTES),
        max_tokens=15,
    )


def rows_shown(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> list[Prompt]:
    """Held-out rows have no demonstration."""
    train, held_out = folder / f"train{suffix}", folder / "eval.jsonl"
    held_out.write_text(json.dumps({"question": "9", "answer": "9"}))
    written(train, rows)
    data = FileRunData(type="files", train=train, eval=held_out, fields={"demonstration": "of.target"})
    found, _ = load_prompts(data, RowForm(tokenizer=BYTES, max_tokens=9, on_long_prompt="fail"), seed=0)
    return list(found[:])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_it_is_the_text_of_the_field_or_the_answer_and_its_end(tmp_path: Path, suffix: str) -> None:
    prompts = rows_shown(tmp_path, suffix, DEMONSTRATED)
    for field, texts in (("of.target", ["one and one: 2", " 4 "]), (None, ["2", "4"])):
        said = [demonstrations(**{"": field})(prompt) for prompt in prompts]
        assert [one.token_ids.tolist() for one in said] == [[*text.encode(), END] for text in texts]
        assert all(not one.logprobs.any() and one.spans == () and one.finish_reason == "stop" for one in said)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"target": None}, "field 'of.target' is None; a demonstration is a text"),
        ({"target": " "}, "field 'of.target' is ' '; a demonstration is a text"),
        ({"targets": "2"}, "no field 'of.target'; it has .*did you mean 'of.targets'"),
    ],
)
def test_a_row_without_one_is_refused_before_the_run(tmp_path: Path, of: Any, said: str, suffix: str) -> None:
    rows = [row | {"of": of} if place == 1 else row for place, row in enumerate(DEMONSTRATED)]
    if suffix == ".parquet":
        rows = rows[1:]  # Arrow's structs have the keys of all rows
    place = "" if suffix == ".parquet" and "targets" in said else f":{len(rows)}"  # of a column, before a row is read
    with pytest.raises(DataError, match=f"train{suffix}{place}: {said}"):
        rows_shown(tmp_path, suffix, rows)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("0123456789abcde", r"its demonstration has 16 tokens, but rollout\.max_new_tokens=15; raise the latter"),
        ("1|2", r"its answer contains the text of a token that ends sampling \(id 124\)"),
    ],
)
def test_one_that_no_policy_would_sample_is_refused_with_its_prompt(answer: str, said: str) -> None:
    prompt = Prompt(id="p:7", text="", token_ids=(1, 2), answer=answer, source="a")
    with pytest.raises(DataError, match=f"prompt 'p:7'.*{said}"):
        demonstrations(a=None)(prompt)
    with pytest.raises(DataError, match=f"prompt 'p:7' has the token {END}, but the model's embedding has 99 rows"):
        replace(demonstrations(a=None), vocab_size=99)(prompt)


def test_samples_tell_its_positions() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1, 2), answer="3")
    sampled = single_turns(prompt, [completion([5, 6]), completion([7])])
    shown = single_turns(prompt, [demonstrations(**{"": None})(prompt)], rewards=[1.0])
    groups = [RolloutGroup(prompt=prompt, trajectories=sampled.trajectories, demonstration=shown), sampled]
    samples = to_samples(with_demonstrations(groups), demonstrated=True)
    assert samples.demonstrated is not None
    assert samples.demonstrated.tolist() == [*[False] * 5, *[True] * 3, *[False] * 5]
    assert samples.mask.tolist() == [bool(x) for x in (0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 1)]
    assert to_samples(with_demonstrations(groups)).demonstrated is None


# Prompts that teachers read in place of the policy's: made of their row's fields, of few enough tokens.
TAUGHT = [
    {"question": "1+{answer}", "answer": "2", "why": {"steps": "one and {prompt}"}, "worth": 0.5},
    {"question": "café", "answer": "3", "why": {"steps": "long " * 9}, "worth": [1]},
]
FORM = '{prompt}\n\\frac{{a}}{{b}} \\boxed{{{answer}}} {why.steps} {worth} {{"of": {{"x": "{answer}"}}}}'


def teacher(prompt: str = FORM, most: int = 75, **keys: Any) -> TeacherSection:
    return TeacherSection(path=Path("t"), prompt=prompt, max_prompt_tokens=most, **keys)


def files(folder: Path, suffix: str, rows: list[dict[str, Any]], **keys: Any) -> FileRunData:
    train, held_out = folder / f"train{suffix}", folder / "eval.jsonl"
    held_out.write_text(json.dumps({"question": "9", "answer": "9"}))
    written(train, rows)
    return FileRunData(type="files", train=train, eval=held_out, **keys)


def prompts_for(data: Any, teachers: Mapping[str, TeacherSection], long: Any = "fail", **keys: Any) -> Any:
    """The training and the held-out prompts."""
    form = RowForm(tokenizer=byte_tokenizer(), max_tokens=40, on_long_prompt=long)
    return load_prompts(data, form, seed=0, teachers=teachers, **keys)


def read_by_teachers(data: Any, teachers: Mapping[str, TeacherSection], long: Any = "fail") -> list[dict[str, str]]:
    """What the teachers read of each prompt to train on."""
    train, held_out = prompts_for(data, teachers, long)
    assert not any(prompt.read_by for prompt in held_out)
    return [{name: bytes(ids).decode() for name, ids in prompt.read_by.items()} for prompt in train]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("chat", [False, True])
def test_fields_of_the_row_are_put_in_once_by_the_policys_template(tmp_path: Path, suffix: str, chat: bool) -> None:
    rows = TAUGHT[:1]
    found = read_by_teachers(
        files(tmp_path, suffix, rows, prompt_template="Q {prompt}", chat_template=chat), {"t": teacher(most=99)}
    )
    text = FORM.format(prompt="1+{answer}", answer="2", why=SimpleNamespace(**TAUGHT[0]["why"]), worth=0.5)
    assert '\\frac{a}{b} \\boxed{2} one and {prompt} 0.5 {"of": {"x": "2"}}' in text
    assert found == [{"t": f"user: {text}\nassistant: " if chat else text}]


@pytest.mark.parametrize("chat", [False, True])
def test_the_place_of_another_completion_is_between_the_tokens_around_it(tmp_path: Path, chat: bool) -> None:
    form = teacher("{answer}: {right_completion}\n{prompt}", most=45 if chat else 17)
    data = files(tmp_path, ".jsonl", TAUGHT[:1], chat_template=chat)
    train, _ = prompts_for(data, {"t": form})
    ids = train[0].read_by["t"]
    before, behind = ids[: ids.index(-1)], ids[ids.index(-1) + 1 :]
    wanted = ("user: 2: ", "\n1+{answer}\nassistant: ") if chat else ("2: ", "\n1+{answer}")
    assert (bytes(before).decode(), bytes(behind).decode()) == wanted
    short = form.model_copy(update={"max_prompt_tokens": len(before) + len(behind) - 1})
    with pytest.raises(DataError, match=f"the prompt has {len(before) + len(behind)} tokens, algorithm.kl.teachers.t"):
        prompts_for(data, {"t": short})


def test_a_generated_sum_has_its_answer() -> None:
    (first, *_) = read_by_teachers(ArithmeticRunData(digits=1, num_eval=2), {"t": teacher("{answer} {prompt}=")})
    answer, _, question = first["t"].rstrip("=").partition(" ")
    a, b = question.split("+")
    assert int(answer[::-1]) == int(a) + int(b)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_longer_one_fails_or_is_dropped_by_key(tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "worth": 1} for row in TAUGHT]
    data, key = files(tmp_path, suffix, rows), "algorithm.kl.teachers.t.max_prompt_tokens=75"
    length = len(FORM.format(prompt="café", answer="3", why=SimpleNamespace(**TAUGHT[1]["why"]), worth=1).encode())
    with pytest.raises(DataError, match=f":2: the prompt has {length} tokens, {key}.*rollout.on_long_prompt=drop"):
        read_by_teachers(data, {"t": teacher()})
    with caplog.at_level(logging.WARNING):
        if suffix == ".jsonl":
            assert len(read_by_teachers(data, {"t": teacher()}, "drop")) == 1
            assert f"dropped 1 of 2 prompts with more than {key} tokens; the first is" in caplog.text
        else:
            with pytest.raises(DataError, match="'train:2' has too many tokens"):
                read_by_teachers(data, {"t": teacher()}, "drop")
            assert f"dropped 1 prompts so far that have more tokens than {key} when they were drawn" in caplog.text


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_field_that_a_row_lacks_or_that_is_null_is_named_with_the_row(tmp_path: Path, suffix: str) -> None:
    """Before a row is drawn; of rows that are left out, nothing is asked."""

    def load(folder: Path, rows: list[dict[str, Any]], name: str, **keys: Any) -> None:
        data, taught = files(folder, suffix, rows), {"t": teacher(f"{{prompt}} {{{name}}}")}
        prompts_for(data, taught, **keys)

    rows = [{"question": "1", "answer": "2", "hint": "3"}]
    row = "" if suffix == ".parquet" else ":1"  # of a parquet file its footer says so
    for name in ("solution", "question"):
        said = rf"train\{suffix}{row}: no field '{name}'; it has .*, for algorithm.kl.teachers.t.prompt"
        with pytest.raises(DataError, match=said + r"; \{prompt\} and \{answer\} are the problem"):
            load(tmp_path, rows, name)
    (tmp_path / "null").mkdir()
    whole = {**rows[0], "why": {"steps": "4"}, "solution": "4", "score": 1.5}
    null = {
        **whole,
        "question": "9",
        "answer": "9",
        "why": None,
        "solution": None,
        "score": math.nan,
        "worth": -math.inf,
    }
    whole["worth"] = 1.5
    for name in ("solution", "why.steps", "why", "score", "worth"):
        said = rf":2: field '{name}' is null, or a number that is not finite, for algorithm.kl.teachers.t.prompt; give"
        with pytest.raises(DataError, match=said):
            load(tmp_path / "null", [whole, null], name)
        load(tmp_path / "null", [whole, null], name, on_leak="drop")  # the second is held out


def test_a_field_of_a_parquet_file_that_is_no_text_is_named_before_it_is_drawn(tmp_path: Path) -> None:
    data = files(tmp_path, ".parquet", [{"question": f"{n}", "answer": "2", "why": "é"} for n in range(3)])
    table = pq.read_table(data.train)
    pq.write_table(table.set_column(2, "why", pa.array([b"a", b"\xff", b"b"]).view(pa.string())), data.train)
    with pytest.raises(DataError, match=r"train.parquet:2: field 'why' cannot be read: .*UTF8.*, for algorithm"):
        prompts_for(data, {"t": teacher("{prompt} {why}")})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_resume_refuses_other_texts_of_a_teacher(tmp_path: Path, suffix: str) -> None:
    """Keys of a row in another order are the same row in JSON lines, where tokens and bytes do not count."""

    def stream(row: dict[str, Any]) -> PromptStream:
        data, taught = files(tmp_path, suffix, [row]), {"t": teacher("{prompt} {why.steps}")}
        train, _ = prompts_for(data, taught)
        return PromptStream(train, seed=0)

    state, other = stream(TAUGHT[0]).state(), {**TAUGHT[0], "why": {"steps": "one and 1"}}
    assert not isinstance(state, MixtureState)
    if suffix == ".jsonl":
        stream(dict(reversed(TAUGHT[0].items()))).restore(state)
    with pytest.raises(CheckpointError, match="but with others, by their digest; resume with the same files"):
        stream(other).restore(state)


def test_sources_have_their_own_teachers_and_evaluations_none(tmp_path: Path) -> None:
    made = {name: {"type": "arithmetic", "digits": digits, "num_eval": 9} for name, digits in (("one", 1), ("two", 2))}
    data = MixtureData.model_validate({"type": "mixture", "sources": made})
    found = read_by_teachers(data, {"both": teacher("{prompt}"), "of_two": teacher("{prompt}", sources=("two",))})
    assert {tuple(sorted(one)) for one in found if len(one["both"]) == 3} == {("both",)}
    assert {tuple(sorted(one)) for one in found if len(one["both"]) == 5} == {("both", "of_two")}
    byte_tokenizer().save_pretrained(tmp_path)
    data = files(tmp_path, ".jsonl", TAUGHT[:1])
    given = ["algorithm=distill", "data.type=files", f"data.train={data.train}", f"data.eval={data.eval}"]
    of = ["path=tests", "prompt={prompt} {solution}", "max_prompt_tokens=40"]
    config = load_config("tiny_cpu", [*given, *(f"algorithm.kl.teachers.t.{key}" for key in of)])
    assert len(load_data(config, tmp_path).train) == 1
    with pytest.raises(DataError, match="no field 'solution'"):
        training_data(config, tmp_path)
