"""A run's report in a real browser, at a desk's and a phone's width: what a user sees and does there."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any, Self

import pytest
from websockets.sync.client import connect

from rl_megatron.observability.history import SampleRow, SamplesWriter, SampleTurn
from rl_megatron.observability.report import write_report
from tests.unit.observability.report_pages import EVIL, a_run

# Chromium without a window, driven over its DevTools protocol, as a user would.
PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60.0  # that an answer of it may take
_HEARD = {"Page.javascriptDialogOpening", "Runtime.exceptionThrown", "Network.requestWillBeSent", "Log.entryAdded"}


class Browser:
    """One page of a new profile. ``requests``: the URLs it asked for; ``faults``: dialogs, exceptions and errors."""

    def __init__(self, profile: Path) -> None:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
        self._process = subprocess.Popen(
            [str(PROGRAM), *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.requests, self.faults = list[str](), list[str]()
        self._numbers, self._session, self._open = itertools.count(1), "", ExitStack()

    def __enter__(self) -> Self:
        for line in self._process.stderr or ():
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                break
        Thread(target=deque, args=(self._process.stderr, 0), daemon=True).start()  # a full pipe would stop it
        self._stream = self._open.enter_context(connect(found[1], max_size=None, proxy=None))
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(SECONDS)

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        """The answer to one command; what the page did meanwhile is kept."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        self._stream.send(json.dumps(command | ({"sessionId": self._session} if self._session else {})))
        end = time.monotonic() + SECONDS
        while (said := json.loads(self._stream.recv(end - time.monotonic()))).get("id") != number:
            self._heard(said)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']['message']}")
        result: dict[str, Any] = said["result"]
        return result

    def _heard(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Network.requestWillBeSent":
            self.requests.append(said["params"]["request"]["url"])
        elif said.get("method") in _HEARD:
            self.faults.append(json.dumps(said["params"])[:500])

    def show(self, url: str, width: int, height: int) -> None:
        """Load a page in a window of this size, a phone's below 600 pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Of an expression of JavaScript, awaited."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until it holds in the page, or in the one that follows it. Raises TimeoutError."""
        look = f"const look = () => ({condition}) ? resolve(true) : setTimeout(look, 20)"
        while True:
            try:
                self.value(f"new Promise((resolve) => {{ {look}; look(); }})")
                return
            except RuntimeError as error:
                if "navigated" not in str(error):
                    raise

    def image(self, path: Path) -> None:
        """Write what the window shows."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))


pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium")
WIDTHS = [pytest.param(1440, 900, id="desk"), pytest.param(390, 844, id="phone")]
TURNS = (SampleTurn(read="", sampled="first"), SampleTurn(read=f"tool {EVIL}", sampled="second"))
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
def test_the_first_screen_has_accuracy_reward_and_time(page: Browser, report: Path, width: int, height: int) -> None:
    opened(page, report, width, height)
    assert fits(page)
    names = "[...document.querySelectorAll('figure [role=img]')].map((e) => e.getAttribute('aria-label'))"
    expected = ["Reward", "Held-out accuracy", "Loss"]
    assert [name.split(".")[0].split(",")[0] for name in page.value(names)[:3]] == expected
    last = "figure [role=img]')[2]" if width > 600 else ".tile')[4]"  # that is in the window
    bottom = f"document.querySelectorAll('{last}.getBoundingClientRect().bottom"
    assert page.value(bottom) <= height


def shown(page: Browser) -> dict[str, str]:
    """What stands below each chart, by its title, with a space between what is apart."""
    words = "[...e.querySelectorAll('tr:not(.bound) > :not(:empty)')].filter((w) => w.offsetWidth)"
    each = f"[e.querySelector('h3').textContent, {words}.map((w) => w.textContent).join(' ')]"
    below: dict[str, str] = page.value(
        f"Object.fromEntries([...document.querySelectorAll('figure')].map((e) => {each}))"
    )
    return below


def mouse(page: Browser, share: float, *kinds: str, **more: object) -> None:
    """Events of the mouse at this share of the width of the first chart."""
    box = page.value("{ const r = plots[0].u.over.getBoundingClientRect(); [r.x, r.y, r.width, r.height]; }")
    for kind in kinds:
        at = {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2}
        page.ask("Input.dispatchMouseEvent", type=kind, **at, **more)


REWARD = "Reward, mean ± standard deviation"


def test_the_cursor_reads_all_charts_at_one_step_and_a_drag_zooms_all(page: Browser, report: Path) -> None:
    opened(page, report, 1440, 900)
    below = shown(page)
    assert below[REWARD] == "last reward/mean 4 (3.75 to 4.25)"
    assert below["Held-out accuracy"] == "last eval/accuracy 6"
    assert below["Step time by phase"] == "last other 0.5 train 1 rollout 0.5"
    mouse(page, 0.5, "mouseMoved")
    page.until("document.querySelector('.u-legend td').textContent.startsWith('step')")
    below = shown(page)
    assert below["Loss"].startswith("step ")
    step = int(below["Loss"].split()[1])
    assert step in (20, 21)
    assert below["Loss"] == f"step {step} loss {-0.5 * step:g}"
    assert below[REWARD].startswith(f"step {step} reward/mean {0.1 * step:.4g} (")
    assert below["Step time by phase"].startswith(f"step {step} other 0.5")
    ranges = "plots.map(({ u }) => [u.scales.x.min, u.scales.x.max].map(Math.round)).slice(0, 3)"
    whole = page.value(ranges)
    assert whole[0] == [1, 40]
    mouse(page, 0.25, "mousePressed", button="left", clickCount=1)
    mouse(page, 0.5, "mouseMoved", "mouseReleased", button="left", clickCount=1)
    page.until("plots.every(({ u }) => u.scales.x.min > 5 && u.scales.x.max < 25)")
    for clicks in (1, 2):
        mouse(page, 0.4, "mousePressed", "mouseReleased", button="left", clickCount=clicks)
    page.until(f"JSON.stringify({ranges}) === {json.dumps(json.dumps(whole, separators=(',', ':')))}")


def choose(page: Browser, **fields: object) -> None:
    """Sets fields of the form above the charts, as a user would."""
    for name, value in fields.items():
        if name == "x":
            page.value(f"[...form.elements.x].find((e) => e.value === '{value}').click()")
        else:
            one = f"form.elements.{name}"
            page.value(f"{{ {one}.value = '{value}'; {one}.dispatchEvent(new Event('input', {{ bubbles: true }})); }}")


def test_a_line_is_smoothed_by_steps_and_the_values_stay(page: Browser, report: Path) -> None:
    """By the formula: of values 1, 2, ... with weights 0.5, 0.5², ..., the latest first."""
    opened(page, report, 1440, 900)
    choose(page, smoothing=0.5)
    loss = "plots.find((one) => one.box.title === 'Loss')"
    raw, smooth = page.value(f"{loss}.u.data.slice(1, 3)")
    weights = [0.5**k for k in range(40)]
    expected = [sum(w * -0.5 * (n - k) for k, w in enumerate(weights[:n])) / sum(weights[:n]) for n in range(1, 41)]
    assert raw == [-0.5 * step for step in range(1, 41)]
    assert smooth == pytest.approx(expected)
    assert shown(page)["Loss"] == "last loss -20"
    assert page.value("form.querySelector('output').textContent") == "0.50"
    left_out = 0.5 * 5 * 0.25 + 0.75 * 7  # of two steps, by their mean
    assert page.value("smoothed([1, 3], [5, 9], [5, 7])") == pytest.approx([5, left_out / (0.5 * 0.25 + 0.75)])
    choose(page, smoothing=0)
    assert page.value(f"{loss}.u.data.length") == 2
    choose(page, smoothing=0.6)


def test_x_is_steps_tokens_or_hours_and_the_zoom_survives_what_is_drawn_again(page: Browser, report: Path) -> None:
    opened(page, report, 1440, 900)
    last = "plots.map(({ u }) => u.data[0].at(-1))"
    for x, end in (("tokens", 300 * 40), ("hours", 40 * 2 / 3600), ("step", 40)):
        choose(page, x=x)
        assert page.value(last) == pytest.approx([end] * 4), x
        label = page.value("plots[0].u.series[0].value(plots[0].u, plots[0].u.data[0].at(-1), 0, 1)")
        assert label == {"tokens": "12,000 tokens", "hours": "0.02222 hours", "step": "step 40"}[x]
    mouse(page, 0.25, "mousePressed", button="left", clickCount=1)
    mouse(page, 0.5, "mouseMoved", "mouseReleased", button="left", clickCount=1)
    page.until("plots[0].u.scales.x.max < 25")
    ranges = "plots.slice(0, 3).map(({ u }) => [u.scales.x.min, u.scales.x.max])"
    zoomed = page.value(ranges)
    choose(page, smoothing=0.9)
    page.until(f"JSON.stringify({ranges}) === {json.dumps(json.dumps(zoomed, separators=(',', ':')))}")
    opened(page, report, 1440, 900)
    page.until(f"JSON.stringify({ranges}) === {json.dumps(json.dumps(zoomed, separators=(',', ':')))}")
    assert page.value("form.elements.smoothing.value") == "0.9", "a page that loads itself keeps what was chosen"
    choose(page, smoothing=0.6, x="hours")
    page.until("plots[0].u.scales.x.max === plots[0].u.data[0].at(-1)")
    choose(page, x="step")


def test_folded_charts_are_drawn_when_opened_and_a_chart_has_a_logarithmic_axis(page: Browser, tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(7, 10):
            row = {"phase": "rl", "step": step, "grad_norm": 10.0**step, "kl/rollout": 10.0**-step}
            file.write(json.dumps(row) + "\n")
    opened(page, write_report([folder], folder / "report.html"), 1440, 900)
    names, axes = "plots.map(({ box }) => box.title)", "plots.map(({ u }) => u.scales.y.distr)"
    first = page.value(names)
    assert dict(zip(first, page.value(axes), strict=True)) == {**dict.fromkeys(first, 1), "Gradient norm": 3}
    assert "KL, engine to learner (k3)" not in first
    page.value("[...document.querySelectorAll('summary')].find((e) => e.textContent.startsWith('Health')).click()")
    page.until(f"{names}.length === {len(first) + 1}")
    page.value("document.querySelector('details .log').click()")
    page.until(f"{names}.includes('KL, engine to learner (k3)') && {axes}.filter((distr) => distr === 3).length === 2")
    pressed = "[...document.querySelectorAll('.log')].map((e) => e.ariaPressed)"
    assert page.value(pressed) == ["true", "true"]


def test_lines_are_drawn_in_the_colors_of_the_theme_also_where_it_changes(page: Browser, report: Path) -> None:
    opened(page, report, 1440, 900)
    canvas, light, dark = "plots[1].u.ctx.canvas", "47,95,222,255", "122,165,255,255"
    pixels = f"plots[1].u.ctx.getImageData(0, 0, {canvas}.width, {canvas}.height).data.join()"
    try:
        for theme, color, other in (("light", light, dark), ("dark", dark, light)):
            page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            page.until(f"{pixels}.includes('{color}')")
            assert not page.value(f"{pixels}.includes('{other}')")
    finally:
        page.ask("Emulation.setEmulatedMedia", features=[])
    page.value("1")
    page.faults[:] = [fault for fault in page.faults if "readback" not in fault]  # of this test's own reading


def test_the_warm_start_has_a_fifth_of_the_width_and_its_steps_are_named(page: Browser, report: Path) -> None:
    opened(page, report, 1440, 900)
    u = "plots[1].u"
    assert page.value(f"{u}.valToPos(0, 'x') / {u}.over.clientWidth") == pytest.approx(0.2, abs=0.005)
    labels = f"[0, 1, 2, 3].map((i) => {u}.series[0].value({u}, {u}.data[0][i], 0, i))"
    assert page.value(labels) == ["warm-start step 0", "warm-start step 10", "warm-start step 20", "step 2"]


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


def test_the_page_of_a_live_run_loads_itself_and_keeps_its_place(page: Browser, run: Path, tmp_path: Path) -> None:
    own = shutil.copytree(run, tmp_path / "growing")
    report = write_report([own], own / "report.html", again=1.5)
    opened(page, report, 1440, 900)
    assert "the run continues" in page.value("document.querySelector('header').textContent")
    trained(own, step=41)
    assert len(found(page, text="said-")) == 40
    page.value("document.getElementById('search').scrollIntoView()")
    assert page.value("scrollY") > 100
    write_report([own], report, again=1.5)
    page.until(f"({STEPS}).includes('41 of') && document.querySelector('#found article')")
    assert len(page.value(CARDS)) == 40
    assert page.value("document.getElementById('search').elements.text.value") == "said-"
    page.until("Math.abs(document.getElementById('search').getBoundingClientRect().top) < 20")
    write_report([own], report)
    page.until("document.body && !document.body.dataset.again && document.querySelector('#found article')")
    page.requests.clear()
    time.sleep(2.0)
    assert len(page.value(CARDS)) == 40
    assert page.requests == [], "the run has ended, and its page still loads itself"


def test_a_group_that_is_read_stays_where_newer_samples_come(page: Browser, run: Path, tmp_path: Path) -> None:
    own = shutil.copytree(run, tmp_path / "growing")
    report = write_report([own], own / "report.html", again=1.5)
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
    opened(page, write_report([run], tmp_path / "report.html", again=0.05), 1440, 900)
    page.until("document.getElementById('now')?.textContent.endsWith('the run has ended since, or hangs')")
    page.requests.clear()
    time.sleep(0.5)
    assert page.value("1") == 1
    assert page.requests == []


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_twenty_runs_of_a_thousand_steps_are_drawn_and_fit(page: Browser, many: Path, width: int, height: int) -> None:
    page.show(many.as_uri(), width, height)
    page.until("document.querySelector('.u-over')")
    assert fits(page)
    assert page.value("document.querySelectorAll('.legend input').length") == 20
    assert page.value("document.getElementById('search')") is None
    drawn = "plots[0].u.series.slice(1).filter((s) => s.class !== 'bound').map((s) => s.show)"
    assert page.value(drawn) == [True] * 20
    page.value("document.getElementById('run3').click()")
    page.until(f"!{drawn}[3]")
    assert page.value(drawn) == [*[True] * 3, False, *[True] * 16]
    page.value("document.getElementById('run3').click()")  # the page keeps what is hidden
    assert (
        len(set(page.value("plots[0].u.series.slice(1).map((s) => s.class !== 'bound' && s.stroke() + s.dash)"))) == 21
    )


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    runs = [a_run(folder / "run-0", steps=1000)]
    runs += [shutil.copytree(runs[0], folder / f"run-{number}") for number in range(1, 20)]
    for number, run in enumerate(runs):
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("lr: 0.001", f"lr: 0.00{number + 1:02}"))
    return write_report(runs, folder / "comparison.html")
