"""report.html of several runs: what differs is named, seeds of one configuration are one arm, lines look different."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import pytest

from rl_megatron.observability.history import load_runs
from rl_megatron.observability.report import write_report
from tests.unit.launcher.commands import status_of
from tests.unit.observability.report_pages import Page, a_run


def test_runs_compared_share_axes_and_show_what_differs(tmp_path: Path) -> None:
    runs = [
        a_run(tmp_path / "a"),
        a_run(tmp_path / "b", scale=0.5, steps=4, seed=7),
        a_run(tmp_path / "x" / "a", warm=0),
    ]
    page = Page(write_report(runs, tmp_path / "out" / "r.html"))
    charts = page.charts()
    assert charts["Reward"]["names"] == [[f"{tmp_path.name}/a", 0], [f"{tmp_path.name}/b", 1], ["x/a", 2]]
    step_2 = next(values for _, label, values in charts["Reward"]["points"] if label == "step 2")
    assert [text.split()[0] for _, _, text in step_2] == ["0.2", "0.1", "0.2"]
    assert step_2[0][1] == step_2[2][1] < step_2[1][1], "a greater reward is higher up, equal ones are level"
    keys = re.findall(r"(?m)^\s*((?:\w+\.)*\w+)\s*$", page.text)
    assert "seed" in page.text
    assert "train.steps" in page.text
    assert "rollout.group_size" not in page.text, keys
    assert sum(name.startswith("Where the time goes") for name in charts) == 3


def test_a_comparison_leaves_each_runs_own_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (a_run(tmp_path / name) for name in "ab")
    for given, written in (((one,), "report.html"), ((one, two), "comparison.html")):
        assert (status_of("report", *map(str, given)), capsys.readouterr().out) == (0, f"{one / written}\n")
    assert "2 runs compared" not in (one / "report.html").read_text()
    assert "2 runs compared" in (one / "comparison.html").read_text()


def test_runs_that_differ_in_the_seed_alone_are_one_arm_with_a_band(tmp_path: Path) -> None:
    """Band of four seeds by Student's t of 3 degrees, 3.182; of two, from the least to the greatest."""
    scales = {"fast": [1.0, 1.1, 0.9, 1.2], "slow": [0.5, 0.7]}
    runs = [
        a_run(tmp_path / f"{name}-s{seed}", scale=scale, seed=seed, train={"steps": 6, "learning_rate": rate})
        for (name, each), rate in zip(scales.items(), (1e-3, 1e-4), strict=True)
        for seed, scale in enumerate(each)
    ]
    page = Page(write_report([runs[4], *runs[:4], runs[5]], tmp_path / "r.html"))
    reward = page.charts()["Reward"]
    assert reward["names"] == [["learning_rate=0.0001 (2 seeds)", 0], ["learning_rate=0.001 (4 seeds)", 1]]
    step_2 = next(values for _, label, values in reward["points"] if label == "step 2")
    rewards = [0.2, 0.22, 0.18, 0.24]
    mean, half = 0.21, 3.1824 * (sum((r - 0.21) ** 2 for r in rewards) / 3 / 4) ** 0.5
    assert step_2[0][2] == "0.12 (0.1 to 0.14)"
    assert step_2[1][2] == f"{mean:.4g} ({mean - half:.4g} to {mean + half:.4g})"
    assert len(page.styles("band")) == 2
    text = re.sub(r"\s+", " ", page.text)
    assert "with fewer than 4 runs goes from the least value to the greatest" in text
    assert "seed" in text
    assert text.count("6 of 6") == 6, "a row a run"
    rows = [a.get("class") for tag, a in page.tags if tag == "td"]
    assert rows.count("best") == 1


@pytest.mark.parametrize(
    ("names", "arm"),
    [(("loss-s0", "loss-s1"), "loss"), (("bias_seed=10", "bias_seed=11"), "bias"), (("lens-0-a", "lens-1-b"), "lens")],
)
def test_an_arm_is_named_by_what_its_runs_have_in_common(tmp_path: Path, names: tuple[str, ...], arm: str) -> None:
    runs = [a_run(tmp_path / name, seed=seed) for seed, name in enumerate(names)]
    charts = Page(write_report(runs, tmp_path / "r.html")).charts()
    assert charts["Reward"]["names"] == [[f"{arm} (2 seeds)", 0]]


def test_arms_that_differ_in_many_keys_are_named_by_those_that_tell_them_apart(tmp_path: Path) -> None:
    many = [(4, 1e-3), (4, 1e-4), (8, 1e-4)]
    sizes = [{"group_size": n, "prompts_per_step": 64 // n, "max_new_tokens": 8 * n} for n, _ in many]
    keys = [{"train": {"learning_rate": r}, "rollout": size} for size, (_, r) in zip(sizes, many, strict=True)]
    runs = [a_run(tmp_path / f"{seed}{i}", seed=seed, **one) for seed in (0, 1) for i, one in enumerate(keys)]
    names = Page(write_report(runs, tmp_path / "r.html")).charts()["Reward"]["names"]
    assert [name for name, _ in names] == [f"group_size={n} learning_rate={r} (2 seeds)" for n, r in many]


def test_equal_runs_are_compared_not_averaged(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, seed=seed) for name, seed in (("before", 0), ("after", 0), ("other", 1))]
    names = Page(write_report(runs, tmp_path / "r.html")).charts()["Reward"]["names"]
    assert [name for name, _ in names] == ["before", "after", "other"]


def _relative_luminance(color: str) -> float:
    """WCAG 2.2's, of #rrggbb."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_twenty_runs_are_told_apart_and_each_can_be_hidden(tmp_path: Path) -> None:
    page = Page(write_report([a_run(tmp_path / f"r{i}", steps=1, warm=0) for i in range(20)], tmp_path / "r.html"))
    lines = page.styles("line")
    rules = re.findall(r"\n\.(s\d+)\{--c:var\((--c\d)\);--on:(\d+)px;--off:(\d+)px\}", page.text)
    looks = {style: (color, off != "0" and (on, off)) for style, color, on, off in rules}
    assert len({looks[style] for style in lines}) == len(lines) == 20
    assert "stroke-dasharray: var(--on) var(--off)" in page.text
    for theme in page.themes():
        card = _relative_luminance(theme["--card"])
        for color in {looks[style][0] for style in lines}:
            low, high = sorted((_relative_luminance(theme[color]), card))
            assert (high + 0.05) / (low + 0.05) >= 3, f"{color}: a line's contrast by WCAG 2.2, 1.4.11"
    boxes = [a["id"] for tag, a in page.tags if a.get("type") == "checkbox" and "checked" in a]
    rule = r"body:has\(#(\w+):not\(:checked\)\) figure:not\(\.stack\) \.(s\d+)\{display:none\}"
    assert re.findall(rule, page.text) == list(zip(boxes, lines, strict=True))


def test_a_long_run_takes_few_bytes_a_number(tmp_path: Path) -> None:
    """A float in a dict takes 24 bytes and its place there more, so twenty-four runs of 10,000 steps took gigabytes."""
    steps, names = 400, [f"observer/{number}" for number in range(100)]
    with (a_run(tmp_path / "a", steps=1, warm=0) / "metrics.jsonl").open("a") as file:
        for step in range(2, steps):
            file.write(json.dumps({"phase": "rl", "step": step, **dict.fromkeys(names, step + 0.1)}) + "\n")
    load_runs([tmp_path / "a"])  # what is imported or cached once is here from now on
    tracemalloc.start()
    try:
        (run,) = load_runs([tmp_path / "a"])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert run.numbers(names[-1]) == [step + 0.1 for step in range(2, steps)]
    assert taken / (steps * len(names)) < 16
