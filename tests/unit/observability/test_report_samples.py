"""Which samples report.html shows, and how much of them."""

from __future__ import annotations

from pathlib import Path

from rl_megatron.observability.report import write_report
from rl_megatron.observability.samples import SampleRow, SamplesWriter, SampleTurn
from tests.unit.observability.report_pages import Page, a_run


def test_samples_are_of_the_first_middle_and_last_step_and_marked(tmp_path: Path) -> None:
    text = Page(write_report([a_run(tmp_path / "a", steps=9)], tmp_path / "r.html")).text
    assert [s for s in range(1, 10) if f"said-{s};" in text] == [1, 5, 9]
    assert text.count("✓ right") == 3
    folder = a_run(tmp_path / "b", steps=2)
    text = Page(write_report([folder], tmp_path / "r.html")).text
    assert (text.count("✓ right"), text.count("✗ wrong")) == (1, 1)


def test_a_long_sample_is_shown_by_its_ends_and_prompts_differ_where_they_can(tmp_path: Path) -> None:
    folder, long = a_run(tmp_path / "a"), "begins" + "x" * 1_000_000 + "ends"
    texts = [("one", long), *[("one", f"again-{i};") for i in range(4)], ("two", "its-answer;")]
    SamplesWriter(folder).write(
        SampleRow(step=7, prompt=prompt, completion=text, answer=long, reward=0) for prompt, text in texts
    )
    out = write_report([folder], tmp_path / "r.html")
    text = Page(out).text
    assert out.stat().st_size < 500_000
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
