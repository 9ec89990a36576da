"""The progress display: plain lines that can be grepped, and a live panel on a terminal."""

from __future__ import annotations

import asyncio
import io
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.jobs import LogSection
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder

RL = {"phase": "rl", "step": 4, "reward/mean": 0.5, "loss": -0.00123, "seconds/step": 2.0, "tokens/rollout": 1000}
EQUAL = "groups/zero_advantage_fraction"
WHITENED = ["algorithm=reinforce", "algorithm.advantage_mean=none", "algorithm.whiten=true"]
WARM = {"phase": "warm_start", "step": 0, "warm_start/step": 20, "warm_start/loss": 0.75, "eval/accuracy": 0.25}


def _console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, color_system=None, legacy_windows=False), file


def test_plain_lines_are_exact() -> None:
    console, file = _console(terminal=False)
    with Progress(10, title="gspo", run_folder=Path("runs/a"), console=console) as progress:
        progress.note("making the model [in] runs/.cache")
        progress.phase("warm start", total=40)
        progress.step(WARM)
        progress.phase("rollout")
        progress.step(RL)
        progress.step({**RL, "step": 5, "loss": None, "eval/accuracy": 0.75, "seconds/step": 4.0, "checkpoint/step": 4})
        progress.step({**RL, "step": 10, EQUAL: 0.375})
        progress.step({**RL, "step": 10, EQUAL: 1.0})
    assert file.getvalue().splitlines() == [
        "making the model [in] runs/.cache",
        "warm_start 20/40 accuracy=0.25 loss=0.75",
        "step 4/10 reward=0.5 loss=-0.00123 seconds=2 tokens/s=500 eta=12s",
        "step 5/10 reward=0.5 accuracy=0.75 loss=not_finite seconds=4 tokens/s=250 eta=15s checkpoint=4",
        "step 10/10 reward=0.5 learn=62% loss=-0.00123 seconds=2 tokens/s=500",
        "step 10/10 reward=0.5 learn=0% loss=-0.00123 seconds=2 tokens/s=500",
    ]


def test_auto_is_live_on_a_terminal_alone() -> None:
    for terminal in (False, True):
        console, file = _console(terminal=terminal)
        with Progress(10, "auto", "gspo", console=console):
            pass
        assert ("╭" in file.getvalue()) is terminal


def test_the_live_panel_shows_the_state_of_the_run() -> None:
    console, file = _console(terminal=True)
    with Progress(10, "live", "gspo [tiny]", run_folder=Path("runs/a"), console=console) as progress:
        assert "starting" in file.getvalue()
        progress.note("a note [with brackets]")
        progress.phase("warm start", total=40)
        progress.step(WARM)
        progress.step({**RL, "reward/mean": 0.0, "checkpoint/step": 3})
        progress.step({**RL, "step": 5, "reward/mean": 1.0})
    text = file.getvalue()
    assert "a note [with brackets]" in text
    last = text[text.rindex("╭") :]
    shown = ["gspo [tiny]", "step 5/10", "50 %", "10s left", "done", "1.000  ▁█  0 to 1", "0.250  at warm_start 20/40"]
    for part in [*shown, "500  (2 s a step)", "step 3", "runs/a", "-0.00123"]:
        assert part in last, part


def test_the_panel_says_that_no_group_teaches() -> None:
    console, file = _console(terminal=True)
    with Progress(10, "live", console=console) as progress:
        progress.step({**RL, EQUAL: 1.0})
    assert "0% of the groups teach: each group's rewards are equal" in file.getvalue()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], True),
        (["algorithm=dapo"], True),
        *[
            ([f"algorithm={name}"], False)
            for name in ("spo", "reinforce", "reinforce_plus_plus", "remax", "ppo", "vapo", "distill")
        ],
        (["algorithm.advantage_mean=moving", "algorithm.baseline_decay=0.9", "algorithm.advantage_std=none"], False),
        (["algorithm=grpo", "algorithm.nll_coefficient=0.1"], False),
        (["algorithm=reinforce", "algorithm.advantage_mean=none"], False),
        (["algorithm=reinforce", "algorithm.advantage_mean=none", "algorithm.advantage_std=group"], True),
        (WHITENED, False),
    ],
)
@pytest.mark.parametrize("mode", ["live", "plain"])
def test_groups_of_equal_rewards_that_teach_are_not_said_to_teach_nothing(
    keys: list[str], said: bool, mode: Literal["live", "plain"]
) -> None:
    console, file = _console(terminal=mode == "live")
    section = load_config("tiny_cpu", keys).algorithm
    with Progress(10, mode, console=console, needs_differences=section.needs_differences) as progress:
        progress.step({**RL, EQUAL: 1.0})
    assert ("learn=0%" in file.getvalue() or "0% of the groups teach" in file.getvalue()) is said


@pytest.mark.parametrize(
    ("equal", "warned_after"),
    [
        ([1.0] * 9, 5),
        ([1, 1, 1, 1, 0.5, 1, 1, 1, 1], None),
        ([None, *[1.0] * 5], 6),
        ([1.0] * 5 + [0.0] + [1.0] * 5, 5),
    ],
)
def test_steps_that_teach_nothing_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, equal: list[float | None], warned_after: int | None
) -> None:
    console, file = _console(terminal=False)
    warned = []
    with closing(Recorder(tmp_path, LogSection(tensorboard=False), Progress(10, console=console))) as recorder:
        for step, share in enumerate(equal, 1):
            asyncio.run(recorder.write({"phase": "rl", "step": step, **({} if share is None else {EQUAL: share})}))
            warned.append(caplog.text.count("no advantage differed from 0 for 5 steps"))
    assert warned == [int(warned_after is not None and step >= warned_after) for step in range(1, len(equal) + 1)]
    assert ("warm_start.steps" in caplog.text) == (warned_after is not None)
    assert "no advantage" not in file.getvalue(), "stderr has it from the logger"


def test_a_critic_that_teaches_equal_groups_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    console, _ = _console(terminal=False)
    with closing(Recorder(tmp_path, LogSection(tensorboard=False), Progress(10, console=console))) as recorder:
        for step in range(9):
            row = {"phase": "rl", "step": step, EQUAL: 1.0, "advantage/mean": 0.0, "advantage/std": 0.1}
            asyncio.run(recorder.write(row))
    assert not caplog.text


@pytest.mark.parametrize(("error", "word"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_the_last_panel_says_how_the_run_ended(error: type[BaseException], word: str) -> None:
    console, file = _console(terminal=True)
    with pytest.raises(error), Progress(10, "live", console=console):
        raise error
    assert word in file.getvalue()[file.getvalue().rindex("╭") :]
    assert file.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"
