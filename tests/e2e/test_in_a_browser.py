"""A run's report in a real browser, at a desk's and a phone's width: what a user sees and does there."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_megatron.observability.report import write_report
from rl_megatron.observability.samples import SampleRow, SamplesWriter, SampleTurn
from tests.chromium import PROGRAM, Browser
from tests.unit.observability.report_pages import EVIL, a_run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium")
WIDTHS = [pytest.param(1440, 900, id="desk"), pytest.param(390, 844, id="phone")]
TURNS = (SampleTurn(read="", said="first"), SampleTurn(read=f"tool {EVIL}", said="second"))
CARDS = "[...document.querySelectorAll('#found article')].map((card) => card.querySelector('pre').textContent)"
STEPS = "[...document.querySelectorAll('.tile')].find((e) => e.textContent.includes('Steps'))?.textContent ?? ''"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser, whose page has met no fault and asked for nothing but itself."""
    browser.show("about:blank", 1440, 900)
    browser.faults.clear()
    browser.requests.clear()
    yield browser
    assert browser.faults == []
    assert [url for url in browser.requests if not url.endswith((".html", "about:blank"))] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose samples have hostile texts, rewards outside of 0 to 1, and turns."""
    folder = a_run(tmp_path_factory.mktemp("runs") / "one", steps=40)
    rewards = {"low": -2.5, "lower": -40.0, "high": 12.0}
    samples = SamplesWriter(folder)
    samples.write(
        SampleRow(step=40, prompt=f"asked {EVIL}", completion=f"{name} {EVIL}", answer="A", reward=reward)
        for name, reward in rewards.items()
    )
    samples.write([SampleRow(step=39, prompt="two", completion="firstsecond", answer="A", reward=-7.0, turns=TURNS)])
    samples.close()
    return folder


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    return write_report([run], run / "report.html")


def opened(page: Browser, report: Path, width: int, height: int) -> None:
    page.show(report.as_uri(), width, height)
    page.until("document.querySelector('#found article')")


def fits(page: Browser) -> bool:
    """Whether nothing is wider than the window."""
    return bool(page.value("document.documentElement.scrollWidth <= innerWidth"))


def found(page: Browser, **fields: object) -> list[str]:
    """The texts of the samples that the form finds."""
    form, clear = "form = document.getElementById('search')", "[...form.elements].forEach((e) => { e.value = ''; });"
    set_ = "".join(f"form.elements[{json.dumps(name)}].value = {json.dumps(str(v))};" for name, v in fields.items())
    page.value(f"{{ const {form}; {clear} {set_} form.dispatchEvent(new Event('input')); }}")
    texts: list[str] = page.value(CARDS)
    return texts


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_the_first_screen_has_accuracy_reward_and_where_the_time_goes(
    page: Browser, report: Path, width: int, height: int
) -> None:
    opened(page, report, width, height)
    assert fits(page)
    names = "[...document.querySelectorAll('figure svg')].map((e) => e.getAttribute('aria-label'))"
    assert [name.split(".")[0].split(",")[0] for name in page.value(names)[:3]] == [
        *("Reward", "Held-out accuracy", "Where the time goes")
    ]
    last = 2 if width > 600 else 0  # of the charts, in the window
    bottom = f"document.querySelectorAll('figure svg')[{last}].getBoundingClientRect().bottom"
    assert page.value(bottom) <= height


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_samples_are_searched_read_by_turns_and_by_group(page: Browser, report: Path, width: int, height: int) -> None:
    opened(page, report, width, height)
    assert found(page, text="no such") == []
    below = found(page, least_reward=-10, most_reward=-1)
    assert below == [f"twofirsttool {EVIL}second", f"asked {EVIL}low {EVIL}"]
    assert found(page, least_reward=5) == [f"asked {EVIL}high {EVIL}"]
    assert page.value("document.querySelectorAll('#found .turn').length") == 0
    assert found(page, text="TOOL", step=39) == below[:1]
    assert page.value("[...document.querySelectorAll('#found .turn')].map((e) => e.textContent.slice(0, 6))") == [
        *("first", "tool <", "second")
    ]
    assert len(found(page, least_length=11, most_length=11)) == 1
    assert len(found(page, text="high")) == 1
    page.value("document.querySelector('#found button').click()")
    assert [text.replace(EVIL, "") for text in page.value(CARDS)] == ["asked high ", "asked lower ", "asked low "]
    assert fits(page)
    page.value("document.querySelector('#found button').click()")
    assert len(page.value(CARDS)) == 1  # the search before


def test_right_and_wrong_are_told_apart_by_color_and_by_the_form(page: Browser, report: Path) -> None:
    opened(page, report, 1440, 900)
    colors = set[str]()
    for result in ("right", "wrong"):
        assert len(found(page, result=result, text="said-")) == 20
        edges = "[...document.querySelectorAll('#found article')].map((e) => getComputedStyle(e).borderLeftColor)"
        (color,) = set(page.value(edges))
        colors.add(color)
    assert len(colors) == 2
    assert len(found(page)) == 44


def trained(run: Path, step: int) -> None:
    """One more step, with a sample."""
    samples = SamplesWriter(run)
    samples.write([SampleRow(step=step, prompt="asked ", completion=f"of step {step}", answer="A", reward=0.0)])
    samples.close()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"phase": "rl", "step": step, "reward/mean": 4.0, "seconds/step": 2.0}) + "\n")


def test_the_page_of_a_run_that_goes_on_loads_itself_and_keeps_its_place(
    page: Browser, run: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(run, tmp_path / "growing")
    report = write_report([own], own / "report.html", again=0.5)
    opened(page, report, 1440, 900)
    assert "the run goes on" in page.value("document.querySelector('header').textContent")
    trained(own, step=41)
    assert len(found(page, text="said-")) == 40
    page.value("document.getElementById('search').scrollIntoView()")
    assert page.value("scrollY") > 100
    write_report([own], report, again=0.5)
    page.until(f"({STEPS}).includes('41 of') && document.querySelector('#found article')")
    assert len(page.value(CARDS)) == 40
    assert page.value("document.getElementById('search').elements.text.value") == "said-"
    page.until("Math.abs(document.getElementById('search').getBoundingClientRect().top) < 20")
    write_report([own], report)
    page.until("document.body && !document.body.dataset.again && document.querySelector('#found article')")
    page.requests.clear()
    time.sleep(1.0)
    assert len(page.value(CARDS)) == 40
    assert page.requests == [], "the run has ended, and its page still loads itself"


def test_a_group_that_is_read_stays_where_newer_samples_come(page: Browser, run: Path, tmp_path: Path) -> None:
    own = shutil.copytree(run, tmp_path / "growing")
    report = write_report([own], own / "report.html", again=0.5)
    opened(page, report, 1440, 900)
    assert len(found(page, text="high")) == 1
    page.value("document.querySelector('#found button').click()")
    group = page.value(CARDS)
    trained(own, step=41)
    write_report([own], report)
    page.until("document.body && !document.body.dataset.again && document.querySelector('#found article')")
    assert page.value(CARDS) == group
    assert len(group) == 3
    page.value("document.querySelector('#found button').click()")
    assert len(page.value(CARDS)) == 1


def test_the_page_of_a_run_that_was_killed_says_so_and_rests(page: Browser, run: Path, tmp_path: Path) -> None:
    report = write_report([run], tmp_path / "report.html", again=0.05)
    opened(page, report, 1440, 900)
    page.until("document.getElementById('now')?.textContent.endsWith('the run has ended since, or stands still')")
    page.requests.clear()
    time.sleep(0.5)
    assert page.value("1") == 1
    assert page.requests == []


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_twenty_runs_of_a_thousand_steps_are_drawn_and_fit(page: Browser, many: Path, width: int, height: int) -> None:
    page.show(many.as_uri(), width, height)
    page.until("document.querySelector('.legend')")
    assert fits(page)
    assert page.value("document.querySelectorAll('.legend input').length") == 20
    assert page.value("document.getElementById('search')") is None


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    runs = [a_run(folder / "run-0", steps=1000)]
    runs += [shutil.copytree(runs[0], folder / f"run-{number}") for number in range(1, 20)]
    for number, run in enumerate(runs):
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("lr: 0.001", f"lr: 0.00{number + 1:02}"))
    return write_report(runs, folder / "comparison.html")
