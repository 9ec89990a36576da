"""``rl-megatron watch``: runs' reports and samples for who has the token, with no text of a model as markup."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import http.client
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from launcher.watch.app import MOST_CHARACTERS, SAMPLES_AT_ONCE, WatchApplication
from rl_megatron.observability.files import JsonRow
from rl_megatron.observability.log import run_log
from rl_megatron.observability.report import CostCounter
from rl_megatron.observability.samples import SampleRow, SamplesWriter
from rl_megatron.rollout.endpoint.server import HttpServer
from tests.exposure import check_secrets, check_server, family
from tests.unit.observability.report_pages import EVIL, a_run

TOKEN = "a-token-of-this-test"
ENDED = 20.0  # seconds a process may take to end


@dataclass
class Client:
    """A browser's part: asks one server, with and without the token."""

    port: int

    def ask(
        self, path: str, token: str | None = TOKEN, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ENDED)
        own = {"Authorization": f"Bearer {token}"} if token is not None else {}
        connection.request(method, path, headers=own | {name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        body = answer.read()
        text = (gzip.decompress(body) if answer.getheader("content-encoding") == "gzip" else body).decode()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text

    def samples(self, **query: object) -> dict[str, Any]:
        status, _, text = self.ask(f"/samples?{urlencode(query)}" if query else "/samples")
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = a_run(tmp_path_factory.mktemp("runs") / EVIL[:9].replace("/", "-"))
    samples = SamplesWriter(folder)
    samples.write(
        SampleRow(step=step, prompt=f"{i % 3} {EVIL}", completion="x" * i, answer="Seven", reward=i / 10)
        for step in (7, 8)
        for i in range(30)
    )
    samples.close()
    return folder


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[Client]:
    with served([run]) as found:
        yield found


@dataclass
class Hours:
    """Of a run."""

    folder: Path

    def add(self, row: JsonRow) -> None:
        pass

    def lines(self) -> list[str]:
        return [f"{self.folder.name} cost 3 hours"]


class served:  # noqa: N801 -- a context manager
    """A server of these runs in a thread with an event loop of its own."""

    def __init__(self, runs: list[Path], costs: Callable[[Path], CostCounter] = Hours) -> None:
        self.app = WatchApplication(runs, TOKEN, costs)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Client:
        self._thread.start()
        self._server = HttpServer(self.app)
        url = asyncio.run_coroutine_threadsafe(self._listening(), self._loop).result(ENDED)
        return Client(urlsplit(url).port or 0)

    def ends(self) -> None:
        """As a signal does."""
        self._loop.call_soon_threadsafe(self.app.ends.set)

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(ENDED)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ENDED)
        self._loop.close()

    async def _listening(self) -> str:
        return self._server.listen()


class Scripts(HTMLParser):
    """The texts of a page's scripts, and every attribute that would run one."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts, self.handlers, self._inside = list[str](), list[str](), False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if self._inside:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


@pytest.mark.parametrize("path", ["/report", "/samples", "/samples?text=x"])
@pytest.mark.parametrize("token", [None, "", "a-token-of-this-tes", TOKEN.upper()])
def test_nothing_of_a_run_is_told_without_the_token(client: Client, path: str, token: str | None) -> None:
    status, _, text = client.ask(path, token)
    assert (status, "its whole address" in text or "the whole address" in text) == (401, True)
    assert "said-" not in text


def test_the_first_page_holds_names_alone_and_runs_its_own_script_only(client: Client) -> None:
    """The policy has that script's digest, by another way; a model's text could not run if it were markup."""
    status, headers, page = client.ask("/", None)
    assert status == 200
    assert "said-" not in page
    (script,) = Scripts(page).texts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")


def test_a_name_that_leads_here_is_not_answered(client: Client) -> None:
    assert client.ask("/report", Host="a-page-of-others.test")[0] == 421
    assert client.ask("/", None, Host="127.0.0.1")[0] == 421  # without the port
    assert client.ask("/", None, Host=f"localhost:{client.port}")[0] == 200


def test_the_report_is_the_one_of_now(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    with served([folder]) as client:
        status, headers, page = client.ask("/report")
        assert (status, "<figure" in page, Scripts(page).handlers) == (200, True, [])
        assert len(Scripts(page).texts) == 1
        assert "copy cost 3 hours" in page
        assert client.ask("/report", If_None_Match=headers["etag"])[0] == 304
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"phase": "rl", "step": 7, "reward/mean": 0.123456}) + "\n")
        status, later, page = client.ask("/report", If_None_Match=headers["etag"])
        assert (status, later["etag"] != headers["etag"], "7 of 6" in page) == (200, True, True)
        (folder / "starts.jsonl").write_text('{"step": 7, "time": "t", "torch": "2.99.0"}\n')
        status, later, page = client.ask("/report", If_None_Match=later["etag"])
        assert (status, "2.99.0" in page) == (200, True)
        with run_log(folder, role="rank", rank=3):
            logging.getLogger("launcher").error("the watchdog says <b>")
        status, last, page = client.ask("/report", If_None_Match=later["etag"], Accept_Encoding="gzip, br")
        assert (status, "the watchdog says &lt;b&gt;" in page) == (200, True)
        assert (last["content-encoding"], later.get("content-encoding")) == ("gzip", None)
        (folder / "metrics.jsonl").write_text("")
        status, _, said = client.ask("/report")
        assert (status, "metrics.jsonl" in said) == (503, True)


def test_samples_are_found_by_text_reward_length_and_group_the_latest_first(client: Client) -> None:
    found = client.samples()
    assert (len(found["samples"]), found["more"]) == (SAMPLES_AT_ONCE, True)
    assert [(row["step"], len(row["completion"])) for row in found["samples"][:2]] == [(8, 29), (8, 28)]
    rest = client.samples(skip=SAMPLES_AT_ONCE)
    assert (len(rest["samples"]), rest["more"], rest["samples"][-1]["step"]) == (66 - SAMPLES_AT_ONCE, False, 1)
    assert [row["completion"] for row in client.samples(text="SAID-")["samples"]] == [
        f"said-{s};" for s in range(6, 0, -1)
    ]
    assert len(client.samples(text="seven")["samples"]) == SAMPLES_AT_ONCE
    assert {row["reward"] for row in client.samples(least_reward=0.25, most_reward=0.45)["samples"]} == {0.3, 0.4}
    assert [len(row["completion"]) for row in client.samples(least_length=27, most_length=28, step=7)["samples"]] == [
        28,
        27,
    ]
    (one,) = client.samples(text="said-5")["samples"]
    assert client.samples(step=5, group=one["group"])["samples"] == [one]
    assert EVIL in client.samples(step=8, most_length=1)["samples"][0]["prompt"]


def test_long_samples_come_few_at_a_time_and_none_is_left_out(tmp_path: Path) -> None:
    folder, samples = a_run(tmp_path / "a", steps=1), SamplesWriter(tmp_path / "a")
    lengths = [MOST_CHARACTERS + 1, 5, 7, MOST_CHARACTERS // 2, MOST_CHARACTERS // 2]
    samples.write(SampleRow(step=2, prompt="", completion="x" * n, answer="", reward=0) for n in lengths)
    samples.close()
    answers, found = list[list[int]](), {"more": True}
    with served([folder]) as client:
        while found["more"]:
            found = client.samples(step=2, skip=sum(map(len, answers)))
            answers.append([len(row["completion"]) for row in found["samples"]])
    assert answers == [[MOST_CHARACTERS // 2] * 2, [7, 5], [MOST_CHARACTERS + 1]]


def test_a_group_of_a_long_prompt_is_found(tmp_path: Path) -> None:
    """No address has room for the prompt."""
    folder, samples = a_run(tmp_path / "a", steps=1), SamplesWriter(tmp_path / "a")
    prompts = [f"{'x' * 200_000}{end}" for end in ("", "", "y")]
    samples.write(SampleRow(step=2, prompt=p, completion=str(i), answer="", reward=0) for i, p in enumerate(prompts))
    samples.close()
    with served([folder]) as client:
        rows = client.samples(step=2)["samples"]
        found = client.samples(step=2, group=rows[-1]["group"])["samples"]
    assert [row["completion"] for row in found] == ["1", "0"]


def test_a_page_that_is_being_made_holds_back_no_end(run: Path) -> None:
    begun, goes_on, said = threading.Event(), threading.Event(), list[tuple[int, str]]()

    def costs(folder: Path) -> Hours:
        begun.set()
        goes_on.wait(ENDED)
        return Hours(folder)

    def asks(client: Client) -> None:
        status, _, text = client.ask("/report")
        said.append((status, text))

    server = served([run], costs)
    with server as client:
        asking = threading.Thread(target=asks, args=(client,))
        asking.start()
        assert begun.wait(ENDED)
        server.ends()
        asking.join(ENDED / 2)
        goes_on.set()
    assert said == [(503, "rl-megatron watch ends")]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("least_reward=nan", "finite"),
        ("step=1.5", "not a search"),
        ("step=1&step=2", "once at most"),
        ("file=/etc/passwd", "once at most"),
        ("run=1", "there are 1 runs"),
        ("run=-1", "there are 1 runs"),
        ("skip=-1", "0 or more"),
        ("skip=99999999999999999999", "less than"),
        ("text", "not a search"),
    ],
)
def test_what_is_no_search_is_refused(client: Client, query: str, said: str) -> None:
    status, _, text = client.ask(f"/samples?{query}")
    assert status == 400
    assert said in text


def test_other_paths_and_methods_are_refused(client: Client) -> None:
    assert client.ask("/../config.yaml")[0] == client.ask("/report/x")[0] == 404
    assert client.ask("/report", method="POST")[0] == 405


def test_the_command_prints_its_address_serves_and_ends_by_a_signal(run: Path) -> None:
    program = [sys.executable, "-m", "launcher", "watch", str(run)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        word, address = process.stdout.readline().split()
        parts = urlsplit(address)
        assert (word, parts.hostname, len(parts.fragment)) == ("open", "127.0.0.1", 64)
        assert process.stdout.readline() == "Ctrl-C ends it\n"
        client = Client(parts.port or 0)
        assert client.ask("/report", parts.fragment)[0] == 200
        assert client.ask("/report")[0] == 401
        (here,) = family(process.pid)
        assert check_server(here, [("GET", "/report"), ("GET", "/samples")]) == 1
        check_secrets([here], run, secrets=[parts.fragment])
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(ENDED) == 0


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "launcher", "watch", str(tmp_path)], capture_output=True, text=True, timeout=ENDED
    )
    assert (ended.returncode, "no config.yaml there" in ended.stderr) == (1, True)
