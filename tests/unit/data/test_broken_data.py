"""Torn, flipped and odd data files, and problems that are there twice or held out too."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from launcher.build.data import load_data
from rl_megatron.columns import ColumnWriter
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import ArithmeticData, FileData, FileRunData, MixtureData, OneSource
from rl_megatron.data.problems.leaks import (
    OnLeak,
    ProblemTexts,
    find_duplicates,
    find_leaks,
    listed_texts,
    normalize_whitespace,
    rows_to_keep,
)
from rl_megatron.data.problems.parquet import read_records
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.rollout.stream import Draw, LedgerState, PendingPrompt, StreamState
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.types import Prompt
from tests.data_files import written as table
from tests.unit.data.test_prompts import byte_tokenizer

DATA = FileData(type="files", train=Path("t"), eval=Path("e"))


def said(path: Path) -> str:
    """What is said of the file, which is never long; nothing where it is read."""
    text = ""
    try:
        read_records(path, DATA, key="data.train", lists=False)
    except DataError as error:
        text = str(error)
    assert len(text) < 10_000
    return text


def whole(path: Path) -> bytes:
    assert said(table(path, [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(40)])) == ""
    return path.read_bytes()


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_the_deepest_row_that_is_read_can_be_read_from_a_checkpoint(opening: str, tmp_path: Path) -> None:
    """Else a run would write checkpoints that no resume can read. Lists beside each other do not count."""
    deep = {levels: opening * levels + "1" + {"[": "]"}.get(opening, "}") * levels for levels in (127, 128)}
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"question": "a", "answer": "1", "deep": {one}}}\n' for one in deep.values()))
    assert said(path) == f"{path}:2: nested too deep: it has more than 128 lists and objects in each other"
    path.write_text(f'{{"question": "a", "answer": "1", "deep": {deep[127]}, "wide": [{"[], " * 500}[]]}}\n')
    (record,) = read_records(path, DATA, key="data.train", lists=False)
    prompt = Prompt(id="x:1", text="a", token_ids=(1,), answer="1", meta=record.others)
    waiting = PendingPrompt(drawn=Draw(ordinal=0, prompt=prompt, batch=1), birth=0, due=1)
    counts = dict.fromkeys(("version", "drawn", "opened", "credit", "ahead", "calm"), 0)
    stream = StreamState(**counts, batch=(), places=(waiting,), left_out=(), ledger=LedgerState())
    states = TypeAdapter(TrainerState)
    text = states.dump_json(TrainerState(step=1, prompts={"epoch": 0}, stream=stream), context=ColumnWriter())
    read = states.validate_json(text).stream
    assert read is not None
    assert read.places[0].drawn.prompt == prompt


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_torn_file_is_told_or_read(name: str, tmp_path: Path) -> None:
    path, draw = tmp_path / name, random.Random(7)
    data = whole(path)
    for _ in range(150):
        at, flipped = draw.randrange(len(data)), bytearray(data)
        flipped[at] ^= 1 << draw.randrange(8)
        for content in (data[:at], bytes(flipped), bytes(flipped[:at]) + draw.randbytes(8) + data[at + 8 :]):
            path.write_bytes(content)
            said(path)


@pytest.mark.parametrize(
    "line",
    [
        *(
            "[1]",
            "null",
            "7" * 5000,
            "[" * 100_000,
            '{"question": {"a": 1}, "answer": "b"}',
            '{"' + "k" * 50_000 + '": 1}',
        ),
        *('{"question": "\\ud800", "answer": "b"}', '{"question": "a", "answer": NaN}', "\x00", "{}"),
        json.dumps({f"field {i} {'x' * 50}": i for i in range(5000)}),
    ],
)
def test_a_line_that_is_no_row_is_named_in_few_words(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"question": "a", "answer": "b"}}\n{line}\n')
    assert said(path).startswith(f"{path}:2: ")


def columns(*names: str) -> Any:
    return pa.table([pa.array(["a", "b"])] * len(names), names=names)


def test_odd_columns_and_names_are_refused_in_short(tmp_path: Path) -> None:
    pq.write_table(columns("question", "answer", "answer"), tmp_path / "x.parquet")
    assert "2 columns are called 'answer'; keep one of them" in said(tmp_path / "x.parquet")
    pq.write_table(columns("question", *(f"column {i}" for i in range(2000))), tmp_path / "x.parquet")
    assert len(said(tmp_path / "x.parquet")) < 1000
    assert "cannot be read: File name too long" in said(tmp_path / f"{'x' * 300}.jsonl")
    assert "no such file" in said(tmp_path / "a\0b.jsonl")
    assert "unknown extension" in said(tmp_path / f"x.{'y' * 9000}")
    (tmp_path / "x.jsonl").mkdir()
    assert "no such file" in said(tmp_path / "x.jsonl")


# Problems that are there twice, and training problems that are held out too.
def written(path: Path, questions: Sequence[str], answer: str = "4", **more: str) -> Path:
    return table(path, ({"question": one, "answer": answer, **more} for one in questions))


def loaded(
    folder: Path, train: Sequence[str], held_out: Sequence[str], leak: str = "fail", **keys: object
) -> Sequence[Prompt]:
    data = {"type": "files", "train": written(folder / "t.jsonl", train), "eval": written(folder / "e.jsonl", held_out)}
    return load(RunConfig.model_validate({"data": {**data, **keys, "on_leak": leak}}))


def load(config: RunConfig, sets: dict[str, OneSource] | None = None) -> Sequence[Prompt]:
    form, leak = RowForm(tokenizer=byte_tokenizer(), max_tokens=99, on_long_prompt="fail"), config.data.on_leak
    return load_prompts(config.data, form, samples=config.kind.samples, seed=0, on_leak=leak, sets=sets)[0]


def test_an_eval_problem_planted_in_train_with_other_spacing_is_named(tmp_path: Path) -> None:
    train = ["one two", "2+2 is?", " 3 +\n4?\t", "x"]
    with pytest.raises(DataError) as error:
        loaded(tmp_path, train, ["what?", "3 + 4?"], prompt_template="Q: {prompt}")
    expected = f"{tmp_path}/t.jsonl:3: trained on, but held out in {tmp_path}/e.jsonl:2 (data)"
    assert str(error.value).splitlines()[0] == expected
    assert "1 of 4 training problems are held out too" in str(error.value)
    assert "data.on_leak=drop" in str(error.value)


def test_leaks_are_dropped_or_kept_with_their_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, held_out = ["a", "b", "c", "d"], ["c", "a "]
    with caplog.at_level(logging.WARNING):
        assert [one.text for one in loaded(tmp_path, train, held_out, "drop")] == ["b", "d"]
    assert "dropped 2 of 4 training problems that are held out too" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert [one.text for one in loaded(tmp_path, train, held_out, "keep")] == train
    assert "kept, by data.on_leak=keep, 2 of 4 training problems" in caplog.text
    with pytest.raises(DataError, match="data: all 2 problems to train on are held out, or in sources above it"):
        loaded(tmp_path, ["a", "a"], ["a"], "drop")
    assert len(loaded(tmp_path, train, ["z", "c"], max_eval=1)) == 4  # what is not evaluated may be trained on


def test_of_equal_problems_the_first_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [one.id for one in loaded(tmp_path, ["a b", "c", "a  b", "C", " c"], ["z"])] == ["t:1", "t:2", "t:4"]
    assert "dropped 2 of 5 training problems, which are duplicates; the first is " in caplog.text
    assert f"{tmp_path}/t.jsonl:3, a copy of {tmp_path}/t.jsonl:1" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("job", ["sft", "rl"])
def test_each_answer_to_a_question_is_learnt_and_asked_for(tmp_path: Path, kind: str, job: str) -> None:
    """What is held out is the question, whatever its answer."""
    rows = [("a", "1"), ("b", "1"), ("a ", "2"), ("a", " 1"), ("held", "1"), ("held", " other"), ("b", "3")]
    path = table(tmp_path / f"t.{kind}", ({"question": question, "answer": answer} for question, answer in rows))
    held_out = written(tmp_path / "e.jsonl", ["held"], answer="other")
    data = {"type": "files", "train": path, "eval": held_out, "on_leak": "drop"}
    config = load_config("sft_tiny", []) if job == "sft" else RunConfig()
    config = config.model_copy(update={"data": FileRunData.model_validate(data)})
    byte_tokenizer().save_pretrained(tmp_path / "model")
    assert [one.id for one in load_data(config, tmp_path / "model").train] == ["t:1", "t:2", "t:3", "t:7"]


def test_the_same_conversation_in_two_kinds_of_file_is_one(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name, talks in (("one.parquet", (talk,)), ("two.jsonl", (talk, talk[::-1])), ("e.jsonl", (talk * 2,))):
        table(tmp_path / name, ({"talk": one} for one in talks))
    sources = {
        name: {"type": "files", "train": tmp_path / name, "eval": tmp_path / "e.jsonl", "fields": {"messages": "talk"}}
        for name in ("one.parquet", "two.jsonl")
    }
    data = MixtureData.model_validate({"type": "mixture", "sources": {k.split(".")[0]: v for k, v in sources.items()}})
    config = load_config("sft_tiny", []).model_copy(update={"data": data})
    assert [one.id for one in load(config)] == ["one/one:1", "two/two:2"]


def test_the_same_answered_problem_in_two_kinds_of_file_is_one(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": answer} for answer in ("1", "2")]
    table(tmp_path / "one.parquet", rows)
    table(tmp_path / "two.jsonl", [rows[1], rows[1] | {"answer": "3"}])
    held_out = written(tmp_path / "e.jsonl", ["held"])
    sources = {
        name: {"type": "files", "train": tmp_path / file, "eval": held_out}
        for name, file in (("one", "one.parquet"), ("two", "two.jsonl"))
    }
    data = MixtureData.model_validate({"type": "mixture", "sources": sources})
    config = load_config("sft_tiny", []).model_copy(update={"data": data})
    assert [one.id for one in load(config)] == ["one/one:1", "one/one:2", "two/two:2"]


def test_a_problem_may_be_in_several_pairs(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", ["a"], bad="x")
    path.write_text(path.read_text() + written(tmp_path / "q.jsonl", ["a", "a "], bad="y").read_text())
    held_out = written(tmp_path / "e.jsonl", ["z"], bad="x")
    data = {"type": "files", "train": path, "eval": held_out, "fields": {"rejected": "bad"}}
    config = load_config("dpo_tiny", []).model_copy(update={"data": FileRunData.model_validate(data)})
    assert [one.rejected for one in load(config)] == [("x",), ("y",)]


def test_sources_of_a_mixture_and_sets_are_compared_with_each_other(tmp_path: Path) -> None:
    def source(name: str, train: Sequence[str], held_out: Sequence[str]) -> dict[str, object]:
        files = {
            "train": written(tmp_path / f"{name}.jsonl", train),
            "eval": written(tmp_path / f"{name}_e.jsonl", held_out),
        }
        return {"type": "files", **files}

    def mixed(**sources: object) -> RunConfig:
        return RunConfig(data=MixtureData.model_validate({"type": "mixture", "sources": sources}))

    one, other = source("one", ["a", "b"], ["x"]), source("other", ["b", "c"], ["y"])
    assert [prompt.id for prompt in load(mixed(one=one, other=other))] == ["one/one:1", "one/one:2", "other/other:2"]
    with pytest.raises(DataError, match=r"other\.jsonl:1: trained on, but held out in .*one_e\.jsonl:1 \(data.sources"):
        load(mixed(one=one, other=source("other", ["x", "c"], ["y"])))
    with pytest.raises(DataError, match=r"data\.sources\.other: all 2 problems to train on are held out, or"):
        load(mixed(one=one, other=source("other", ["a", "b"], ["y"])))
    aime = FileData(type="files", train=tmp_path / "aime.jsonl", eval=written(tmp_path / "aime.jsonl", ["k", "b"]))
    with pytest.raises(DataError, match=r"one\.jsonl:2: trained on, but held out in .*aime\.jsonl:2 \(eval\.sets"):
        load(mixed(one=one), {"eval.sets.aime.data": aime})


def test_a_set_of_other_sums_may_leak_and_the_runs_own_never() -> None:
    assert len(load(RunConfig())) > 9000
    with pytest.raises(DataError, match=r"trained on, but held out in \d\d\+\d\d \(eval\.sets\.more\.data\)"):
        load(RunConfig(), {"eval.sets.more.data": ArithmeticData(num_eval=512)})


@pytest.mark.parametrize("bits", [64, 3])
def test_rows_are_those_of_a_loop_over_texts(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where most texts have the hash of another."""
    monkeypatch.setattr("rl_megatron.data.problems.leaks.hash", lambda text: hash(text) % 2**bits >> 1, raising=False)
    draw = random.Random(1)
    texts = [f"{draw.randrange(40)}{' ' * draw.randrange(3)}x" for _ in range(200)]
    held_out = [f"{n}  x" for n in range(0, 80, 7)]
    first: dict[str, int] = {}
    wanted = [(row, first[key]) for row, text in enumerate(texts) if first.setdefault(key := norm(text), row) != row]
    ours, theirs = (
        listed_texts([str(i) for i in range(len(one))], map(normalize_whitespace, one)) for one in (texts, held_out)
    )
    assert list(zip(*map(np.ndarray.tolist, find_duplicates(ours, ours.hashes())), strict=True)) == wanted
    rows, places = find_leaks(ours, ours.hashes(), {"eval": theirs})
    held = set(map(norm, held_out))
    assert rows.tolist() == [row for row, text in enumerate(texts) if norm(text) in held]
    assert places == [f"{[norm(one) for one in held_out].index(norm(texts[row]))} (eval)" for row in rows.tolist()]
    assert rows_to_keep(ours, ours, {}, "fail").sum() == len(first)


def norm(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_problem_in_two_environments_is_two_and_leaks_in_both(tmp_path: Path, kind: str) -> None:
    """By `load_data`'s reading of the configuration; the run's own environment is that of a source without one."""

    def file(name: str, texts: Sequence[str]) -> Path:
        return table(tmp_path / f"{name}.{kind}", ({"question": one, "answer": "4"} for one in texts))

    def mixed(other: dict[str, object] | None, held_out: str = "y") -> list[str]:
        one = {"type": "files", "train": file("one", ["a", "b", "a "]), "eval": file("one_e", ["x"])}
        two = {"type": "files", "train": file("two", ["b", " a", "c", "c"]), "eval": file("two_e", [held_out])}
        sources = {"one": one, "two": {**two, **({} if other is None else {"environment": other})}}
        keys = {"data": {"type": "mixture", "sources": sources}, "warm_start": {"steps": 0}}
        config = RunConfig.model_validate({**keys, "environment": {"function": "guess", "template": "plain"}})
        return [one.id for one in load_data(config, tmp_path / "model").train[:]]

    byte_tokenizer().save_pretrained(tmp_path / "model")
    once = ["one/one:1", "one/one:2", "two/two:3"]
    each = ["one/one:1", "one/one:2", "two/two:1", "two/two:2", "two/two:3"]
    assert mixed(None) == mixed({"function": "guess", "max_turns": 3}) == once
    assert mixed({"function": "calculator"}) == each
    assert mixed({"function": "guess", "options": {"largest": 7}}) == each
    with pytest.raises(DataError, match=r"one\.\w+:1: trained on, but held out in .*two_e\.\w+:1 \(data\.sources\.two"):
        mixed({"function": "calculator"}, "a")


def trained_on(folder: Path, data: Mapping[str, object], **keys: object) -> list[str]:
    """The ids of the problems to train on, by `load_data`'s reading of the configuration."""
    byte_tokenizer().save_pretrained(folder / "model")
    config = RunConfig.model_validate({"data": data, "warm_start": {"steps": 0}, **keys})
    return [one.id for one in load_data(config, folder / "model").train[:]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ({}, [1]),
        ({"reward": {"function": "tests", "tests": {"field": "of.tests"}}}, [1, 2]),
        ({"reward": {"parts": {"mine": {"function": "mine:reward"}, "length": 1}}}, [1, 2, 3]),
        ({"reward": {"function": "http://127.0.0.1:1/"}}, [1, 2, 3]),
        ({"environment": {"function": "mine:Room", "template": "plain"}}, [1, 2, 3]),
        ({"environment": {"function": "guess", "template": "plain"}}, [1]),
    ],
)
def test_what_a_reward_or_an_environment_reads_makes_another_problem(
    tmp_path: Path, kind: str, keys: dict[str, object], lines: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Among rows to train on, and beside those that are held out; custom code may read every field."""
    rows = [
        {"question": "Find it.", "answer": "yes", "of": {"tests": tests, "level": level}}
        for tests, level in (("a", 1), ("b", 1), ("a", 2), ("a", 1))
    ]
    files = {"type": "files", "train": table(tmp_path / f"t.{kind}", rows)}
    other = {**rows[0], "answer": "no", "of": {"tests": "c", "level": 3}}
    apart = {**files, "eval": table(tmp_path / "e.jsonl", [{**other, "question": "Else?"}])}
    assert trained_on(tmp_path, apart, **keys) == [f"t:{line}" for line in lines]
    asks = str(keys.get("environment", {})).count("mine")  # the fields, in a way that nobody knows
    held = {**files, "eval": table(tmp_path / "e.jsonl", [{**(rows[1] if asks else other), "question": " Find  it."}])}
    match = rf"t\.{kind}:{1 + asks}: trained on, but held out in .*e.jsonl:1 \(data\)\n(.*\n)*{1 if asks else 4} of 4 "
    with pytest.raises(DataError, match=match):
        trained_on(tmp_path, held, **keys)
    with pytest.raises(DataError, match="all 4 problems") if not asks else nullcontext():
        assert trained_on(tmp_path, {**held, "on_leak": "drop"}, **keys) == ["t:1", "t:3"]
    if asks:
        apart["eval"] = table(tmp_path / "e.jsonl", [other])
        assert trained_on(tmp_path, apart, **keys) == [f"t:{line}" for line in lines]
        said = "4 of 4 training problems have the text of a held-out one but another context"
        assert f"{said}; first: {tmp_path}/t.{kind}:1" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"prompt_template": "({prompt})"}, True),
        ({"prompt_template": "{prompt} Think."}, True),
        ({"chat_template": True}, True),
        ({"chat_template": True, "fields": {"system": "system"}}, True),
        ({"reward": {"function": "math_verify"}}, True),
        ({"reward": {"function": "exact_match"}}, False),
        ({"weight": 2}, False),
    ],
)
def test_a_file_under_two_templates_or_rewards_has_two_problems_a_row(
    tmp_path: Path, kind: str, other: dict[str, object], both: bool
) -> None:
    rows = [{"question": f"{n}?", "answer": "4", "system": "Be brief."} for n in (1, 2, " 2")]
    held_out = table(tmp_path / "e.jsonl", [{"question": "9?", "answer": "4", "system": ""}])
    one = {"type": "files", "train": table(tmp_path / f"t.{kind}", rows), "eval": held_out}
    two = {**one, "train": table(tmp_path / f"u.{kind}", [*rows, *[{"question": "3?", "answer": "4", "system": ""}]])}
    found = trained_on(tmp_path, {"type": "mixture", "sources": {"one": one, "two": {**two, **other}}})
    again = ["two/u:1", "two/u:2"] if both else []
    assert found == ["one/t:1", "one/t:2", *again, "two/u:4"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_equal_prompt_leaks_whether_its_words_are_the_rows_or_the_templates(tmp_path: Path, kind: str) -> None:
    train = table(tmp_path / f"t.{kind}", [{"question": "Solve: 1?", "answer": "4"}, {"question": "1?", "answer": "4"}])
    data = {"type": "files", "train": train, "eval": table(tmp_path / "e.jsonl", [{"question": "9?", "answer": "4"}])}
    solved = {"type": "files", "train": train, "prompt_template": "Solve: {prompt}"}
    sets = {"s": {"data": {**solved, "eval": table(tmp_path / "s.jsonl", [{"question": "1? ", "answer": "4"}])}}}
    with pytest.raises(DataError, match=rf"t\.{kind}:1: trained on, but held out in .*s.jsonl:1 .*\n1 of 2 training"):
        trained_on(tmp_path, data, eval={"sets": sets})


@pytest.mark.parametrize("weights", [None, {"a": 1.0}])
def test_a_resume_keeps_a_new_sets_leaks_or_says_that_it_drops_them(weights: Mapping[str, float] | None) -> None:
    ours = listed_texts([f"train.jsonl:{row}" for row in range(9)], map(str, range(9)))
    new = {"eval.sets.new.data": listed_texts(["new.jsonl:1"], ["7"])}

    def stream(held_out: Mapping[str, ProblemTexts], on_leak: OnLeak) -> PromptStream:
        rows = np.flatnonzero(rows_to_keep(ours, ours, held_out, on_leak)).tolist()
        prompts = [Prompt(id=f"{row}", text=f"{row}", token_ids=(row,), answer="", source="a") for row in rows]
        return PromptStream(prompts, seed=1, weights=weights)

    before = stream({}, "fail")
    before.next_prompts(5)
    with pytest.raises(DataError, match=r"data\.on_leak=.* or keep, with which a run .* can be resumed"):
        stream(new, "fail")
    kept = stream(new, "keep")
    kept.restore(before.state())
    assert kept.next_prompts(20) == before.next_prompts(20)
    with pytest.raises(CheckpointError, match=r"data\.on_leak and eval\.sets by which the same problems are dropped"):
        stream(new, "drop").restore(before.state())


@pytest.mark.parametrize(("third", "goes_on"), [(("a ", "1"), True), (("z", "3"), True), (("a", "3"), False)])
def test_a_run_of_0_3_0_goes_on_with_equal_problems(tmp_path: Path, third: tuple[str, str], goes_on: bool) -> None:
    """That version wrote this state of each of these files, whose third row it dropped."""
    state = {"epoch": 0, "position": 1, "num_prompts": 2, "digest": 184590635176733261}
    rows = [{"question": q, "answer": a} for q, a in (("a", "1"), ("b", "2"), third)]
    train, held_out = table(tmp_path / "t.jsonl", rows), table(tmp_path / "e.jsonl", [{"question": "z", "answer": "1"}])
    byte_tokenizer().save_pretrained(tmp_path / "model")
    data = {"type": "files", "train": train, "eval": held_out, "on_leak": "drop"}
    config = RunConfig.model_validate({"data": data, "warm_start": {"steps": 0}})
    stream = PromptStream(load_data(config, tmp_path / "model").train, seed=1)
    if not goes_on:
        with pytest.raises(
            CheckpointError, match=r"with 2 .* prompts, but the data has 3; .* an older version of rl_meg"
        ):
            stream.restore(state)
    else:
        stream.restore(state)
        assert [one.id for one in stream.next_prompts(3)] == ["t:2", "t:1", "t:2"]
