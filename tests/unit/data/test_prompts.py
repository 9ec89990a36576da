"""Arithmetic and file data, and the resumable stream of prompts: its order and what a resume compares."""

from __future__ import annotations

import datetime
import json
import logging
import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing
from typing_extensions import override

from rl_megatron.agents.conversation.templates import PlainText
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.data import ArithmeticData, FileData
from rl_megatron.data.problems.pool import ListPool, PromptPool, PromptStream
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.errors import CheckpointError, ConfigError, DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Prompt
from tests.data_files import written

ROWS = [
    {"question": "Weng earns $12 an hour. How much in 50 minutes?", "answer": "12/60 = <<12/60=0.2>>0.2\n#### 10"},
    {"question": "Natalia sold 48 clips, then half as many. How many?", "answer": "48+24 = <<48+24=72>>72\n#### 72"},
    {"question": "Wie viel kostet das? Ein Café für 3 €.", "answer": "#### 3"},
]


def load(data: ArithmeticData | FileData, *, limit: int = 100, long: str = "fail", seed: int = 0):
    train, held_out = load_prompts(
        data, RowForm(tokenizer=byte_tokenizer(), max_tokens=limit, on_long_prompt=long), seed=seed
    )
    return list(train), held_out


def files(path: Path, **keys: object) -> FileData:
    return FileData(type="files", train=path, eval=path, **keys)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return written(tmp_path / "train.jsonl", ROWS)


def addends(prompt: Prompt) -> tuple[int, int]:
    a, b = prompt.text.removesuffix("=").split("+")
    return int(a), int(b)


@pytest.mark.parametrize("digits", [1, 2])
def test_all_sums_are_there_and_no_held_out_sum_is_trained_on_in_either_order(digits: int) -> None:
    train, held_out = load(ArithmeticData(digits=digits, num_eval=20))
    assert len(held_out) == 20
    trained, withheld = {addends(p) for p in train}, {addends(p) for p in held_out}
    swapped = {(b, a) for a, b in withheld}
    assert not trained & (withheld | swapped)
    limit = 10**digits
    assert trained | withheld | swapped == {(a, b) for a in range(limit) for b in range(limit)}
    for prompt in train + held_out:
        assert int(prompt.answer[::-1]) == sum(addends(prompt))
        assert bytes(prompt.token_ids).decode() == prompt.text
    assert len({p.id for p in train + held_out}) == len(train) + len(held_out)


def test_sums_are_sampled_and_split_by_the_seed() -> None:
    train, held_out = load(ArithmeticData(digits=6))
    assert len({p.id for p in train}) == len(train) > 30_000
    assert max(max(addends(p)) for p in train) > 990_000
    assert not {tuple(sorted(addends(p))) for p in train} & {tuple(sorted(addends(p))) for p in held_out}
    first, again, other = (load(ArithmeticData(num_eval=8), seed=seed)[1] for seed in (0, 0, 1))
    assert first == again
    assert first != other
    with pytest.raises(ConfigError, match=r"data.num_eval=256 .* data.digits=1 has 55"):
        load(ArithmeticData(digits=1))


def test_jsonl_rows_become_prompts(jsonl: Path) -> None:
    train, held_out = load(files(jsonl, prompt_template="Q: {prompt} {x}\nA:", max_eval=2))
    assert [p.id for p in train] == ["train:1", "train:2", "train:3"]
    assert train[1].text == f"Q: {ROWS[1]['question']} {{x}}\nA:"
    assert train[1].answer.endswith("#### 72")
    assert bytes(train[2].token_ids).decode() == train[2].text
    assert held_out == train[:2]


@pytest.mark.parametrize("front", [(), (258,)])
def test_an_end_that_the_tokenizer_puts_behind_every_text_is_not_a_prompts(jsonl: Path, front: tuple[int, ...]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>" if front else "$A <eos>", special_tokens=[("<eos>", 257), ("<bos>", 258)]
    )
    found, _ = load_prompts(files(jsonl), RowForm(tokenizer=tokenizer, max_tokens=100, on_long_prompt="fail"), seed=0)
    assert [prompt.token_ids for prompt in found] == [front + prompt.token_ids for prompt in load(files(jsonl))[0]]
    begun, _ = PlainText(tokenizer).begin([{"role": "user", "content": "1+1="}], ())
    assert tuple(begun) == (*front, *b"1+1=")


def test_the_chat_template_is_applied(jsonl: Path) -> None:
    train, _ = load(files(jsonl, chat_template=True))
    assert train[0].text == f"user: {ROWS[0]['question']}\nassistant: "


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}", "{{ raise_exception('no user') }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"],
)
def test_a_chat_template_that_fails_is_named_with_its_row(template: str, jsonl: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    form = RowForm(tokenizer=tokenizer, max_tokens=100, on_long_prompt="fail")
    with pytest.raises(DataError, match=r"train\.jsonl:1: the tokenizer's chat template fails at it: \w+Error: "):
        load_prompts(files(jsonl, chat_template=True), form, seed=0)


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path, good = tmp_path / "bad.jsonl", json.dumps(ROWS[0]).encode()
    lines = [
        *(good, b'{"question": "x"', b"[1]", b"", b'{"question": "\xff", "answer": "1"}'),
        *(b'{"questoin": "x", "answer": "1"}', b'{"question": 72, "answer": "x"}'),
        *(b'{"question": [{"role": "user", "content": "x"}], "answer": "x"}', b'{"question": "x", "answer": null}'),
        *(b'{"question": "x", "answer": " "}', b'{"question": "\\ud800", "answer": "1"}'),
        b"[" * 100_000,
        b'{"question": "\\ud83d\\ude00", "answer": "1", "from": {"title": "\\u00e4 \\uD83D"}}',
        b'{"question": "\\ud83d\\ude00", "answer": "1", "a\\udc00": 1}',
        good.replace(b"}", b', "from": "\\ud83d\\ude00"}'),
    ]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError) as caught:
        load(files(path))
    wanted = {
        2: "not JSON",
        3: "it must be a JSON object, not list",
        4: "blank line",
        5: "not UTF-8 at byte 15",
        6: "did you mean 'questoin'",
        7: "'question' is 72 (int); it must be text, so quote it",
        8: "(list); it must be text, or a list of messages, which data.chat_template=true renders",
        9: "'answer' is None (NoneType); the row has no value, or a number that is not finite, so remove it",
        10: "'answer' is empty",
        11: "field 'question' holds a lone surrogate",
        12: "not JSON",
        13: "field 'from' holds a lone surrogate",
        14: "field 'a\\udc00' holds a lone surrogate",
    }
    reported = str(caught.value).split("\n")
    assert len(reported) == len(wanted)
    for line, (number, text) in zip(reported, wanted.items(), strict=True):
        assert line.startswith(f"{path}:{number}: ")
        assert text in line


def test_bad_rows_are_named_and_not_printed_whole(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("x\n" * 1000)
    with pytest.raises(DataError, match="and 980 more bad rows"):
        load(files(path))
    path = tmp_path / "bad.parquet"
    questions = pa.array([b"ok", None, b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"question": questions, "answer": ["1", "2", "3"]}), path)
    with pytest.raises(DataError) as caught:
        load(files(path))
    second, third = str(caught.value).split("\n")
    assert second.startswith(f"{path}:2: field 'question' is None")
    assert third.startswith(f"{path}:3: field 'question' is not UTF-8 at byte 1")


def test_a_parquet_file_with_other_columns_or_types_or_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"questions": ["a"], "answer": ["1"]}), path)
    with pytest.raises(DataError, match=r"no field 'question'.*did you mean 'questions'"):
        load(files(path))
    pq.write_table(pa.table({"question": [1], "answer": ["a"]}), path)
    with pytest.raises(DataError, match=r"x.parquet: column 'question' is of int64; it must be text, so write it"):
        load(files(path))
    pq.write_table(pa.table({"question": [[{"role": "user", "content": "a"}]], "answer": ["a"]}), path)
    with pytest.raises(DataError, match=r"is of list<.*; it must be text, or a list of messages, which data"):
        load(files(path))
    path.write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match="not a readable parquet file"):
        load(files(path))


def test_a_byte_order_mark_is_no_part_of_the_first_row(jsonl: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked" / jsonl.name
    marked.parent.mkdir()
    marked.write_bytes(b"\xef\xbb\xbf" + jsonl.read_bytes())
    assert load(files(marked)) == load(files(jsonl))
    marked.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(DataError, match="the file is empty"):
        load(files(marked))


SEVERAL = r"no such file; give one file, or a folder of .parquet files \(several files are sources of data=mixture\)"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "the file is empty"),
        ("train.csv", "a,b", "unknown extension '.csv'; allowed: .jsonl, .parquet"),
        ("missing.jsonl", None, "data.train=.*no such file$"),
        ("[a.jsonl,b.jsonl]", None, SEVERAL),
        ("a.jsonl,b.jsonl", None, SEVERAL),
        ("*.parquet", None, SEVERAL),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load(files(path))


def test_a_template_without_a_place_for_the_problem_is_refused(jsonl: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.prompt_template='Q'"):
        load(files(jsonl, prompt_template="Q"))


def test_long_prompts_fail_or_are_dropped_and_counted(jsonl: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [len(row["question"].encode()) for row in ROWS]
    limit, longest = sorted(lengths)[1], lengths.index(max(lengths)) + 1
    with pytest.raises(DataError, match=rf"train.jsonl:{longest}: the prompt has {max(lengths)} tokens.*={limit}"):
        load(files(jsonl), limit=limit)
    with caplog.at_level(logging.WARNING):
        train, _ = load(files(jsonl), limit=limit, long="drop")
    assert len(train) == 2
    assert "dropped 1 of 3 prompts" in caplog.text
    with pytest.raises(DataError, match="3 of 3 prompts are too long"):
        load(files(jsonl), limit=1, long="drop")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_all_other_fields_of_a_row_are_the_prompts_meta(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    other = {"source": "é", "level": 3, "share": 0.5, "tests": [{"in": "1", "out": [2]}], "none": None, "right": True}
    written(path, [{"question": "q", "answer": 72, **other}, {"question": "r", "answer": 73, **other}])
    train, _ = load(files(path))
    assert [(p.text, p.answer) for p in train] == [("q", "72"), ("r", "73")]
    assert train[0].meta == {**other, "answer": 72}
    assert json.loads(json.dumps(train[0].meta)) == train[0].meta


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_field_of_an_object_is_named_by_a_path_and_one_of_that_name_comes_first(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    rows = [{"extra": {"asked": "q", "deep": {"x": n}}, "judge": {"truth": "no"}, "judge.truth": "7"} for n in range(2)]
    written(path, rows)
    (one, _), held_out = load(files(path, fields={"prompt": "extra.asked", "answer": "judge.truth"}))
    assert [one.text, one.answer, held_out[0].answer] == ["q", "7", "7"]
    assert one.meta == {"extra": rows[0]["extra"], "judge": rows[0]["judge"]}
    (_, two), held_out = load(files(path, fields={"prompt": "extra.asked", "answer": "extra.deep.x"}))
    assert [two.answer, held_out[1].answer] == ["1", "1"]
    with pytest.raises(DataError, match=r"no field 'truth'; it has extra.asked, extra.deep.x, judge.truth"):
        load(files(path, fields={"prompt": "extra.asked", "answer": "truth"}))
    with pytest.raises(DataError, match=r"no field 'judge.truht'; .* did you mean 'judge.truth'"):
        load(files(path, fields={"prompt": "extra.asked", "answer": "judge.truht"}))
    with pytest.raises(DataError, match="it must be text, or a list of messages, which data"):
        load(files(path, fields={"prompt": "extra.deep", "answer": "judge.truth"}))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (0.5, "0.5"),
        (1e-05, "0.00001"),
        (-2.5e16, "-25000000000000000"),
        (["a", "é"], '["a", "é"]'),
        ({"x": 1}, '{"x": 1}'),
        (True, "true"),
        ("7", "7"),
    ],
)
def test_an_answer_that_is_no_text_is_the_text_that_json_has_for_it(tmp_path: Path, answer: object, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": answer}))
    ((prompt,), _) = load(files(path))
    assert prompt.answer == text
    assert prompt.meta == ({} if answer == "7" else {"answer": answer})


def test_what_json_has_not_is_null_or_text_in_meta(tmp_path: Path) -> None:
    line = tmp_path / "rows.jsonl"
    line.write_text('{"question": "q", "answer": "a", "x": NaN, "y": [-Infinity, 1e400, 1.5]}')
    assert load(files(line))[0][0].meta == {"x": None, "y": [None, None, 1.5]}
    table, days = tmp_path / "rows.parquet", pa.array([datetime.date(2026, 1, 2)])
    named = {"question": ["q"], "answer": ["a"], "x": [math.nan], "day": days, "raw": [b"\xff"], "deep": [{"z": b"0"}]}
    pq.write_table(pa.table(named), table)
    assert load(files(table))[0][0].meta == {"x": None, "day": "2026-01-02", "raw": "/w==", "deep": {"z": "0"}}


def test_a_prompt_of_too_many_characters_is_never_tokenized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """20 MB would take half a minute; a tokenizer that raises shows that it is not asked."""
    path = tmp_path / "rows.jsonl"
    written(path, ({"question": q, "answer": "a"} for q in ("fits", "x" * 1001)))

    class Picky:
        def __call__(self, texts: list[str] | str, **options: object) -> object:
            assert texts in (["fits"], "a")  # the second shows what it puts behind a text
            return byte_tokenizer()(texts, **options)

    form = RowForm(tokenizer=Picky(), max_tokens=10, on_long_prompt="drop")
    train, _ = load_prompts(files(path, max_eval=1), form, seed=0)
    assert [p.text for p in train] == ["fits"]
    assert caplog.text.endswith(f"the first is {path}:2 with 1001 characters\n")
    with pytest.raises(DataError, match=r"rows.jsonl:2: the prompt has 1001 characters, rollout.max_prompt_tokens=10"):
        load_prompts(files(path), replace(form, on_long_prompt="fail"), seed=0)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_written_text_names_keys_of_long_prompts(tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    path, short = tmp_path / f"rows{suffix}", tmp_path / "short.jsonl"
    rows = [{"question": question, "answer": "a"} for question in ("fits", "x" * 30)]
    written(short, [{"question": "held out", "answer": "a"}])
    written(path, rows)
    keys = load_config("sft_tiny", []).prompt_limit_keys
    form = RowForm(tokenizer=byte_tokenizer(), max_tokens=10, on_long_prompt="fail", keys=keys)
    data = FileData(type="files", train=path, eval=short)
    with pytest.raises(DataError, match=r":2: the prompt has 30 tokens, sft.max_tokens=10.* set sft.on_long=drop"):
        load_prompts(data, form, seed=0)[0][:]
    train, _ = load_prompts(data, replace(form, on_long_prompt="drop"), seed=0)
    PromptStream(train, seed=0).next_prompts(2)
    assert "more tokens than sft.max_tokens=10" in caplog.text or "more than sft.max_tokens=10" in caplog.text


def test_prompts_are_tokenized_few_at_a_time_and_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written(path, ({"question": f"q{i}", "answer": "a"} for i in range(2500)))
    sizes = []

    class Counting:
        def __call__(self, texts: list[str] | str, **options: object) -> object:
            sizes.extend([len(texts)] if isinstance(texts, list) else [])
            return byte_tokenizer()(texts, **options)

    form = RowForm(tokenizer=Counting(), max_tokens=99, on_long_prompt="fail")
    train, _ = load_prompts(files(path, max_eval=1), form, seed=0)
    assert sizes == [1000, 1000, 500, 1]
    assert [bytes(p.token_ids).decode() for p in train] == [f"q{i}" for i in range(2500)]


# The stream of prompts: its order over epochs, what is left out, and what a resume compares.
def prompts(n: int) -> list[Prompt]:
    return [Prompt(id=str(i), text="", token_ids=(i,), answer="") for i in range(n)]


def test_an_epoch_is_numpys_permutation_of_every_prompt() -> None:
    """A resume of an older checkpoint goes on in the same order."""
    held = prompts(50)
    wanted = [held[row] for epoch in (0, 1) for row in np.random.default_rng([5, epoch]).permutation(50).tolist()]
    assert PromptStream(held, seed=5).next_prompts(100) == wanted
    stream = PromptStream(prompts(20), seed=0)
    epochs = [[p.id for p in stream.next_prompts(20)] for _ in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("taken", [0, 3, 7, 10, 14, 33])
def test_a_restored_stream_continues_in_the_same_order(taken: int) -> None:
    whole = PromptStream(prompts(7), seed=5).next_prompts(taken + 40)
    first = PromptStream(prompts(7), seed=5)
    first.next_prompts(taken)
    second = PromptStream(prompts(7), seed=5)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.next_prompts(40) == whole[taken:]


def test_what_is_left_out_comes_no_more_and_all_others_in_the_same_order() -> None:
    whole, stream = PromptStream(prompts(7), seed=5).next_prompts(28), PromptStream(prompts(7), seed=5)
    assert stream.next_prompts(7) == whole[:7]
    stream.exclude(whole[2])
    wanted = [prompt for prompt in whole[7:] if prompt.id != whole[2].id]
    assert stream.next_prompts(4) == wanted[:4]
    again = PromptStream(prompts(7), seed=5)
    again.restore(stream.state(), sorted(stream.left_out))
    assert stream.next_prompts(14) == again.next_prompts(14) == wanted[4:]
    for prompt in prompts(6):
        stream.exclude(prompt)
    with pytest.raises(DataError, match="no prompts are left to train on: none of 7 can be sampled"):
        stream.exclude(prompts(7)[6])


def dated(folder: Path, today: str) -> PromptPool:
    """The prompts of a start on that day, by a chat template that writes it."""
    path, tokenizer = folder / "train.jsonl", byte_tokenizer()
    path.write_text("".join(json.dumps({"question": f"1+{i}?", "answer": "4"}) + "\n" for i in range(5)))
    tokenizer.chat_template = f"{today}: {{{{ messages[0].content }}}}"
    data = FileData(type="files", train=path, eval=path, chat_template=True)
    return load_prompts(data, RowForm(tokenizer=tokenizer, max_tokens=99, on_long_prompt="fail"), seed=0)[0]


@pytest.mark.parametrize("weights", [None, {"": 1.0}])
def test_a_run_with_the_date_in_its_prompts_resumes_later(tmp_path: Path, weights: dict[str, float] | None) -> None:
    first = PromptStream(dated(tmp_path, "26 Nov"), seed=0, weights=weights)
    first.next_prompts(1)
    second = PromptStream(dated(tmp_path, "27 Nov"), seed=0, weights=weights)
    second.restore(first.state())
    (there,), (here,) = first.next_prompts(1), second.next_prompts(1)
    assert (there.id, there.text, here.text) == (here.id, f"26 Nov: {here.question}", f"27 Nov: {here.question}")


def test_a_checkpoint_of_an_older_version_resumes_and_other_questions_do_not(tmp_path: Path) -> None:
    """Its digest is of the prompts' texts, as it still is of prompts without a question."""
    pool = dated(tmp_path, "26 Nov")
    older = PromptStream([replace(one, question="") for one in pool], seed=0).state()
    PromptStream(pool, seed=0).restore(older)
    other = [replace(one, question=f"{one.question}!", text=f"{one.text}!") for one in pool]
    for state in (older, PromptStream(pool, seed=0).state()):
        with pytest.raises(CheckpointError, match="but with others, by their digest; resume with the same files"):
            PromptStream(other, seed=0).restore(state)


def test_a_state_of_other_data_is_refused() -> None:
    state = PromptStream(prompts(7), seed=0).state()
    with pytest.raises(CheckpointError, match="made with 7 training prompts, but the data has 8"):
        PromptStream(prompts(8), seed=0).restore(state)


class Walked(list[Prompt]):
    """Counts how often all of it is visited."""

    walks = 0

    @override
    def __iter__(self) -> Iterator[Prompt]:
        self.walks += 1
        return super().__iter__()


def test_a_prompt_is_left_out_without_a_walk_over_all_once_they_are_read_ahead() -> None:
    """The event loop leaves it out; over a million prompts in memory a walk takes it a second."""
    held = Walked(prompts(5))
    stream = PromptStream(held, seed=0)
    stream.read_ahead()
    before = held.walks
    stream.exclude(held[3])
    assert (stream.left_out, held.walks) == ({3}, before)


class OneHash(str):
    """A name whose hash is that of each other."""

    __slots__ = ()

    @override
    def __hash__(self) -> int:
        return 7


def test_rows_are_found_by_names_of_equal_hashes_and_at_twelve_bytes_a_prompt() -> None:
    names = [OneHash(name) for name in "abc"]
    few = ListPool([replace(one, id=name) for one, name in zip(prompts(3), names, strict=True)])
    assert [few.find_row(name) for name in names] == [0, 1, 2]
    with pytest.raises(KeyError):
        few.find_row(OneHash("d"))
    many = ListPool(prompts(4096))
    tracemalloc.start()
    try:
        assert [many.find_row(str(row)) for row in range(4096)] == list(range(4096))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4096 * 24  # of a dict it would be 51 or more
