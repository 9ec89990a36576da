"""Shows a run's progress: a live panel on a terminal, or one plain line per recorded step.

Its figures come from the metrics rows, so the display and metrics.jsonl cannot disagree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rl_megatron.observability.files import STEPS, JsonValue, number

SECONDS_BETWEEN_NOTES = 10.0
_WIDE = 120
"""Columns of a terminal from which on the panel draws more than the reward."""
_BARS = "▁▂▃▄▅▆▇█"
_EQUAL = "groups/zero_advantage_fraction"
_LINE = (
    ("reward", "reward/mean"),
    ("useful_groups", _EQUAL),
    ("accuracy", "eval/accuracy"),
    ("loss", "loss"),
    ("loss", "warm_start/loss"),
    ("eval_loss", "eval/loss"),
    ("grad_norm", "grad_norm"),
    ("entropy", "entropy"),
    ("seconds", "seconds/step"),
)


def seldom(note: Callable[[str], None]) -> Callable[[str], None]:
    """Wraps ``note`` so that it gets at most a line every ``SECONDS_BETWEEN_NOTES`` from now on."""
    last = time.monotonic()

    def noted(text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= SECONDS_BETWEEN_NOTES:
            last = now
            note(text)

    return noted


class Progress:
    """Shows a run's progress, as a context manager. ``auto`` means live on a terminal and plain elsewhere.

    ``needs_differences``: groups of equal rewards give no gradient, so the share of the others is shown.
    """

    def __init__(
        self,
        total_steps: int,
        mode: Literal["auto", "live", "plain"] = "auto",
        title: str = "",
        *,
        run_folder: Path | None = None,
        needs_differences: bool = True,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console()
        self.total = total_steps  # may be known only once the data is read
        self._title = title
        self._folder, self._needs_differences = run_folder, needs_differences
        self._warm_total: int | None = None
        self._row: Mapping[str, JsonValue] = {"step": 0}
        self._past = {name: deque[float](maxlen=40) for name in ("reward/mean", "eval/accuracy", "entropy")}
        self._seconds: deque[float] = deque(maxlen=10)
        self._accuracy: tuple[float, str] | None = None
        self._checkpoint: int | None = None
        self._last_line: str | None = None
        self._has_ended = False
        self._began = time.monotonic()
        self._activity: Spinner | Text = Spinner("dots", text=Text("starting"), style="cyan")
        live = mode == "live" or (mode == "auto" and self._console.is_terminal)
        self._live = Live(self, console=self._console, refresh_per_second=8) if live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = "stopped" if self._last_line else "done"
        self._activity = Text(ended if kind is None else "interrupted" if kind is KeyboardInterrupt else "failed")
        self._has_ended = True
        if self._live is not None:
            self._live.stop()
            if self._last_line:
                print(self._last_line, file=self._console.file, flush=True)

    def phase(self, name: str, total: int | None = None) -> None:
        """Sets the phase that the live panel shows. ``total`` is the number of warm-start steps in that phase."""
        self._activity = Spinner("dots", text=Text(name), style="cyan")
        if total is not None:
            self._warm_total = total

    def note(self, text: str) -> None:
        """Prints a line immediately; in live mode above the panel."""
        self._print(text)

    def stopped(self, text: str) -> None:
        """Marks the run as stopped before its end. ``text`` tells how to resume it, and is the last line."""
        self._last_line = text
        if self._live is None:
            self._print(text)

    def step(self, row: Mapping[str, JsonValue]) -> None:
        """Shows a row of metrics.jsonl, from the warm start, from RL, or of an evaluation in the background."""
        if row.get("phase") == "eval":
            self._evaluated(row)
            return
        self._row = row
        if (seconds := number(row, "seconds/step")) is not None and row.get("phase") in STEPS:
            self._seconds.append(seconds)
        for name, past in self._past.items():
            if (value := number(row, name)) is not None:
                past.append(value)
        if (accuracy := number(row, "eval/accuracy")) is not None:
            self._accuracy = accuracy, self._position()
        if (saved := number(row, "checkpoint/step")) is not None:
            self._checkpoint = int(saved)
        if self._live is None:
            self._print(self._line())

    def _evaluated(self, row: Mapping[str, JsonValue]) -> None:
        at = f"step {row['step']}"
        if (accuracy := number(row, "eval/accuracy")) is not None:
            self._accuracy = accuracy, at
            self._past["eval/accuracy"].append(accuracy)
        if self._live is None:
            fields = [
                f"{label}={_show(row[name])}" for label, name in (*_LINE, ("seconds", "seconds/eval")) if name in row
            ]
            self._print(" ".join([at, "evaluated", *fields]))

    def _print(self, text: str) -> None:
        if self._live is None:
            print(text, file=self._console.file, flush=True)
        else:
            self._console.print(text, markup=False, highlight=False)

    def _position(self) -> str:
        warm = self._row.get("phase") == "warm_start"
        at, total = ("warm_start/step", self._warm_total) if warm else ("step", self.total)
        return f"{'warm_start' if warm else 'step'} {self._row.get(at, 0)}" + (f"/{total}" if total else "")

    def _line(self) -> str:
        fields = [f"{label}={self._shown(name)}" for label, name in _LINE if name in self._row and self._says(name)]
        if (speed := self._tokens_per_second()) is not None:
            fields.append(f"tokens/s={speed:.0f}")
        if self._row.get("phase") != "warm_start":
            fields += [f"eta={eta}" for eta in [self._eta()] if eta]
        if "checkpoint/step" in self._row:
            fields.append(f"checkpoint={self._checkpoint}")
        return " ".join([self._position(), *fields])

    def _says(self, name: str) -> bool:
        return self._needs_differences or name != _EQUAL

    def _shown(self, name: str) -> str:
        """A figure of the row; for groups the share with different rewards."""
        share = _useful_share(self._row) if name == _EQUAL else None
        return _show(self._row[name]) if share is None else f"{share:.0%}"

    def _tokens_per_second(self) -> float | None:
        """Sampled tokens over the time of the whole step: the end-to-end speed."""
        tokens, seconds = number(self._row, "tokens/rollout"), number(self._row, "seconds/step")
        return None if tokens is None or not seconds else tokens / seconds

    def _eta(self) -> str:
        left = 0 if self._has_ended else self.total - int(number(self._row, "step") or 0)
        return _duration(left * sum(self._seconds) / len(self._seconds)) if self._seconds and left > 0 else ""

    def __rich__(self) -> Panel:
        warm = self._row.get("phase") == "warm_start"
        done = number(self._row, "warm_start/step" if warm else "step") or 0
        total = self._warm_total if warm else self.total
        head = Table.grid(padding=(0, 2))
        eta = self._eta()
        head.add_row(
            Text(self._position(), style="bold"),
            ProgressBar(total=total, completed=done, width=36, complete_style="cyan", finished_style="green"),
            Text(f"{100 * done / total:3.0f} %" if total else "", style="cyan"),
            Text(f"{eta} left" if eta else "", style="cyan"),
            Text(f"{_duration(time.monotonic() - self._began)} elapsed", style="dim"),
        )
        body = Table.grid(padding=(0, 2))
        body.add_row(Text("phase", style="dim"), self._activity)
        for label, value in self._facts():
            body.add_row(Text(label, style="dim"), value)
        title = Text(self._title or "run")
        width = self._console.width - len("^C")  # a terminal's echo of Ctrl-C fits after the last line
        return Panel(Group(head, Text(), body), title=title, title_align="left", border_style="cyan", width=width)

    def _facts(self) -> list[tuple[str, Text]]:
        facts = []
        is_wide = self._console.width >= _WIDE
        if rewards := self._past["reward/mean"]:
            facts.append(("reward", self._curve(rewards)))
        if self._says(_EQUAL) and (share := _useful_share(self._row)) is not None:
            text = f"{share:.0%} of the groups give a gradient" + ("" if share else ": each group's rewards are equal")
            facts.append(("useful groups", Text(text, style="" if share else "bold red")))
        if self._accuracy is not None:
            value, where = self._accuracy
            accuracy = self._curve(self._past["eval/accuracy"]) if is_wide else Text(f"{value:.3f}", style="bold")
            facts.append(("held-out accuracy", accuracy.append(f"  at {where}", style="not bold dim")))
        if is_wide and (entropies := self._past["entropy"]):
            facts.append(("entropy", self._curve(entropies)))
        losses = (self._row[name] for name in ("loss", "warm_start/loss") if name in self._row)
        facts += [("loss", Text(_show(loss))) for loss in losses]
        if (speed := self._tokens_per_second()) is not None:
            facts.append(("whole step: tokens/s", Text(f"{speed:,.0f}  ({_show(self._row['seconds/step'])} s a step)")))
        if self._checkpoint is not None:
            facts.append(("last checkpoint", Text(f"step {self._checkpoint}")))
        if self._folder is not None:
            facts.append(("run folder", Text(str(self._folder))))
            facts.append(("report", Text(f"{self._folder / 'report.html'}  (open it in a browser)")))
        return facts

    def _curve(self, values: Sequence[float]) -> Text:
        """The last of some values, a sparkline of all, and their range."""
        text = Text(f"{values[-1]:.3f}  ", style="bold")
        text.append(_sparkline(values), style="green")
        return text.append(f"  {min(values):.3g} to {max(values):.3g}", style="not bold dim")


def _useful_share(row: Mapping[str, JsonValue]) -> float | None:
    """Share of a step's groups whose rewards differ, so that they give a gradient."""
    equal = number(row, _EQUAL)
    return None if equal is None else 1 - equal


def _show(value: JsonValue) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "not_finite" if value is None else value


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / ((high - low) or 1.0)
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
