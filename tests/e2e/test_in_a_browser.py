"""``rl-megatron watch`` in a real browser, at a desk's and a phone's width: what a user sees and does there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_megatron.observability.samples import SampleRow, SamplesWriter, SampleTurn
from tests.chromium import PROGRAM, Browser
from tests.unit.launcher.test_watch import TOKEN, Client, served
from tests.unit.observability.report_pages import EVIL, a_run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium")
WIDTHS = [pytest.param(1440, 900, id="desk"), pytest.param(390, 844, id="phone")]
TURNS = (SampleTurn(read="", said="first"), SampleTurn(read=f"tool {EVIL}", said="second"))
DRAWN = "document.getElementById('bar')?.textContent.startsWith('as of')"
CARDS = "[...document.querySelectorAll('#found article')].map((card) => card.querySelector('pre').textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser, whose page has met no fault and asked loopback alone."""
    browser.faults.clear()
    browser.requests.clear()
    yield browser
    assert browser.faults == []
    assert [url for url in browser.requests if not url.startswith(("http://127.0.0.1:", "about:"))] == []


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
def client(run: Path) -> Iterator[Client]:
    with served([run]) as found:
        yield found


def opened(page: Browser, client: Client, width: int, height: int) -> None:
    page.show("about:blank", width, height)
    page.show(f"http://127.0.0.1:{client.port}/#{TOKEN}", width, height)
    page.until(f"{DRAWN} && document.querySelector('#found article')")


def fits(page: Browser) -> bool:
    """Whether nothing is wider than the window."""
    return bool(page.value("document.documentElement.scrollWidth <= innerWidth"))


def found(page: Browser, **fields: object) -> list[str]:
    """The texts of the samples that the form finds."""
    set_ = "".join(f"form.elements[{json.dumps(name)}].value = {json.dumps(str(v))};" for name, v in fields.items())
    page.value(f"form = document.getElementById('search'), form.reset(), {{}}; {set_} form.requestSubmit()")
    return settled(page)


def settled(page: Browser) -> list[str]:
    """The texts of the samples once the last question is answered."""
    page.until("performance.getEntriesByType('resource').filter((e) => e.name.includes('/samples')).length >= asked")
    texts: list[str] = page.value(CARDS)
    return texts


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_the_first_screen_has_accuracy_reward_and_where_the_time_goes(
    page: Browser, client: Client, width: int, height: int
) -> None:
    opened(page, client, width, height)
    assert fits(page)
    assert page.value("location.hash") == ""  # the token is not in what a user copies
    names = "[...document.querySelectorAll('#report figure svg')].map((e) => e.getAttribute('aria-label'))"
    assert [name.split(".")[0].split(",")[0] for name in page.value(names)[:3]] == [
        *("Held-out accuracy", "Reward", "Where the time goes")
    ]
    last = 2 if width > 600 else 0  # of the charts, in the window
    bottom = f"document.querySelectorAll('#report figure svg')[{last}].getBoundingClientRect().bottom"
    assert page.value(bottom) <= height
    assert page.value("document.getElementById('report').textContent.includes('one cost 3 hours')")


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_samples_are_searched_read_by_turns_and_by_group(
    page: Browser, client: Client, width: int, height: int
) -> None:
    opened(page, client, width, height)
    assert [text.split()[-1] for text in found(page, text="no such")] == []
    below = found(page, least_reward=-10, most_reward=-1)
    assert below == [f"twofirsttool {EVIL}second", below[1]]
    assert below[1].startswith("asked ")
    assert "low " in below[1]
    assert len(found(page, least_reward=5)) == 1
    assert page.value("document.querySelectorAll('#found article .turn').length") == 0
    assert found(page, text="TOOL", step=39) == below[:1]
    assert page.value("[...document.querySelectorAll('#found .turn')].map((e) => e.textContent.slice(0, 6))") == [
        *("first", "tool <", "second")
    ]
    assert len(found(page, text="high")) == 1
    page.value("document.querySelector('#found button').click()")
    assert len(settled(page)) == 3
    assert fits(page)


def trained(run: Path, step: int) -> None:
    """One more step, with a sample."""
    samples = SamplesWriter(run)
    samples.write([SampleRow(step=step, prompt="asked ", completion=f"of step {step}", answer="A", reward=0.0)])
    samples.close()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"phase": "rl", "step": step, "reward/mean": 4.0, "seconds/step": 2.0}) + "\n")


def test_the_page_is_that_of_now_and_another_address_gives_another_token(
    page: Browser, run: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(run, tmp_path / "growing")
    with served([own]) as client:
        opened(page, client, 1440, 900)
        steps = "[...document.querySelectorAll('.tile')].find((e) => e.textContent.includes('Steps')).textContent"
        assert "40 of" in page.value(steps)
        trained(own, step=41)
        page.until(f"({steps}).includes('41 of')")
        page.until(f"{CARDS}[0] === 'asked of step 41'")
        page.value("document.getElementById('reading').scrollIntoView()")
        trained(own, step=42)
        page.until(f"({steps}).includes('42 of')")
        assert settled(page)[0] == "asked of step 41"  # it is being read
        page.value("sessionStorage.setItem('token', 'of a run that has ended')")
        page.show(f"http://127.0.0.1:{client.port}/#another", 1440, 900)
        page.until("document.getElementById('bar')?.textContent.startsWith('open the whole address')")
        page.show(f"http://127.0.0.1:{client.port}/#{TOKEN}", 1440, 900)
        page.until(DRAWN)
        page.show("about:blank", 1440, 900)  # which asks no server that has ended
        page.faults[:] = [fault for fault in page.faults if "status of 401" not in fault]


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_twenty_runs_of_a_thousand_steps_are_drawn_and_fit(
    page: Browser, many: Client, width: int, height: int
) -> None:
    opened(page, many, width, height)
    assert fits(page)
    assert page.value("document.querySelectorAll('#report .legend input').length") == 20
    assert page.value("document.querySelectorAll('#search option').length") == 20


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("many")
    runs = [a_run(folder / "run-0", steps=1000)]
    runs += [shutil.copytree(runs[0], folder / f"run-{number}") for number in range(1, 20)]
    for number, run in enumerate(runs):
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("lr: 0.001", f"lr: 0.00{number + 1:02}"))
    with served(runs) as found:
        yield found
