"""Fields with what stands before a row's messages or its question: TRL's prompts, and texts of the system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_megatron.config.sections.data import FileRunData
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.data.pairs import Pair
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.samples import WrittenRow
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


def loaded(folder: Path, suffix: str, *rows: dict[str, Any], teacher: str | None = None, **keys: Any) -> list[Prompt]:
    """The prompts of a file of these rows."""
    path = folder / f"train{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    data = FileRunData(type="files", train=path, eval=path, **keys)
    form: dict[str, Any] = {"max_prompt_tokens": 999, "on_long_prompt": "fail", "samples": False, "on_leak": "keep"}
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
    wholes = (
        [*first, ASKS, {**ANSWERS, "weight": 0}, AGAIN, GOOD],
        [SAYS, ASKS, GOOD],
    )
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
        ({**TRL, "prompt": "1?"}, "field 'prompt' is '1[?]'; it must be a list of objects"),
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
