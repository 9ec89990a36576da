"""Pairs of answers become rows: of generated sums, of problems and of conversations, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from launcher.build.jobs import LearnedRows
from rl_megatron.agents.conversation.forms import check_answers, check_texts
from rl_megatron.agents.conversation.written import ConversationRows, single_answers, split_answer_pair, split_text_pair
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.data import FileRunData
from rl_megatron.data.problems.mixture import OLDER_DIGESTS, DigestOf, digest_of_prompts
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.problems.prompts import load_prompts, wrong_answer
from rl_megatron.data.problems.rendering import Example, RowForm
from rl_megatron.data.samples import SupervisedRow, answer_pairs, mismatched, scored_pairs, set_margins
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rewards.classifiers.in_process import ClassifierTexts
from rl_megatron.types import Prompt

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' else '' }}\n"
    "{% endfor %}{{ 'a:' if add_generation_prompt else '' }}"
)


def said(text: str) -> list[dict[str, str]]:
    """``u:x|a:y`` as messages."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[part[0]], "content": part[2:]} for part in text.split("|")]


def conversations() -> ConversationRows:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.split_special_tokens = TEMPLATE, False
    return ConversationRows(tokenizer, [EOS])


def prompt(better: str, worse: str) -> Prompt:
    text = json.dumps({"messages": said(better), "rejected": said(worse), "tools": []})
    return Prompt(id="p:1", text=text, token_ids=(), answer="")


def test_wrong_sums_have_the_answers_length_and_answers_end_with_the_end_of_sequence_token() -> None:
    problems = [Example(id=f"{n}", place="", text="", raw="", answer=f"{n % 200:03d}") for n in range(2000)]
    made = [wrong_answer(one) for one in problems]
    assert made == [wrong_answer(one) for one in problems]
    assert all(len(one) == 3 and one.isdigit() and one != two.answer for one, two in zip(made, problems, strict=True))
    apart = [sum(a != b for a, b in zip(one, two.answer, strict=True)) for one, two in zip(made, problems, strict=True)]
    assert 0.4 < apart.count(1) / len(apart) < 0.65  # half of them by intent, and few of the others
    one = Prompt(id="p", text="ab", token_ids=(7, 8), answer="x", rejected=("yz",))
    ((better, worse),) = answer_pairs([one], TOKENIZER, {"": EOS})
    x, y, z = (TOKENIZER(letter, add_special_tokens=False)["input_ids"][0] for letter in "xyz")
    assert (better.token_ids.tolist(), better.turns) == ([7, 8, x, EOS], ((2, 4),))
    assert (worse.token_ids.tolist(), worse.turns) == ([7, 8, y, z, EOS], ((2, 5),))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("written", ["", str(TOKENIZER.bos_token)])
def test_a_text_whose_template_writes_the_first_token_is_scored_with_one_of_it(adds: bool, written: str) -> None:
    """And a classifier reads what it was trained on, also where a long text is cut at its beginning."""
    tokenizer, bos = byte_tokenizer(), TOKENIZER.bos_token_id
    tokenizer.split_special_tokens, tokenizer.truncation_side = False, "left"
    if adds:
        first = (str(tokenizer.bos_token), bos)
        form = TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
        tokenizer.backend_tokenizer.post_processor = form
    wanted = [*([bos] if adds or written else []), *TOKENIZER("abcd")["input_ids"]]
    one = Prompt(id="p", text=f"{written}ab", token_ids=(7,), answer="cd", rejected=("e",))
    (pair,) = scored_pairs([one], [(one.text + "cd", one.text + "e")], tokenizer, add_special_tokens=True)
    assert pair[0].token_ids.tolist() == [*wanted, wanted[-1]]
    assert pair[1].token_ids.tolist().count(bos) == wanted.count(bos)
    for most in (3, 9):
        (row,) = ClassifierTexts(tokenizer=tokenizer, chat_template=False, max_tokens=most).rows(one.text, ["cd"])
        assert row == ([*wanted[:adds], *wanted[adds - most :]] if most == 3 else wanted)


def test_a_scored_text_is_learnt_at_its_last_token_and_the_better_one_has_the_margin() -> None:
    one = Prompt(id="p", text="ab", token_ids=(7, 8), answer="", margin=0.5)
    pairs = scored_pairs([one], [("abc", "ad")], TOKENIZER, add_special_tokens=False)
    samples = set_margins([row for pair in pairs for row in pair])
    ids = TOKENIZER("abcad", add_special_tokens=False)["input_ids"]
    assert samples.input_ids.tolist() == ids
    assert samples.mask.tolist() == [False, False, True, False, True]
    assert samples.returns is not None
    torch.testing.assert_close(samples.returns, torch.tensor([0, 0, 0.5, 0, 0]))
    assert samples.cu_seqlens.tolist() == [0, 3, 5]


@pytest.mark.parametrize("most", [50, 4])
def test_prompts_with_other_rows_answers_are_those_of_lists(most: int) -> None:
    """Of rows of one turn and of two, whose weights are where their first learned token is predicted."""
    prompts, answers = ([1, 2, 3], [4], [5, 6]), ([7], [8, 9, 10, 11, 12], [13, 14, 15])
    turns = ([(0, 1)], [(0, 2), (3, 5)], [(0, 3)])  # within the answers
    rows = [
        SupervisedRow(
            id="p",
            token_ids=np.array(p + a, np.int32),
            turns=tuple((len(p) + start, len(p) + stop) for start, stop in of),
            margin=margin,
        )
        for p, a, of, margin in zip(prompts, answers, turns, (1.5, -0.5, 2.0), strict=True)
    ]
    samples = set_margins(rows)
    assert samples.returns is not None
    assert samples.returns.tolist() == [0, 0, 1.5, -0.5, 0, 0, 0, 0, 0, 2.0, 0, 0]
    found = mismatched(samples, most)
    wanted = [(p + answers[i - 1])[: most + 1] for i, p in enumerate(prompts)]
    learned = [{len(p) + k for start, stop in turns[i - 1] for k in range(start, stop)} for i, p in enumerate(prompts)]
    assert found.input_ids.tolist() == [token for row in wanted for token in row[:-1]]
    assert found.targets.tolist() == [token for row in wanted for token in row[1:]]
    mask = [place in known for row, known in zip(wanted, learned, strict=True) for place in range(1, len(row))]
    assert found.mask.tolist() == mask
    assert found.cu_seqlens.diff().tolist() == [len(row) - 1 for row in wanted]


@pytest.mark.parametrize("form", ["texts", "messages"])
def test_rows_of_one_answer_have_the_weight_of_their_label(form: str) -> None:
    """As TRL's ``prompt``, ``completion`` and ``label``, true and false also as 1 and 0."""
    made = LearnedRows(
        tokenizer=conversations()._tokenizer, stop_token_ids=[EOS], end_token_ids={"": EOS}, vocab_size=300
    )
    config = load_config("dpo_tiny", ["data.type=files", "data.train=a", "data.eval=b", "dpo.loss=kto", *WEIGHTED])
    text = json.dumps({"messages": said("u:1|a:2"), "tools": [], "first": 1})
    one = Prompt(id="p:1", text="1", token_ids=(7,), answer="2")
    if form == "messages":
        one = replace(one, text=text, token_ids=(), answer="")
    units, labels = made.units(config), [True, False, 1, 0]
    found = units([replace(one, meta={"label": label}) for label in labels])
    assert [row.margin for (row,) in found] == [1.5, -0.25, 1.5, -0.25]
    ((start, stop),) = found[0][0].turns
    assert TOKENIZER.decode(found[0][0].token_ids[start : stop - 1]) == "2"
    for label in (None, "true", 2, 1.0, "no"):
        with pytest.raises(
            DataError, match=rf"^prompt 'p:1': field 'label' is .*{label}.*; dpo\.loss=kto reads there true"
        ):
            units([replace(one, meta={"label": label} if label is not None else {"label": None})])
    with pytest.raises(DataError, match=r"^prompt 'p:1': no field 'label'; it has labels; did you mean 'labels'"):
        units([replace(one, meta={"labels": True})])


WEIGHTED = ("dpo.desirable_weight=1.5", "dpo.undesirable_weight=0.25")


def test_a_conversation_with_a_label_whose_turns_are_in_several_rows_is_refused() -> None:
    """And one whose turns all have a weight of 0 has none."""
    later = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'] | upper }}"
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.split_special_tokens = later, False
    text = json.dumps({"messages": said("u:a|a:b|u:c|a:d"), "tools": []})
    one = Prompt(id="p:1", text=text, token_ids=(), answer="")
    with pytest.raises(DataError, match=r"^prompt 'p:1': the turns that its label is of are in 2 rows"):
        single_answers([one], ConversationRows(tokenizer, [EOS]))
    silent = [{**message, "weight": 0} for message in said("u:a|a:b")]
    none = replace(one, text=json.dumps({"messages": silent, "tools": []}))
    assert single_answers([none], conversations()) == []


def test_another_label_of_a_conversation_is_another_data_set_and_none_that_of_older_files() -> None:
    one = Prompt(id="p:1", text="{}", token_ids=(), answer="", meta={"label": True, "messages": []})
    bad, without = replace(one, meta={"label": False}), replace(one, meta={"messages": []})
    assert len({digest_of_prompts([each]) for each in (one, bad, without)}) == 3
    for of in OLDER_DIGESTS:
        assert len({digest_of_prompts([each], of) for each in (one, bad, without)}) == 1


def test_of_two_conversations_what_is_behind_their_common_messages_is_learnt() -> None:
    ((better, worse),) = split_answer_pair([prompt("u:1|a:2|u:3|a:good", "u:1|a:2|u:3|a:no")], conversations())
    for row, text in ((better, "good"), (worse, "no")):
        ((start, stop),) = row.turns
        assert TOKENIZER.decode(row.token_ids[start : stop - 1]) == text
        assert row.token_ids[stop - 1] == EOS
        assert TOKENIZER.decode(row.token_ids[:start]).replace(TOKENIZER.eos_token, "") == "u:1\na:2\nu:3\na:"
    ((whole, _),) = split_text_pair([prompt("u:1|a:2", "u:1|a:3")], conversations())
    assert whole == f"u:1\na:2{TOKENIZER.eos_token}\n"


@pytest.mark.parametrize(
    ("better", "worse", "reason"),
    [
        ("u:1|a:2", "u:1|a:2", "one conversation of its pair begins with the whole of the other"),
        ("u:1|a:2", "u:1|a:2|u:3|a:4", "one conversation of its pair begins with the whole of the other"),
        ("u:1|a:2", "u:9|a:2", "its conversations first differ in message 1, of the role 'user'; a pair has two"),
        ("u:1|a:2", "u:1|u:3|a:2", "its conversations first differ in message 2, of the role 'user'"),
        *((*texts, "message 2 has neither content nor") for texts in (("u:1|a:", "u:1|a:2"), ("u:1|a:2", "u:1|a: "))),
    ],
)
def test_conversations_that_are_no_pair_are_refused_by_name(better: str, worse: str, reason: str) -> None:
    with pytest.raises(DataError, match=f"prompt 'p:1': {reason}"):
        split_answer_pair([prompt(better, worse)], conversations())


def test_all_conversations_that_are_no_pair_are_named_before_the_first_step() -> None:
    prompts = [replace(prompt("u:1|a:2", worse), id=f"p:{n}") for n, worse in enumerate(("u:1|a:3", "u:9|a:2", "u:1"))]
    check_answers(prompts[:1])
    with pytest.raises(DataError) as problems:
        check_answers(prompts)
    expected = [["prompt 'p", "1'"], ["prompt 'p", "2'"]]
    assert [line.split(":", 2)[:2] for line in str(problems.value).splitlines()] == expected
    formless = replace(prompts[0], text=prompts[0].text.replace('"3"', "3"))
    assert formless != prompts[0]
    for check in (check_answers, check_texts):
        with pytest.raises(DataError, match=r"^prompt 'p:0': message 2 has content 3"):
            check([formless])
    check_texts(prompts[:2])


def test_an_answer_without_the_messages_before_it_is_no_text_to_score() -> None:
    """As TRL's files have them, whose ``prompt`` is another field."""
    one = prompt("a:2", "a:3")
    for check in (check_answers, check_texts, lambda prompts: split_text_pair(prompts, conversations())):
        with pytest.raises(DataError, match=r"^prompt 'p:1': message 1 is the assistant's, which answers nobody"):
            check([one])
    greeting = replace(
        one,
        text=json.dumps(
            {"messages": [{"weight": 0, **m} for m in said("a:Hi|u:1|a:2")]}
            | {"rejected": [{"weight": 0, **m} for m in said("a:Hi|u:1|a:3")], "tools": []}
        ),
    )
    check_texts([greeting])


def test_a_conversation_that_ends_with_a_user_has_no_answer_to_score() -> None:
    """Its score would be that of the question; in job=dpo what follows the last answer is not read."""
    one = prompt("u:1|a:2|u:thanks", "u:1|a:3")
    check_answers([one])
    for check in (check_texts, lambda prompts: split_text_pair(prompts, conversations())):
        with pytest.raises(DataError, match=r"^prompt 'p:1': message 3, the last, is of the role 'user', and"):
            check([one])


def test_messages_that_say_the_same_are_the_same_beginning() -> None:
    """Null keys of parquet files, contents in parts, and weights of what is before the answers."""
    one = json.loads(prompt("u:1|a:2|u:3|a:good", "u:1|a:2|u:3|a:no").text)
    one["messages"][0] |= {"name": None, "content": [{"type": "text", "text": "1"}]}
    one["messages"][1] |= {"weight": 0}
    other = Prompt(id="p:1", text=json.dumps(one), token_ids=(), answer="")
    given, wanted = (
        split_answer_pair([each], conversations()) for each in (other, prompt("u:1|a:2|u:3|a:good", "u:1|a:2|u:3|a:no"))
    )
    for row, same in zip(given[0], wanted[0], strict=True):
        assert (row.token_ids.tolist(), row.turns) == (same.token_ids.tolist(), same.turns)


@pytest.mark.parametrize(("key", "side"), [("messages", "better"), ("rejected", "worse")])
def test_a_weight_of_0_on_all_that_differs_is_refused_at_the_start_and_on_a_part_is_not(key: str, side: str) -> None:
    one = json.loads(prompt("u:1|a:2|u:3|a:4|u:5|a:6", "u:1|a:2|u:3|a:no|u:5|a:not").text)
    one[key][3]["weight"] = 0
    part = Prompt(id="p:1", text=json.dumps(one), token_ids=(), answer="")
    check_answers([part])
    assert len(split_answer_pair([part], conversations())) == 1
    one[key][5]["weight"] = 0
    whole = replace(part, text=json.dumps(one))
    for check in (check_answers, lambda prompts: split_answer_pair(prompts, conversations())):
        with pytest.raises(DataError, match=rf"^prompt 'p:1': .* its {side} .* a weight of 0 from message 4 on"):
            check([whole])


def test_a_pair_whose_texts_leave_out_what_differs_is_refused() -> None:
    """Or a call, or an answer's content beside it; the template writes contents alone, and none beside a call."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("m['content']", "'' if m.tool_calls else m['content']")
    calls = {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}

    def texts(*extra: dict[str, Any], answer: str = "u:1|a:2") -> list[tuple[str, str]]:
        one = json.loads(prompt(answer, answer).text)
        for side, more in zip(("messages", "rejected"), extra, strict=True):
            one[side][1] |= more
        made = ConversationRows(tokenizer, [EOS])
        return split_text_pair([Prompt(id="p:1", text=json.dumps(one), token_ids=(), answer="")], made)

    with pytest.raises(DataError, match=r"^prompt 'p:1': the chat template's texts of both conversations are equal"):
        texts({"reasoning_content": "Hm."}, {"reasoning_content": "No."})
    with pytest.raises(DataError, match=r"^prompt 'p:1': message 2: .* does not write its content, so what is scored"):
        texts(calls, {})
    with pytest.raises(DataError, match=r"^prompt 'p:1': message 2: .* does not write its call of add, so what"):
        texts({}, calls | {"content": ""})


def test_answers_that_the_template_shows_alike_are_no_pair() -> None:
    """As most trim white space: such a pair has no gradient."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.split_special_tokens = (
        TEMPLATE.replace("m['content']", "m.content.strip()"),
        False,
    )
    made = ConversationRows(tokenizer, [EOS])
    assert len(split_answer_pair([prompt("u:1|a:2", "u:1|a:3 ")], made)) == 1
    with pytest.raises(DataError, match=r"^prompt 'p:1': the chat template's texts of both conversations are equal"):
        split_answer_pair([prompt("u:1|a:2", "u:1|a:2 ")], made)


LETTERS = {"q": "1+1", "good": "2", "bad": "3", "m": 0.5}
TALK = {"good": said("u:1|a:2"), "bad": said("u:1|a:3"), "m": 0.5}


def loaded(
    place: Path, *rows: dict[str, Any] | str, margin: str | None = "m", prompt_template: str = "{prompt}"
) -> list[Prompt]:
    """By one source of files, whose first row says whether they are problems or conversations."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (place / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    talks = '"q"' not in lines[0]
    held_out = json.dumps((TALK if talks else LETTERS) | {"q": "held out", "bad": said("u:9|a:9") if talks else "9"})
    (place / "eval.jsonl").write_text(held_out + "\n")
    fields = {"messages": "good"} if talks else {"prompt": "q", "answer": "good"}
    data = FileRunData(
        type="files",
        train=place / "train.jsonl",
        eval=place / "eval.jsonl",
        fields={"rejected": "bad", "margin": margin, **fields},  # type: ignore[dict-item]
        prompt_template=prompt_template,
    )
    form = RowForm(tokenizer=TOKENIZER, max_tokens=99, on_long_prompt="fail")
    train, _ = load_prompts(data, form, seed=0, rows="pairs", samples=False, on_leak="fail")
    return train[:]


@pytest.mark.parametrize("row", [LETTERS, TALK], ids=["problem", "conversation"])
@pytest.mark.parametrize("value", ["1", None, True, [1], 1e300, 10_001, -10_001, 10**400])
def test_a_margin_that_is_no_score_is_refused_before_the_run(tmp_path: Path, row: dict[str, Any], value: Any) -> None:
    with pytest.raises(DataError, match=r"train.jsonl:2: field 'm' is .*; it must be a finite number, from -10000 to"):
        loaded(tmp_path, row, row | {"m": value, "id": 2})


def test_a_margin_is_read_from_its_field(tmp_path: Path) -> None:
    rows = LETTERS, LETTERS | {"q": "2", "m": -10_000}
    assert [one.margin for one in loaded(tmp_path, *rows)] == [0.5, -10_000]
    assert [one.margin for one in loaded(tmp_path, *rows, margin=None)] == [0, 0]


def test_pairs_of_equals_are_refused_with_all_their_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError) as problems:
        loaded(tmp_path, LETTERS, LETTERS | {"bad": "2"}, LETTERS | {"q": "5", "bad": "2"})
    expected = ["2: fields 'good' and 'bad' a", "3: fields 'good' and 'bad' a"]
    assert [line.split("train.jsonl:")[1][:28] for line in str(problems.value).splitlines()] == expected
    with pytest.raises(DataError, match=r"train.jsonl:1: fields 'good' and 'bad' are equal"):
        loaded(tmp_path, TALK | {"bad": TALK["good"]})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (LETTERS | {"good": said("u:1|a:2")}, "field 'good' is .*; an answer is a text. If it is a conversation"),
        (LETTERS | {"bad": {"a": 1}}, "field 'bad' is .*; an answer is a text. If it is a conversation"),
        (TALK | {"good": [{"from": "gpt", "value": "2"}]}, "field 'good' has no message of the .*; from and value, of"),
        (TALK | {"good": "[oops"}, "field 'good' is text that begins a list, and not JSON"),
        (TALK | {"good": "[" * 100_000}, "field 'good' is text that begins a list, and not JSON"),
        (json.dumps(TALK | {"good": said("u:1|a:?")}).replace("?", "\\ud800"), "field 'good' holds a lone surrogate"),
        (TALK | {"good": json.dumps(said("u:1|a:?")).replace("?", "\\ud800")}, "its messages hold a lone surrogate"),
    ],
)
def test_rows_that_are_no_pair_are_refused_by_line(tmp_path: Path, row: dict[str, Any] | str, reason: str) -> None:
    with pytest.raises(DataError, match=f"train.jsonl:1: {reason}"):
        loaded(tmp_path, row)


def test_another_worse_answer_is_another_data_set(tmp_path: Path) -> None:
    """A resume compares the digest, and so refuses it."""
    assert len({digest_of_prompts(loaded(tmp_path, LETTERS | {"bad": bad})) for bad in ("3", "4", "3")}) == 2


@pytest.mark.parametrize("row", [LETTERS, TALK], ids=["problem", "conversation"])
def test_another_margin_is_another_data_set_and_none_that_of_older_files(tmp_path: Path, row: dict[str, Any]) -> None:
    digests = [digest_of_prompts(loaded(tmp_path, row | {"m": margin}), "margins") for margin in (0.5, 9.0, 0, 0.5)]
    assert (len(set(digests)), digests[0]) == (3, digests[3])
    older = loaded(tmp_path, row, margin=None)
    assert digests[2] == digest_of_prompts(older, "margins") != digests[0]
    for of in OLDER_DIGESTS[1:]:
        assert digest_of_prompts(loaded(tmp_path, row | {"m": 9.0}), of) == digest_of_prompts(older, of)


@pytest.mark.parametrize("of", OLDER_DIGESTS[:2])
def test_an_older_checkpoint_without_margins_resumes_where_templates_write(tmp_path: Path, of: DigestOf) -> None:
    row = LETTERS | {"m": 9.0}
    now = loaded(tmp_path, row, prompt_template="Q: {prompt}")
    state = {"epoch": 0, "position": 0, "num_prompts": len(now), "digest": int(digest_of_prompts(now, of)[:15], 16)}
    PromptStream(now, seed=0).restore(state)
    other = loaded(tmp_path, row | {"q": "other"}, prompt_template="Q: {prompt}")
    with pytest.raises(CheckpointError, match="but with others, by their digest"):
        PromptStream(other, seed=0).restore(state)


def test_a_text_without_a_token_is_refused() -> None:
    one = Prompt(id="p:3", text="", token_ids=(), answer="")
    with pytest.raises(DataError, match="prompt 'p:3': a text of its pair has no token to score"):
        scored_pairs([one], [("a", "")], TOKENIZER, add_special_tokens=False)
