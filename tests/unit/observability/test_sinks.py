"""Sinks of metrics: the shipped ones, one of another package, and one that fails or hangs, which a run does not notice.

Sinks of other packages are found by their entry points, in the folder of an installed package.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import shutil
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from unittest.mock import MagicMock

import pytest
from typing_extensions import override

from launcher.commands.train import _open_sinks
from launcher.preflight import sinks as preflight
from launcher.preflight.subject import PreflightContext
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError, StopRequested, WorkerFailure
from rl_megatron.observability.files import JsonRow
from rl_megatron.observability.recorder import MetricsWriter
from rl_megatron.observability.sinks import sink as sinks_module
from rl_megatron.observability.sinks.sink import MAX_ROWS, MetricSink, RunEnd, Sinks, SinkSettings, make_sink
from rl_megatron.observability.sinks.tensorboard import TensorBoardSink
from rl_megatron.observability.sinks.wandb import WandbSink

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


# W&B, by a module in its place.
def test_wandb_that_is_not_installed_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log\.sinks=wandb needs .*rl-megatron\[wandb\].*remove wandb from log\.s"):
        make_sink("wandb:offline", settings(tmp_path))


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
