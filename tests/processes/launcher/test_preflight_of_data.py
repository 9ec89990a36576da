"""The preflight's look at the first rows of files of problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.preflight.checks import preflight
from rl_megatron.config.io import load_config
from tests.processes.launcher.test_preflight import job
from tests.unit.launcher.sites import data_file, site
from tests.unit.launcher.test_memory import QWEN3

TALK = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, ...]:
    return site(tmp_path / "site", QWEN3)


def test_only_the_first_rows_are_read(tmp_path: Path, keys: tuple[str, ...]) -> None:
    from launcher.preflight.problems_of_data import ROWS

    good = {"question": "q", "answer": "1"}
    path = data_file(tmp_path / "long.jsonl", *[good] * ROWS, "bad")
    found = preflight(job(keys, f"data.train={path}"), for_job=True)
    assert found.texts("problem") == []
    assert f"rows of {path} after the first {ROWS}" in found.texts("unchecked")


def test_what_is_trained_on_and_held_out_is_told_before_a_process_starts(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """By the lines of the load, which does it again with all rows; what evaluations do not read is not held out."""
    train = data_file(tmp_path / "train.jsonl", *({"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(9)))
    held = data_file(
        tmp_path / "eval.jsonl", {"question": "of nobody", "answer": "1"}, {"question": " 3  + 1?", "answer": "4"}
    )
    given = (f"data.train={train}", f"data.eval={held}")
    (text,) = preflight(job(keys, *given), for_job=True).texts("problem")
    assert text.splitlines()[0] == f"{train}:4: trained on, but held out in {held}:2 (data)"
    assert text.splitlines()[1].startswith("1 of 9 training problems are held out too")
    for key in ("data.on_leak=drop", "data.on_leak=keep", "data.max_eval=1"):
        assert preflight(job(keys, *given, key), for_job=True).texts("problem") == []


def test_a_row_to_train_on_without_its_demonstration_is_told_and_held_out_rows_need_none(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    rows = [{"question": f"{n}", "answer": "1", "solution": "s" * (n < 2)} for n in range(3)]
    train = data_file(tmp_path / "train.jsonl", *rows)
    held = data_file(tmp_path / "eval.jsonl", {"question": "of nobody", "answer": "1"})
    luffy = ("algorithm=luffy", f"data.train={train}", f"data.eval={held}", "data.demonstration_field=solution")
    (text,) = preflight(job(keys, *luffy), for_job=True).texts("problem")
    assert text == f"{train}:3: field 'solution' is ''; a demonstration is a text; remove the row"


def test_an_answer_that_is_an_object_is_noted_and_a_field_in_it_can_be_named(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """With the object as the answer, the built-in rewards give 0 to right ones."""
    path = data_file(tmp_path / "rows.jsonl", {"question": "2 + 3?", "judge": {"ground_truth": "5", "style": "rule"}})
    given = (f"data.train={path}", f"data.eval={path}", "data.on_leak=keep", "data.answer_field=judge")
    found = preflight(job(keys, *given), for_job=True)
    (said,) = {text for text in found.texts("note") if "object" in text}
    assert said == (
        f"{path}:1: data.answer_field='judge' is an object, and completions are compared with its JSON; a field "
        "in it is named data.answer_field=judge.<field>"
    )
    own = preflight(job(keys, *given, "reward.function=length"), for_job=True)
    assert own.texts("note") == []
    found = preflight(job(keys, *given, "data.answer_field=judge.ground_truth"), for_job=True)
    assert found.texts("note") == found.texts("problem") == []
    assert found.texts("fact")[-1].startswith("reward 'final_number' gives 1 for the answer itself")


@pytest.mark.parametrize(
    ("job_of", "row", "given", "noted"),
    [
        ("sft", {"system": "Be brief.", "input": "3", "question": "q", "answer": "a"}, (), ("system", "input")),
        ("sft", {"system": "Be brief.", "question": "q", "answer": "a", "input": ""}, ("system_field=system",), ()),
        ("rl", {"system_prompt": "Be brief.", "input": "3", "question": "q", "answer": "a"}, (), ("system_prompt",)),
        ("sft", {"m": TALK, "tools": "[{}]", "system": None, "functions": []}, ("messages_field=m",), ("tools",)),
        ("sft", {"input": {"text": "q"}, "answer": "a"}, ("prompt_field=input.text",), ()),
        ("sft", {"m": TALK, "enable_thinking": True}, ("messages_field=m",), ("enable_thinking",)),
        ("sft", {"m": TALK, "tools": [], "system": "Be brief."}, ("messages_field=m", "system_field=system"), ()),
    ],
)
def test_fields_of_published_data_that_no_key_reads_are_noted(
    tmp_path: Path, job_of: str, row: dict[str, object], given: tuple[str, ...], noted: tuple[str, ...]
) -> None:
    path = data_file(tmp_path / "rows.jsonl", row)
    keys = [f"data.{key}" for key in (f"train={path}", f"eval={path}", "type=files", "on_leak=keep", *given)]
    chats = ["data.chat_template=true"] if "system_field=system" in given and "m" not in row else []
    found = preflight(load_config("sft_tiny" if job_of == "sft" else "gsm8k_tiny", [*keys, *chats])).texts("note")
    said = [text for text in found if "which no key of" in text]
    assert [text.split(" have a field ")[1].split(",")[0] for text in said] == [repr(name) for name in noted]
    assert all(text.startswith(f"{path}: 1 of the first 1 rows") for text in said)


@pytest.mark.parametrize(
    ("recipe", "answer", "more", "noted"),
    [
        (
            "gsm8k_tiny",
            r"We have $\boxed{\frac{1}{2}}$.",
            (),
            ":1: the answer is a formula, as of 1 of the first 1 rows",
        ),
        ("gsm8k_tiny", r"\frac{1}{2}", ("reward.function=math_verify",), ""),
        ("gsm8k_tiny", r"$\frac{4}{2}$ is 2\n#### 2", (), ""),
        (
            "gsm8k_tiny",
            ["1", "2"],
            (),
            ":1: data.answer_field='answer' is a list, and completions are compared with its",
        ),
        (
            "sft_tiny",
            ["a", "b"],
            (),
            ":1: data.answer_field='answer' is a list, and its JSON is learnt; write one answer",
        ),
        ("sft_tiny", r"\frac{1}{2}", (), ""),
        ("gsm8k_tiny", '["34"]', (), ":1: data.answer_field='answer' is the JSON text of a list, and completions are"),
        ("gsm8k_tiny", "[3, 4)", (), ""),
        ("sft_tiny", '["34"]', (), ""),
        ("sft_tiny", "1", ("data.prompt_field=asked",), ":1: data.prompt_field='asked' is the JSON text of a list"),
    ],
)
def test_answers_that_are_read_otherwise_than_they_may_be_meant_are_noted(
    tmp_path: Path, recipe: str, answer: object, more: tuple[str, ...], noted: str
) -> None:
    path = data_file(tmp_path / "rows.jsonl", {"question": "q", "answer": answer, "asked": '[{"role": "user"}]'})
    given = [f"data.{key}" for key in (f"train={path}", f"eval={path}", "type=files", "on_leak=keep")]
    found = preflight(load_config(recipe, [*given, *more])).texts("note")
    said = {text.removeprefix(str(path)) for text in found if text.startswith(f"{path}:1: ")}
    assert (len(said), all(text.startswith(noted) for text in said)) == (bool(noted), True)
