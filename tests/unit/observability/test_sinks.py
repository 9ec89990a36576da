"""Sinks of metrics: the shipped ones, one of another package, and one that fails or hangs, which a run does not notice.

Sinks of other packages are found by their entry points, in the folder of an installed package.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import resource
import shutil
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import MappingProxyType
from unittest.mock import MagicMock

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override

from launcher.commands.train import _open_sinks
from launcher.preflight import sinks as preflight
from launcher.preflight.subject import PreflightContext
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError, StopRequested, WorkerFailure
from rl_megatron.observability.files import JsonRow
from rl_megatron.observability.metrics import METRICS
from rl_megatron.observability.recorder import MetricsWriter
from rl_megatron.observability.sinks import sink as sinks_module
from rl_megatron.observability.sinks.mlflow import MlflowSink
from rl_megatron.observability.sinks.prometheus import PrometheusSink, _Handler
from rl_megatron.observability.sinks.sink import MAX_ROWS, MetricSink, RunEnd, Sinks, SinkSettings, make_sink
from rl_megatron.observability.sinks.tensorboard import TensorBoardSink
from rl_megatron.observability.sinks.wandb import WandbSink
from rl_megatron.observability.sinks.webhook import WebhookSink
from rl_megatron.observability.verdicts import read_run

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard
ROW: Mapping[str, float | str] = MappingProxyType({"step": 3, "phase": "rl", "loss": 0.25, "reward/mean": 0.5})
WARM = {"step": 0, "phase": "warm_start", "warm_start/step": 40, "warm_start/loss": 1.25, "eval/accuracy": 0.5}
FINISHED = RunEnd(state="finished")


def settings(folder: Path, argument: str = "", *, fresh: bool = True, **environment: str) -> SinkSettings:
    folder.mkdir(parents=True, exist_ok=True)
    return SinkSettings(folder=folder, argument=argument, project="p", is_fresh=fresh, environment=environment)


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Recording(MetricSink):
    """Keeps what it gets; a test makes one of its calls raise or wait."""

    on: Callable[[str, object], None] = staticmethod(lambda name, given: None)
    calls: tuple[tuple[str, object], ...] = ()
    lines: tuple[int, ...] = ()  # of metrics.jsonl, as each row came

    def __init__(self, settings: SinkSettings) -> None:
        self.settings = settings

    def _keep(self, name: str, given: object = None) -> None:
        Recording.calls += ((name, given),)
        Recording.on(name, given)

    @override
    def open(self) -> None:
        self._keep("open", self.settings.argument)

    @override
    def log(self, row: JsonRow) -> None:
        Recording.lines += (len(rows(self.settings.folder)),)
        self._keep("log", row["step"])

    @override
    def close(self, end: RunEnd) -> None:
        self._keep("close", end)

    @override
    def abandon(self) -> None:
        self._keep("abandon")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, where another package brings the sink ``mine``."""
    package = tmp_path / "package"
    info = package / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    points = f"mine = {__name__}:Recording\nbroken = {__name__}:nothing\n"
    (info / "entry_points.txt").write_text(f"[rl_megatron.sinks]\n{points}")
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    for name, value in (("on", staticmethod(lambda name, given: None)), ("calls", ()), ("lines", ())):
        monkeypatch.setattr(Recording, name, value)
    return tmp_path / "run"


def write(run: Path, number: int, end: RunEnd = FINISHED, names: tuple[str, ...] = ("mine",)) -> None:
    """Writes that many rows as a run does, and ends it."""
    sinks = Sinks(names, settings(run))
    writer = MetricsWriter(run, sinks)
    for step in range(1, number + 1):
        writer.write({"step": step, "phase": "rl", "loss": 0.5})
    writer.close()
    sinks.end = end
    sinks.close()
    assert [row["step"] for row in rows(run)] == [*range(1, number + 1)]


def test_a_sink_of_another_package_gets_every_row_after_it_is_on_disk(mine: Path) -> None:
    end = RunEnd(state="failed", message="rank 3 died")
    write(mine, 3, end, ("mine:there",))
    assert Recording.calls == (("open", "there"), ("log", 1), ("log", 2), ("log", 3), ("close", end))
    assert all(seen >= number for number, seen in enumerate(Recording.lines, 1))


def test_a_slow_sink_gets_its_rows_in_order(mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All rows are written before it takes the first."""
    written = threading.Event()
    Recording.on = staticmethod(lambda name, given: (written.wait(), None)[1])
    sinks = Sinks(("mine",), settings(mine))
    writer = MetricsWriter(mine, sinks)
    for step in (1, 2, 3):
        writer.write({"step": step, "phase": "rl"})
    written.set()
    sinks.close()
    assert [given for name, given in Recording.calls if name == "log"] == [1, 2, 3]
    assert caplog.messages == []


@pytest.mark.parametrize("hangs", ["open", "log", "close"])
def test_a_sink_that_hangs_does_not_delay_rows_and_ends_with_the_run(
    mine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: str
) -> None:
    forever, left = threading.Event(), threading.Event()

    def hang(name: str, given: object) -> None:
        if name == hangs:
            forever.wait()
        if name == "abandon":
            left.set()

    Recording.on = staticmethod(hang)
    monkeypatch.setattr(sinks_module, "CLOSE_SECONDS", 0.05)
    try:
        write(mine, 3 if hangs == "close" else MAX_ROWS + 9)
        assert left.is_set()
        *slow, lost = caplog.messages
        assert "mine lacks rows: " in lost
        assert "(it did not close in 0.05 s); metrics.jsonl has all rows" in lost
        if hangs != "close":
            (one,) = slow  # a single warning, however many rows are dropped
            assert "mine is too slow: " in one
            dropped = 9 if hangs == "open" else 8  # `log` holds one
            assert f"lacks rows: {MAX_ROWS} not sent, {dropped} dropped, 0 failed" in lost
        else:
            assert (slow, "lacks rows: 0 not sent, 0 dropped" in lost) == ([], True)
    finally:
        forever.set()
        for thread in threading.enumerate():
            if thread.name == "sink mine":
                thread.join(60)


def test_a_call_that_takes_too_long_is_warned_of_before_rows_are_dropped(
    mine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks_module, "SLOW_SECONDS", -1.0)
    inside, forever = threading.Event(), threading.Event()
    Recording.on = staticmethod(lambda name, given: (inside.set(), forever.wait(), None)[2])
    sinks = Sinks(("mine",), settings(mine))
    assert inside.wait(60)
    for _ in range(3):
        sinks.log(ROW)
    (warning,) = caplog.messages
    assert "mine is too slow: 0 rows wait" in warning
    forever.set()
    sinks.close()


@pytest.mark.parametrize(
    ("fails", "calls", "text"),
    [
        ("open", ("open",), "mine is switched off (ConnectionError: no route)"),
        ("log", ("open", "log", "log", "log", "close"), "mine is switched off (ConnectionError: no route)"),
        ("odd", ("open", *["log"] * 5, "close"), "mine lacks rows: 0 not sent, 0 dropped, 3 failed;"),
        ("close", ("open", *["log"] * 5, "close"), "mine is switched off (ConnectionError: no route)"),
        ("exit", ("open", "log", "log", "log", "close"), "mine is switched off (SystemExit: 1)"),
    ],
)
def test_a_sink_that_raises_is_named_once_and_the_run_continues(
    mine: Path, caplog: pytest.LogCaptureFixture, fails: str, calls: tuple[str, ...], text: str
) -> None:
    def fail(name: str, given: object) -> None:
        if fails == "exit" and name == "log":
            sys.exit(1)
        if name == fails or (fails == "odd" and name == "log" and int(str(given)) % 2):
            raise ConnectionError("no route")

    Recording.on = staticmethod(fail)
    with caplog.at_level(logging.WARNING):
        write(mine, 5)
    (warning,) = caplog.messages
    assert text in warning
    assert "metrics.jsonl has all rows" in warning
    assert tuple(name for name, _ in Recording.calls) == calls


def test_a_row_of_one_sink_is_a_copy(mine: Path) -> None:
    row = {"step": 1, "phase": "rl"}
    seen: list[object] = []
    Recording.log = lambda self, one: seen.append(one)  # type: ignore[method-assign]
    sinks = Sinks(("mine",), settings(mine))
    sinks.log(row)
    sinks.close()
    assert seen == [row]
    assert seen[0] is not row


@pytest.mark.parametrize(
    ("raises", "expected"),
    [
        (None, RunEnd(state="stopped")),
        (StopRequested("stopped before the first step"), RunEnd(state="stopped")),
        (WorkerFailure("rank 3 died"), RunEnd(state="failed", message="rank 3 died")),
        (ValueError("a fault"), RunEnd(state="failed", message="a fault")),
        (KeyboardInterrupt(), RunEnd(state="stopped")),
    ],
)
async def test_sinks_get_the_end_of_their_run(mine: Path, raises: BaseException | None, expected: RunEnd) -> None:
    config = load_config("tiny_cpu", ["log.sinks=mine"])
    mine.mkdir()
    with contextlib.nullcontext() if raises is None else pytest.raises(type(raises)):
        async with _open_sinks(config, mine, None):
            if raises is not None:
                raise raises
    assert Recording.calls[-1] == ("close", expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nope", r"log.sinks='nope': there is no such sink; use one of: .*mine.*tensorboard, wandb"),
        ("tensorboard:x", r"log.sinks=tensorboard:x: this sink has no argument; write tensorboard"),
        ("wandb:of", r"log.sinks=wandb:of: write wandb or wandb:offline"),
        ("broken", r"the sink 'broken' that mine brings .* cannot be loaded"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_check_names_an_entry_that_is_no_sink(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    config = load_config("tiny_cpu", [f"log.sinks=tensorboard,{name}" if name[0] != "t" else f"log.sinks={name}"])
    (found,) = preflight.check(PreflightContext(config, for_job=False))
    assert found.kind == "problem"
    with pytest.raises(ConfigError, match=text):
        raise ConfigError(found.text)


def test_a_job_with_another_python_is_checked_there() -> None:
    config = load_config("tiny_cpu", ["log.sinks=nope", "slurm.python=/opt/python"])
    (found,) = preflight.check(PreflightContext(config, for_job=True))
    assert (found.kind, found.text) == ("unchecked", "log.sinks, in slurm.python=/opt/python")


# TensorBoard.
def test_tensorboard_shows_each_step_once_after_a_resume_and_keeps_the_warm_start(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for fresh, written in ((True, (WARM, ROW, {**ROW, "step": 4, "loss": 9.0})), (False, ({**ROW, "step": 4},))):
        sinks = Sinks(("tensorboard",), settings(tmp_path, fresh=fresh))
        for row in written:
            sinks.log(row)
        sinks.close()

    def points(phase: str, tag: str) -> list[tuple[int, float]]:
        reader = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard" / phase)).Reload()
        return [(event.step, event.value) for event in reader.Scalars(tag)]

    assert points("rl", "loss") == [(3, 0.25), (4, 0.25)]
    assert points("warm_start", "warm_start/loss") == [(40, 1.25)]
    assert points("warm_start", "warm_start/eval/accuracy") == [(40, 0.5)]


def test_tensorboard_names_the_folder_that_it_cannot_write(tmp_path: Path) -> None:
    """A limit stands in for a full disk. Its thread has ended, so later rows fail, too."""
    sink = TensorBoardSink(settings(tmp_path))
    sink.log({**ROW, "step": 1})
    (events,) = (tmp_path / "tensorboard" / "rl").iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/tensorboard/rl'"):
            sink.log(ROW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OSError, match="File too large"):
        sink.log(ROW)


# Prometheus.
def test_prometheus_scrapes_the_latest_values_on_loopback_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = PrometheusSink(settings(tmp_path / 'a "run"'))
    with caplog.at_level(logging.INFO):
        sink.open()
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", caplog.text)
    sink.log({**ROW, "eval/accuracy": 0.75})
    sink.log({**ROW, "step": 4, "loss": None, "reward/mean": 0.625})
    response = httpx2.get(url)
    lines = response.text.splitlines()
    label = r'{run="a \"run\""}'
    assert response.headers["content-type"].startswith("text/plain")
    assert "# HELP rl_megatron_reward_mean " + METRICS["reward/mean"].meaning in lines
    assert "# TYPE rl_megatron_reward_mean gauge" in lines
    for name, value in (("reward_mean", 0.625), ("loss", 0.25), ("step", 4.0), ("eval_accuracy", 0.75)):
        assert f"rl_megatron_{name}{label} {value}" in lines
    assert sink._server is not None
    assert sink._server.server_address[0] == "127.0.0.1"
    port = sink._server.server_port
    with pytest.raises(OSError, match="in use"):
        PrometheusSink(settings(tmp_path, str(port))).open()
    sink.close(FINISHED)
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_a_client_of_prometheus_that_leaves_or_is_silent_does_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _Handler.timeout == 5.0
    monkeypatch.setattr(_Handler, "timeout", 0.05)
    sink = PrometheusSink(settings(tmp_path))
    sink.open()
    assert sink._server is not None
    address = ("127.0.0.1", sink._server.server_port)
    with socket.create_connection(address), socket.create_connection(address) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close is a reset
        gone.sendall(b"GET /metrics HTTP/1.0\r\n")
        gone.close()
        assert httpx2.get(f"http://127.0.0.1:{address[1]}/metrics").status_code == 200
    sink.close(FINISHED)
    assert capfd.readouterr().err == ""


def test_the_file_for_the_node_exporter_is_whole_and_readable_and_keeps_the_end(tmp_path: Path) -> None:
    """Under a umask that lets no other user read files."""
    folder = tmp_path / "textfiles"
    folder.mkdir()
    sink = PrometheusSink(settings(tmp_path / "run", str(folder)))
    umask = os.umask(0o077)
    try:
        sink.open()
        sink.log(WARM)
        sink.close(RunEnd(state="failed", message="x"))
    finally:
        os.umask(umask)
    (path,) = folder.iterdir()
    assert (path.name, path.stat().st_mode & 0o777) == ("rl_megatron_run.prom", 0o644)
    families = {one.name: one.samples[0] for one in text_string_to_metric_families(path.read_text())}
    assert families["rl_megatron_warm_start_loss"].value == 1.25
    assert families["rl_megatron_run_ended"].labels == {"run": "run", "state": "failed"}


@pytest.mark.parametrize("argument", ["65536", "relative/folder", "-1", "9400x", "0.0.0.0:9400"])
def test_prometheus_has_a_port_or_a_full_path(tmp_path: Path, argument: str) -> None:
    with pytest.raises(ConfigError, match=f"log.sinks=prometheus:{re.escape(argument)}: write prometheus, "):
        make_sink(f"prometheus:{argument}", settings(tmp_path))


# A webhook, with a server on this machine.
class Receiver(BaseHTTPRequestHandler):
    """Answers with the statuses in order, then with 200. A path of the answer's text is the request's, as some have."""

    statuses: tuple[int, ...] = ()
    bodies: tuple[dict[str, str], ...] = ()

    def do_POST(self) -> None:
        Receiver.bodies += (json.loads(self.rfile.read(int(self.headers["Content-Length"]))),)
        status, *rest = *Receiver.statuses, 200
        Receiver.statuses = (*rest[:-1],)
        self.send_response(status, f"no {self.path}")
        self.send_header("Location", f"http://127.0.0.1:1{self.path}")
        self.end_headers()

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a receiver."""
    monkeypatch.setattr("rl_megatron.observability.sinks.webhook._WAIT_SECONDS", 0.0)
    monkeypatch.setattr(Receiver, "statuses", ())
    monkeypatch.setattr(Receiver, "bodies", ())
    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/services/SECRET"
        server.shutdown()


@pytest.mark.parametrize(
    ("statuses", "attempts"), [((), 1), ((500, 429), 3), ((204,), 1), ((503, 503, 503), 3), ((404,), 1), ((302,), 1)]
)
def test_the_webhook_gets_the_end_of_a_run_and_its_url_is_in_no_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    statuses: tuple[int, ...],
    attempts: int,
) -> None:
    caplog.set_level(logging.INFO, logger="rl_megatron")
    monkeypatch.setattr(Receiver, "statuses", statuses)
    sinks = Sinks(("webhook",), settings(tmp_path / "run7", RL_MEGATRON_WEBHOOK=hook))
    sinks.log({**ROW, "step": 12})
    sinks.end = RunEnd(state="failed", message=f"rank 3 <!channel> died{'.' * 1000}")
    sinks.close()
    assert [*Receiver.bodies] == [Receiver.bodies[0]] * attempts
    assert Receiver.bodies[0]["text"].startswith("run run7: failed at step 12: rank 3 &lt;!channel&gt; died...")
    assert len(Receiver.bodies[0]["text"]) < 700
    assert "SECRET" not in caplog.text
    lost = statuses[-1:] if len(statuses) == attempts and statuses[-1] not in (204,) else ()
    assert caplog.messages == [
        f"log.sinks: webhook is switched off (ConnectionError: the webhook did not take a message: status {one}); "
        "training continues, and metrics.jsonl has all rows"
        for one in lost
    ]


def test_a_webhook_that_is_away_is_named_without_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rl_megatron.observability.sinks.webhook._WAIT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sinks = Sinks(("webhook",), settings(tmp_path, RL_MEGATRON_WEBHOOK=f"http://localhost:{port}/SECRET"))
    sinks.close()
    (warning,) = caplog.messages
    assert "the webhook did not take a message: ConnectError" in warning
    assert "SECRET" not in caplog.text


def test_the_webhook_gets_a_verdict_that_becomes_bad_and_is_bad_no_longer(tmp_path: Path, hook: str) -> None:
    """Five steps after the change, once; also across a resume, which reads the rows before it."""

    def row(step: int) -> JsonRow:
        bad = 20 < step <= 40
        return {"phase": "rl", "step": step, "mismatch/logprob_abs_mean": 1.0 if bad else 1e-6, "grad_norm": 0.5}

    def bad_at(step: int) -> bool:
        verdicts = read_run([row(k) for k in range(1, step + 1)])
        return any((one.topic, one.state) == ("mismatch", "bad") for one in verdicts)

    made = [row(step) for step in range(1, 61)]
    changes = [step for step in range(2, 61) if bad_at(step) != bad_at(step - 1)]
    for fresh, part in ((True, made[:36]), (False, made[36:])):
        given = settings(tmp_path / "run7", fresh=fresh, RL_MEGATRON_WEBHOOK=hook)
        sink, writer = WebhookSink(given), MetricsWriter(given.folder)
        for one in part:
            writer.write(one)
            sink.log(one)
            sink.log(one)  # a row that replaces it is no other step
    first, second = [one["text"] for one in Receiver.bodies]
    assert len(changes) == 2
    assert first.startswith(f"run run7: step {changes[0] + 4}: Engine and learner disagree: ")
    assert second.startswith(f"run run7: step {changes[1] + 4}: mismatch is no longer bad. Updates are healthy: ")


@pytest.mark.parametrize(
    ("name", "url", "text"),
    [
        ("webhook", "", "RL_MEGATRON_WEBHOOK is not set"),
        ("webhook", "http://example.org/SECRET", "RL_MEGATRON_WEBHOOK is no https:// URL, or http:// to this machine"),
        ("webhook", "https:///SECRET", "is no https://"),
        ("webhook", "https://[SECRET", "is no https://"),
        ("webhook:https://hooks.example.org/SECRET", "https://x.org/", "RL_MEGATRON_WEBHOOK alone"),
    ],
)
def test_a_webhook_without_a_safe_url_is_refused_and_the_url_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, url: str, text: str
) -> None:
    monkeypatch.setenv("RL_MEGATRON_WEBHOOK", url)
    config = load_config("tiny_cpu", [f"log.sinks={name}"])
    (found,) = preflight.check(PreflightContext(config, for_job=False))
    assert found.kind == "problem"
    assert text in found.text
    assert "SECRET" not in found.text


def test_the_webhook_of_a_job_is_exported_by_its_setup_and_not_by_its_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RL_MEGATRON_WEBHOOK", raising=False)

    def found(*keys: str) -> list[str]:
        config = load_config("tiny_cpu", ["log.sinks=webhook", *keys])
        return [one.kind for one in preflight.check(PreflightContext(config, for_job=True))]

    assert found() == ["problem"]
    assert found("slurm.setup=. ~/secrets") == ["unchecked"]
    assert found("slurm.environment.RL_MEGATRON_WEBHOOK=https://x.org/") == ["problem"]


def test_packages_and_secrets_of_the_cluster_are_not_checked_away_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_MEGATRON_WEBHOOK", raising=False)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sinks_module, "find_spec", lambda _: None)
    config = load_config("tiny_cpu", ["log.sinks=wandb,webhook,nope"])
    found = [one.kind for one in preflight.check(PreflightContext(config, for_job=True, off_cluster=True))]
    assert found == ["unchecked", "unchecked", "problem"]


# MLflow, by its client where it is installed.
@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address: of a database, where MLflow's client is installed with what that needs."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_mlflow_keeps_rows_and_the_end_and_a_resume_continues_the_run(tmp_path: Path, tracking: str) -> None:
    """Not in CI, which has no MLflow."""
    from mlflow import MlflowClient

    for fresh, row, state in ((True, WARM, "stopped"), (False, ROW, "finished"), (False, ROW, "failed")):
        given = settings(tmp_path / "run7", fresh=fresh, MLFLOW_TRACKING_URI=tracking)
        sink = make_sink("mlflow", given)
        sink.open()
        sink.log(row)
        sink.close(RunEnd(state=state))  # type: ignore[arg-type]
    client = MlflowClient(tracking_uri=tracking)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run7", "FAILED")
    (loss,) = {(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")}
    assert loss == (3, 0.25)
    warm = client.get_metric_history(run.info.run_id, "warm_start/loss")
    assert [(one.step, one.value) for one in warm] == [(40, 1.25)]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The client of a module in MLflow's place."""
    package = MagicMock()
    entities = types.ModuleType("mlflow.entities")
    entities.Metric = lambda *values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    client: MagicMock = package.MlflowClient.return_value
    client.create_run.return_value.info.run_id = "r1"
    client.create_experiment.return_value = "e1"
    return client


def test_mlflow_gets_one_run_with_its_rows_its_status_and_its_resume(tmp_path: Path, mlflow: MagicMock) -> None:
    mlflow.get_experiment_by_name.return_value = None
    for fresh, state in ((True, "stopped"), (False, "failed")):
        sink = MlflowSink(settings(tmp_path / "run7", fresh=fresh, MLFLOW_TRACKING_URI="http://127.0.0.1:5000"))
        sink.open()
        sink.log(ROW)
        sink.close(RunEnd(state=state))  # type: ignore[arg-type]
    calls = [(name, *one) for name, one, _ in mlflow.method_calls if name not in ("log_batch",)]
    assert calls == [
        ("get_experiment_by_name", "p"),
        ("create_experiment", "p"),
        ("create_run", "e1"),
        ("set_terminated", "r1", "KILLED"),
        ("update_run", "r1"),
        ("set_terminated", "r1", "FAILED"),
    ]
    identity, metrics = mlflow.log_batch.call_args.args[0], mlflow.log_batch.call_args.kwargs["metrics"]
    assert (identity, [(name, value, x) for name, value, _, x in metrics]) == (
        *("r1", [("step", 3.0, 3), ("loss", 0.25, 3), ("reward/mean", 0.5, 3)]),
    )


def test_mlflow_takes_an_experiment_that_another_run_creates_meanwhile(tmp_path: Path, mlflow: MagicMock) -> None:
    mlflow.create_experiment.side_effect = RuntimeError("it exists")
    mlflow.get_experiment_by_name.side_effect = [None, MagicMock(experiment_id="e2")]
    MlflowSink(settings(tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:5000")).open()
    assert mlflow.create_run.call_args.args == ("e2",)
    mlflow.get_experiment_by_name.side_effect = [None, None]
    with pytest.raises(RuntimeError, match="it exists"):
        MlflowSink(settings(tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:5000")).open()


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("", "MLFLOW_TRACKING_URI is not set"),
        ("https://me:hidden@example.org", r"holds a secret \(user name and password\)"),
    ],
)
@pytest.mark.usefixtures("mlflow")
def test_mlflow_has_an_address_without_a_secret(tmp_path: Path, address: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make_sink("mlflow", settings(tmp_path, MLFLOW_TRACKING_URI=address))
    assert "hidden" not in str(caught.value)


# W&B, by a module in its place.
@pytest.mark.parametrize(("package", "name"), [("wandb", "wandb:offline"), ("mlflow", "mlflow")])
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"log\.sinks={package} needs .*rl-megatron\[{package}\].*from log\.sinks"):
        make_sink(name, settings(tmp_path))


@pytest.mark.parametrize(("argument", "mode"), [("", "online"), ("offline", "offline")])
def test_wandb_gets_the_run_its_axes_and_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, mode: str
) -> None:
    package = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    sink = WandbSink(settings(tmp_path / "run7", argument))
    sink.open()
    sink.log(WARM)
    sink.log({"step": 1, "phase": "rl", "loss": 0.5})
    sink.close(RunEnd(state="failed"))
    options = package.init.call_args.kwargs
    assert (options["mode"], options["project"], options["name"], options["resume"]) == (mode, "p", "run7", "allow")
    calls = [(name, *one, kwargs) for name, one, kwargs in package.init.return_value.method_calls]
    warm = {"warm_start/step": 40, "warm_start/loss": 1.25, "warm_start/eval/accuracy": 0.5}
    assert calls == [
        ("define_metric", "warm_start/*", {"step_metric": "warm_start/step"}),
        ("define_metric", "*", {"step_metric": "step"}),
        ("log", warm, {}),
        ("log", {"step": 1, "loss": 0.5}, {}),
        ("finish", {"exit_code": 1}),
    ]
    sink.abandon()
    package.teardown.assert_called_once_with()


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Begins a run in a folder and returns its id at W&B."""
    package = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", package)

    def begin(folder: Path, *, fresh: bool = False) -> str:
        WandbSink(settings(folder, fresh=fresh)).open()
        return str(package.init.call_args.kwargs["id"])

    return begin


def test_wandb_has_one_run_for_each_that_starts_anew_whatever_its_folder(
    tmp_path: Path, ids: Callable[..., str]
) -> None:
    order = (("a", True), ("a", False), ("b", True), ("b", False), ("a", False), ("a", True), ("a", False))
    found = [ids(tmp_path / of / "run", fresh=fresh) for of, fresh in order]
    first, _, other, _, _, again, _ = found
    assert found == [first, first, other, other, first, again, again]
    assert len({first, other, again, "run"}) == 4


def test_a_copied_folder_is_a_run_of_its_own_at_wandb(tmp_path: Path, ids: Callable[..., str]) -> None:
    """Its name tells it apart. An id that an older version kept has no name, and stays."""
    first = ids(tmp_path / "x", fresh=True)
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    copied, *later = [ids(tmp_path / of) for of in ("y", "x", "y")]
    assert later == [first, copied]
    assert first != copied
    (tmp_path / "y" / "wandb_id.txt").write_text("older")
    assert ids(tmp_path / "y") == "older"


def test_a_resume_that_turns_wandb_on_begins_a_run_of_its_own_there(tmp_path: Path, ids: Callable[..., str]) -> None:
    first, again, other, once_more = [ids(tmp_path / of / "run") for of in "aabb"]
    assert (first, other) == (again, once_more)
    assert len({first, other, "run"}) == 3


def test_a_resume_of_a_run_that_wandb_has_without_id_keeps_its_folders_name(
    tmp_path: Path, ids: Callable[..., str]
) -> None:
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    assert [ids(tmp_path / "run") for _ in range(2)] == ["run", "run"]
