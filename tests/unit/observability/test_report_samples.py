"""Which samples report.html shows, and how much of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.errors import DataError
from rl_megatron.observability import report
from rl_megatron.observability.report import write_report
from rl_megatron.observability.samples import SampleRow, SamplesWriter, SampleTurn
from tests.unit.observability.report_pages import EVIL, a_run


def searched(page: Path) -> dict[str, Any]:
    """What the page's script searches."""
    (text,) = re.findall('<script type="application/json" id="samples">(.*?)</script>', page.read_text(), re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data


def drawn(page: Path) -> str:
    """The page without what its scripts draw."""
    return re.sub("(?s)<script.*?</script>", "", page.read_text())


def test_samples_are_of_the_first_middle_and_last_step_and_marked(tmp_path: Path) -> None:
    text = drawn(write_report([a_run(tmp_path / "a", steps=9)], tmp_path / "r.html"))
    assert [s for s in range(1, 10) if f"said-{s};" in text] == [1, 5, 9]
    assert text.count("✓ right") == 3
    folder = a_run(tmp_path / "b", steps=2)
    text = drawn(write_report([folder], tmp_path / "r.html"))
    assert (text.count("✓ right"), text.count("✗ wrong")) == (1, 1)


def test_a_long_sample_is_shown_by_its_ends_and_prompts_differ_where_they_can(tmp_path: Path) -> None:
    folder, long = a_run(tmp_path / "a"), "begins" + "x" * 1_000_000 + "ends"
    texts = [("one", long), *[("one", f"again-{i};") for i in range(4)], ("two", "its-answer;")]
    SamplesWriter(folder).write(
        SampleRow(step=7, prompt=prompt, completion=text, answer=long, reward=0) for prompt, text in texts
    )
    out = write_report([folder], tmp_path / "r.html")
    text = drawn(out)
    assert out.stat().st_size < 1_000_000
    assert text.count("begins") == text.count("xends") == 5, "four answers and a completion"
    assert f"{len(long) - 20_000:,} characters left out" in text
    assert [f"again-{i};" in text for i in range(4)] == [True, True, False, False]
    assert "its-answer;" in text


def test_turns_are_apart_and_what_was_read_is_told_from_what_was_said(tmp_path: Path) -> None:
    turns = (SampleTurn(read="", said="call 7"), SampleTurn(read="<b>49", said="it is 49"))
    row = SampleRow(step=7, prompt="7*7=", completion="call 7it is 49", answer="49", reward=1, turns=turns)
    SamplesWriter(folder := a_run(tmp_path / "a")).write([row])
    page = write_report([folder], tmp_path / "r.html").read_text()
    shown = [("turn", "call 7"), ("prompt turn", "&lt;b&gt;49"), ("turn", "it is 49")]
    assert "".join(f'<span class="{kind}">{text}</span>' for kind, text in shown) in page


def test_the_latest_samples_can_be_searched_and_a_prompt_is_there_once(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=3)
    turns = (SampleTurn(read="", said="x"), SampleTurn(read=EVIL, said="y"))
    row = SampleRow(step=4, prompt=EVIL, completion="xy", answer="7", reward=0.5, turns=turns)
    SamplesWriter(folder).write([row, row])
    answers = ((3, True), (2, False), (1, True))
    page = write_report([folder], tmp_path / "r.html")
    assert page.read_text().count("<script") == 2  # its own
    assert searched(page) == {
        "prompts": [EVIL, "1+1="],
        "rows": [
            *([4, 0, "7", 0.5, False, 2, [["", "x"], [EVIL, "y"]]],) * 2,
            *([step, 1, "2", float(right), right, 7, [["", f"said-{step};"]]] for step, right in answers),
        ],
    }


@pytest.mark.parametrize("text", ["é" * 1000, "<" * 1000, "\ud800" * 1000])
def test_samples_take_as_many_bytes_of_the_page_as_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The latest are there; each of these characters is six bytes of the page."""
    monkeypatch.setattr(report, "_MOST_SEARCHED", most := 200_000)
    folder = a_run(tmp_path / "a")
    without = write_report([folder], tmp_path / "r.html").stat().st_size
    SamplesWriter(folder).write(
        SampleRow(step=7, prompt=f"{number // 2}", completion=text, answer="", reward=number) for number in range(100)
    )
    page = write_report([folder], tmp_path / "r.html")
    rows = searched(page)["rows"]
    assert [row[3] for row in rows] == [99 - i for i in range(len(rows))]
    assert 0.9 * most < 6000 * len(rows) < most
    assert page.stat().st_size < without + most + 30_000  # some of the last step's are drawn, too


def test_a_sample_of_many_long_turns_is_cut(tmp_path: Path) -> None:
    folder, turn = a_run(tmp_path / "a"), SampleTurn(read="r" * 100_000, said="s" * 100_000)
    row = SampleRow(step=7, prompt="", completion="s" * 10_000_000, answer="", reward=0, turns=(turn,) * 100)
    SamplesWriter(folder).write([row])
    first = searched(write_report([folder], tmp_path / "r.html"))["rows"][0]
    assert (first[0], first[5], len(first[6])) == (7, 10_000_000, 100)
    assert len(json.dumps(first)) < 500_000


def test_a_damaged_line_is_named_or_ends_what_can_be_searched(tmp_path: Path) -> None:
    folder, said = a_run(tmp_path / "a", steps=9), list[str]()
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join([*lines[:7], '{"step": 8}\n', *lines[8:]]))
    with pytest.raises(DataError, match=r"samples\.jsonl: a row of step 8"):
        write_report([folder], tmp_path / "r.html")
    page = write_report([folder], tmp_path / "r.html", said.append)
    assert [row[0] for row in searched(page)["rows"]] == [9]
    assert len(said) == 1


def test_a_run_without_samples_has_nothing_to_search(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    (folder / "samples.jsonl").unlink()
    assert "Search the latest samples" not in write_report([folder], tmp_path / "r.html").read_text()
