"""report.html of one run or several shows what was written, its charts, and nothing can break out of the page."""

from __future__ import annotations

import json
import logging
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_megatron.config.io import load_config
from rl_megatron.errors import DataError
from rl_megatron.observability import report
from rl_megatron.observability.files import JsonRow, read_jsonl
from rl_megatron.observability.history import SampleRow, SamplesWriter, SampleTurn, load_runs, number_text
from rl_megatron.observability.log import run_log
from rl_megatron.observability.metrics import METRICS, PHASE_SECONDS
from rl_megatron.observability.recorder import MetricsWriter
from rl_megatron.observability.report import make_plan_card, write_report
from tests.unit.launcher.commands import status_of
from tests.unit.observability.report_pages import EVIL, Page, a_run

EQUAL = "groups/zero_advantage_fraction"


def folded(page: Path) -> dict[str, list[str]]:
    """The titles of the charts of each folded section, and under "" of those that are open."""
    text, found = page.read_text(), dict[str, list[str]]()
    sections = re.findall(r"(?s)<details class=\"card\"><summary>(.*?): \d+ charts?</summary>(.*?)</details>", text)
    for name, part in [*sections, ("", re.sub("(?s)<details.*?</details>", "", text))]:
        found[name] = re.findall("<figcaption><h3>(.*?)</h3>", part)
    return found


def every_metric(folder: Path, steps: int) -> Path:
    """A run that recorded every metric that has a chart, with random values."""
    rng, curves = np.random.default_rng(0), [metric.curve for metric in METRICS.values() if metric.curve]
    named = {name for c in curves for name in (c.metric, c.spread, *c.others) if name} | {"seconds/step", EQUAL}
    names = sorted(name.replace("<name>", "n").replace("<k>", "8") for name in named)
    metrics = MetricsWriter(a_run(folder, steps=0))
    for step, row in enumerate(rng.normal(size=(steps, len(names))).tolist(), 1):
        metrics.write({"phase": "rl", "step": step, **dict(zip(names, row, strict=True))})
    metrics.close()
    return folder


@pytest.mark.parametrize("runs", [1, 2])
def test_fifteen_charts_are_open_and_the_rest_is_folded(tmp_path: Path, runs: int) -> None:
    folders = [every_metric(tmp_path / f"{n}", steps=4) for n in range(runs)]
    found = folded(write_report(folders, tmp_path / "r.html"))
    assert len(found[""]) == report.MAX_OPEN == 15
    first = ["Held-out accuracy", "Held-out loss", "Held-out preference accuracy", "Response length", "Entropy"]
    assert found[""][1:8] == [*first, "Groups with a gradient", "KL to reference"]
    assert list(found) == ["Evaluation", "Health", "Speed", "Everything else", ""]
    assert "MFU of the training phase" in found["Speed"]
    assert "Epochs" in found["Everything else"]


def test_lines_that_show_nothing_are_listed_by_name(tmp_path: Path) -> None:
    """Constants, zeros, straight lines, and those that equal another chart's; but not reward, accuracy and loss."""
    metrics = MetricsWriter(a_run(tmp_path / "a", steps=0, warm=0))
    for step in range(1, 12):
        row = {"reward/mean": 0.0, "loss": 0.5, "grad_norm": step % 3, "reward/errors": 0, "ledger/drawn": 64 * step}
        row |= {"entropy": 0.25, "moe/load_imbalance": step % 3, "clip_fraction": step**2, "steps/skipped": step > 10}
        metrics.write({"phase": "rl", "step": step, **row})
    page = write_report([tmp_path / "a"], tmp_path / "r.html")
    assert folded(page) == {
        "": ["Reward, mean ± standard deviation", "Clip fraction", "Gradient norm", "Loss"],
        "Everything else": ["Optimizer steps skipped"],
    }
    (line,) = re.findall(r"<p class=\"note\">Constant: (.*?)\.</p>", page.read_text())
    straight = "Prompts drawn (64 to 704 in a straight line)"
    assert line == f"Entropy (0.25), {straight}, Expert load imbalance (as Gradient norm), Reward errors (0)"


def test_groups_tokens_and_a_reward_of_two_values_are_derived_from_rows(tmp_path: Path) -> None:
    metrics = MetricsWriter(a_run(tmp_path / "a", steps=0))
    for step, mean in ((1, 0.25), (2, 0.5), (3, 0.75), (4, 0.5)):
        row = {"reward/mean": 2 * mean - 1, "reward/std": 2 * (mean * (1 - mean)) ** 0.5, EQUAL: mean / 2}
        row |= {"tokens/rollout": 600 * step, "seconds/step": 2.0, "groups/all_correct": mean / 4}
        metrics.write({"phase": "rl", "step": step, **row})
    page = Page(write_report([tmp_path / "a"], tmp_path / "r.html"))
    charts = page.charts()
    (reward,) = charts["Reward"]["series"]
    assert reward["low"] == pytest.approx([-1, -1, 0.5 - 0.75**0.5, -1], abs=1e-5), "its values are -1 and 1"
    assert reward["high"] == pytest.approx([-0.5 + 0.75**0.5, 1, 1, 1], abs=1e-5)
    assert {line["name"]: line["y"] for line in charts["Groups with a gradient"]["series"]} == {
        "groups/all_correct": [0.0625, 0.125, 0.1875, 0.125],
        "groups/with_gradient": [0.875, 0.75, 0.625, 0.75],
    }
    (axes,) = [json.loads(a["data-axes"] or "") for _, a in page.tags if "data-axes" in a]
    hours = [round(step * 2 / 3600, 9) for step in (1, 2, 3, 4)]
    assert axes == {"0": {"step": [1, 2, 3, 4], "hours": pytest.approx(hours), "tokens": [600, 1800, 3600, 6000]}}
    assert "Whole step: tokens/s (600 to" not in page.text
    assert "Whole step: tokens/s" in charts


def test_groups_of_equal_rewards_give_a_gradient_with_another_baseline(tmp_path: Path) -> None:
    for name in ("gspo", "reinforce"):
        algorithm = load_config("tiny_cpu", [f"algorithm={name}"]).algorithm.model_dump(mode="json")
        metrics = MetricsWriter(a_run(tmp_path / name, algorithm=algorithm))
        metrics.write({"phase": "rl", "step": 7, EQUAL: 0.25})
        charts = Page(write_report([tmp_path / name], tmp_path / "r.html")).charts()
        titles = ["Groups with a gradient", "Groups with different rewards"]
        assert [title in charts for title in titles] == [name == "gspo", name == "reinforce"]


def test_equal_lines_of_a_comparison_are_named(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, scale=scale) for name, scale in (("a", 1.0), ("b", 1.0), ("c", 0.5))]
    text = write_report(runs, tmp_path / "r.html").read_text()
    figures = dict(re.findall(r"(?s)<figure.*?<h3>(.*?)</h3>(.*?)</figure>", text))
    assert "a, b: equal to the bit." in figures["Reward, mean ± standard deviation"]
    assert "All lines are equal to the bit." in figures["Loss"]
    assert "equal to the bit" not in write_report([runs[0], runs[2]], tmp_path / "r.html").read_text().split("Loss")[0]


def test_a_run_and_a_comparison_have_their_charts_in_order(tmp_path: Path) -> None:
    """And where several are compared, the phases of each are in a section."""
    metrics = MetricsWriter(a_run(tmp_path / "a"))
    metrics.write({"phase": "rl", "step": 7, "reward/mean": 0.5, "memory/peak": 5, "tokens_per_second/rollout": 9.0})
    alone = [*Page(write_report([tmp_path / "a"], tmp_path / "one.html")).charts()]
    assert alone.index("Loss") < alone.index("Peak memory of a rank") < alone.index("Sampling phase: tokens/s")
    runs = [tmp_path / "a", a_run(tmp_path / "b", rollout={"group_size": 8})]
    both = [*Page(write_report(runs, tmp_path / "r.html")).charts()]
    times = [name for name in both if name.startswith("Step time by phase: ")]
    assert both.index("Loss") < both.index(times[0])
    assert len(times) == 2
    assert set(times) <= set(folded(tmp_path / "r.html")["Speed"])
    assert "Step time by phase" in folded(tmp_path / "one.html")[""]
    assert len(set(alone)) == len(alone)


def test_the_last_warnings_of_the_log_are_shown_as_text(tmp_path: Path) -> None:
    folder, out = a_run(tmp_path / "a"), tmp_path / "r.html"
    assert "Last warnings" not in write_report([folder], out).read_text()
    with run_log(folder, role="rank", rank=3):
        for number in range(5):
            logging.getLogger("launcher.servers").warning("server %d died <b>", number)
        logging.getLogger("launcher.servers").info("it is back")
        logging.getLogger("other").error("not ours")
    text = write_report([folder], out).read_text()
    assert "Last warnings" in text
    shown = re.findall(r"<p>([\d:]{8} rank 3: .*?)</p>", text)
    assert [line.split(": ", 1)[1] for line in shown] == [f"server {n} died &lt;b&gt;" for n in (2, 3, 4)]


def test_what_a_run_cost_is_text_of_its_page(tmp_path: Path) -> None:
    folder, out = a_run(tmp_path / "a"), tmp_path / "r.html"
    assert "Cost" not in write_report([folder], out).read_text()
    rows = list[JsonRow]()

    class Counted:
        def add(self, row: JsonRow) -> None:
            rows.append(row)

        def lines(self) -> list[str]:
            return [f"{len(rows)} GPU-hours <b>"]

    text = write_report([folder], out, costs=Counted(), note="Sums <").read_text()
    assert '<h2>Sample completions</h2>\n<p class="note">Sums &lt;</p>' in text
    assert rows == read_jsonl(folder / "metrics.jsonl")
    assert f"<p>{len(rows)} GPU-hours &lt;b&gt;</p>" in text


def test_headlines_are_the_runs_figures(tmp_path: Path) -> None:
    text = re.sub(r"\s+", " ", Page(write_report([a_run(tmp_path / "a")], tmp_path / "a" / "report.html")).text)
    for part in ("0.0 %→20.0 %→90.0 %", "last 1 step 0.6 ", "6 of 6", "0 min 12 s", "whole step 150 "):
        assert part.replace(" ", "") in text.replace(" ", ""), part


@pytest.mark.parametrize(("job", "last", "moved"), [("sft", 1.25, "better"), ("dpo", 1.75, "worse")])
def test_headlines_of_a_job_on_written_text_are_its_records(tmp_path: Path, job: str, last: float, moved: str) -> None:
    folders = [a_run(tmp_path / name, steps=0, warm=0, job=job, train={"steps": 2}) for name in ("a", "b")]
    pairs = {"eval/preference_accuracy": 0.75} if job == "dpo" else {}
    for folder in folders:
        metrics = MetricsWriter(folder)
        metrics.write({"phase": job, "step": 0, "eval/loss": 1.5})
        for step, loss in ((1, 9.0), (2, last)):
            row = {"tokens/train": 4000, "seconds/step": 2.0, "eval/loss": loss, **pairs}
            metrics.write({"phase": job, "step": step, **row})
        metrics.close()
    page = write_report(folders[:1], tmp_path / "r.html")
    tiles = re.findall(r'<div class="tile card[ wide]*"><dt>(.*?)</dt>\s*<dd.*?>(.*?)</dd>', page.read_text())
    figures = {name: re.sub("<.*?>", "", value) for name, value in tiles}
    ordered = {"Pairs in order": "75.0 %"} if pairs else {}
    rest = {"Steps": "2 of 2", "Time": "0 min 4 s", "Trained tokens/s, whole step": "2,000"}
    assert figures == {"Held-out loss: first → last": f"1.5→{last}", **ordered, **rest}
    assert f'<b class="{moved}">' in page.read_text()
    compared = write_report(folders, tmp_path / "both.html").read_text()
    table = compared[compared.index("<h2>Runs</h2>") : compared.index("<h2>Learning</h2>")]
    columns = ["Run", "Held-out loss", *ordered, "Steps", "Time", "Trained tokens/s, whole step"]
    assert re.findall(r"<th>([A-Z][^<]*)</th>", table) == columns
    assert "<td>-</td>" not in table


def test_each_recorded_value_is_in_its_chart(tmp_path: Path) -> None:
    """Of the warm start too: its steps 0, 10 and 20 lie before step 0, which the page writes as (x + 1) * (20 + 1)."""
    charts = Page(write_report([a_run(tmp_path / "a")], tmp_path / "r.html")).charts()
    accuracy = charts["Held-out accuracy"]
    (line,) = accuracy["series"]
    assert (accuracy["axis"], accuracy["warm"], accuracy["limits"]) == ("step", 20, [0, 1])
    assert [(x + 1) * 21 for x in line["x"][:3]] == pytest.approx([0, 10, 20], abs=1e-9)
    assert max(line["x"][:3]) < 0
    assert (line["x"][3:], line["y"]) == ([2, 4, 6], [0, 0.1, 0.2, 0.3, 0.6, 0.9])
    (reward,) = charts["Reward"]["series"]
    assert [reward[name][1] for name in ("x", "y", "low", "high")] == [2, 0.2, -0.05, 0.45]
    expected = {"rollout": [0.5] * 6, "train": [1] * 6, "other": [0.5] * 6}
    assert {line["name"]: line["y"] for line in charts["Step time by phase"]["series"]} == expected


def test_the_first_and_last_values_are_said_to_those_who_do_not_see_the_chart(tmp_path: Path) -> None:
    page = Page(write_report([a_run(tmp_path / "a")], tmp_path / "r.html"))
    labels = [a["aria-label"] for _, a in page.tags if a.get("role") == "img"]
    assert "Held-out accuracy. eval/accuracy: 0 in the warm start, 0.9 at step 6" in labels
    assert "Loss. loss: -0.5 at step 1, -3 at step 6" in labels


def test_a_constant_metric_is_hidden_also_where_a_row_lacks_it(tmp_path: Path) -> None:
    metrics = MetricsWriter(a_run(tmp_path / "a"))
    for step, servers in ((7, 2), (8, None), (9, 2), (10, 2)):
        metrics.write({"phase": "rl", "step": step, "engine/healthy": servers})
    assert "Healthy engine servers" not in Page(write_report([tmp_path / "a"], tmp_path / "r.html")).charts()
    metrics.write({"phase": "rl", "step": 11, "engine/healthy": 1})
    (line,) = Page(write_report([tmp_path / "a"], tmp_path / "r.html")).charts()["Healthy engine servers"]["series"]
    assert (line["x"], line["y"]) == ([7, 8, 9, 10, 11], [2, None, 2, 2, 1])


def test_no_two_phases_of_a_step_have_one_color(tmp_path: Path) -> None:
    every = {f"seconds/{name}": 0.01 for name in PHASE_SECONDS} | {"seconds/step": 1.0}
    folder = a_run(tmp_path / "a")
    MetricsWriter(folder).write({"phase": "rl", "step": 7, **every})
    page = Page(write_report([folder], tmp_path / "r.html"))
    colors = dict(re.findall(r"\.stack \.(s\d+)\{--c:var\((--p\d)\)\}", page.text))
    parts = [f"s{style}" for _, style in page.names("Step time by phase")]
    assert len(parts) == len(PHASE_SECONDS) + 1
    for theme in page.themes():
        assert len({theme[colors[style]] for style in parts}) == len(PHASE_SECONDS) + 1


def test_each_reward_part_has_a_chart_of_its_own(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=1)
    assert not [title for title in Page(write_report([folder], tmp_path / "r.html")).charts() if "part" in title]
    parts = {"reward/part/right": 0.25, "reward/part/style": 1.0}
    sets = {"eval/aime/pass_at_8": 0.5}
    row = {"step": 2, "phase": "rl", **parts, **sets, "source/math/share": 0.75, "source/math/reward": 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(row)}\n")
    charts = Page(write_report([folder], tmp_path / "r.html")).charts()
    assert [title for title in charts if "part" in title] == ["Reward part right", "Reward part style"]
    assert charts["Reward part right"]["series"][0]["y"] == [0.25]
    assert {"Source math: reward", "Source math: share of the groups"} <= charts.keys()
    (line,) = charts["Set aime: pass@8"]["series"]
    assert line["y"] == [0.5]


@pytest.mark.parametrize(("count", "of"), [(24, ""), (30, " (24 most trained of 30)")])
def test_of_many_sources_those_that_were_trained_on_most_have_charts(tmp_path: Path, count: int, of: str) -> None:
    """By groups, not by shares: of a step of 6 groups, all of sources 24 and on, and of one of 240, of those before."""
    folder, out = a_run(tmp_path / "a", steps=1), tmp_path / "r.html"
    with (folder / "metrics.jsonl").open("a") as file:
        for step, groups, trained in ((2, 6, range(24, count)), (3, 240, range(24))):
            shares = {f"source/s{n}/share": (n in trained) / max(1, len(trained)) for n in range(count)}
            file.write(json.dumps({"step": step, "phase": "rl", "groups/trained": groups, **shares}) + "\n")
    found = [title for title in Page(write_report([folder], out)).charts() if title.startswith("Source")]
    assert found == [f"Source s{n}: share of the groups{of}" for n in range(24)]


@pytest.mark.parametrize(("end", "moved"), [(0.1, "worse"), (0.2, "level"), (0.9, "better")])
def test_an_accuracy_that_has_not_risen_is_not_shown_as_a_gain(tmp_path: Path, end: float, moved: str) -> None:
    """The warm start ends at 0.2."""
    MetricsWriter(a_run(tmp_path / "a")).write({"phase": "rl", "step": 7, "eval/accuracy": end})
    page = Page(write_report([tmp_path / "a"], tmp_path / "r.html"))
    assert [a["class"] for tag, a in page.tags if tag == "b" and "class" in a] == [moved]


def test_variables_of_a_job_are_not_shown(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / n, slurm={"environment": {"WANDB_API_KEY": f"secret-{n}"}}) for n in ("a", "b")]
    for shown in (runs[:1], runs):
        assert "secret-" not in write_report(shown, tmp_path / "r.html").read_text()
    assert "WANDB_API_KEY" in write_report(runs[:1], tmp_path / "r.html").read_text()


def test_nothing_from_a_run_is_markup_and_nothing_is_fetched(tmp_path: Path) -> None:
    def tags(sample: str, name: str) -> list[str]:
        folder = a_run(tmp_path / name, data={"type": "files", "train": sample, "eval": "e"})
        SamplesWriter(folder).write([SampleRow(step=9, prompt=sample, completion=sample, answer=sample, reward=0)])
        page = Page(write_report([folder, a_run(tmp_path / f"other {name}")], tmp_path / "r.html"))
        if sample == EVIL:
            assert page.text.count(EVIL.replace("\ud800", "?")) >= 4
        assert not [a for _, a in page.tags if {"src", "href", "onerror", "onload"} & a.keys()]
        return [tag for tag, _ in page.tags]

    assert tags(EVIL, "a<b>'\"&") == tags("plain", "plain")
    assert "@import" not in (tmp_path / "r.html").read_text()
    assert "url(" not in (tmp_path / "r.html").read_text()
    assert "default-src 'none'" in (tmp_path / "r.html").read_text()


def test_a_run_that_still_goes_or_lacks_figures_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=1, warm=0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "phase": "rl", "loss": null}\n{"step": 3, "pha')
    (folder / "samples.jsonl").unlink()
    page = Page(write_report([folder], tmp_path / "r.html"))
    (line,) = page.charts()["Loss"]["series"]
    assert (line["x"], line["y"]) == ([1, 2], [-0.5, None])
    assert "Held-out accuracy" not in page.charts()
    assert "Sample completions" not in page.text
    warm_only = a_run(tmp_path / "w", steps=1)
    lines = (warm_only / "metrics.jsonl").read_text().splitlines(keepends=True)
    (warm_only / "metrics.jsonl").write_text("".join(lines[:3]))
    (line,) = Page(write_report([warm_only], tmp_path / "r.html")).charts()["Held-out accuracy"]["series"]
    assert ([round((x + 1) * 21) for x in line["x"]], line["y"]) == ([0, 10, 20], [0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", None, r"metrics\.jsonl: no step is recorded yet"),
        ("config.yaml", None, r"it has no config\.yaml; give run folders"),
        ("metrics.jsonl", "", r"metrics\.jsonl: no step is recorded yet"),
        ("metrics.jsonl", "{}\n", r"metrics\.jsonl:1: "),
        ("samples.jsonl", '{"step": 1}\n', r"samples\.jsonl: a row of step 1"),
        ("config.yaml", "a: [", r"config\.yaml: not YAML"),
        ("config.yaml", "- 1", r"config\.yaml: not a configuration"),
    ],
)
def test_missing_and_broken_files_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    folder = a_run(tmp_path / "a")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(DataError, match=message):
        write_report([folder], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_no_folder_and_a_folder_given_twice_are_refused(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    with pytest.raises(DataError, match="no run folder is given"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(DataError, match="given twice"):
        write_report([folder, tmp_path / "b" / ".." / "a"], tmp_path / "r.html")


def test_every_number_of_a_run_has_a_place_on_the_page() -> None:
    curves = [metric.curve for metric in METRICS.values() if metric.curve]
    assert {curve.section for curve in curves} == {part for parts in report._SECTIONS.values() for part in parts}
    shown = {name for c in curves for name in (c.metric, c.spread, *c.others)} - {None}
    shown |= {f"seconds/{phase}" for phase in PHASE_SECONDS}
    axes_and_totals = {
        *("step", "phase", "warm_start/step", "tokens/rollout", "tokens/train", "flops/train", "weights/bytes"),
        *("weights/route", "checkpoint/bytes", "checkpoint/step", "devices/<name>"),
    }
    assert METRICS.keys() - shown - axes_and_totals == {"metrics/non_finite"}
    assert shown <= METRICS.keys()
    assert set(report._OPEN) <= shown | {*report._DERIVED, report._PHASES}


def test_rows_of_an_older_version_are_read_by_the_names_of_today(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    text = (folder / "metrics.jsonl").read_text()
    old = text.replace('"step": ', '"steps/made": 5, "step": ', 1).replace('"phase"', '"reward/late": 2, "phase"')
    (folder / "metrics.jsonl").write_text(old)
    (run,) = load_runs([folder])
    assert set(run.numbers("reward/timeouts")) == {2.0}
    assert not set(run.names) & {"reward/late", "steps/made"}


def test_memory_and_mfu_are_beside_the_plans(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | ({"memory/peak": 7e9} if row["phase"] == "rl" else {}) for row in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plan.json").write_text('{"memory/peak": 8.5e9, "mfu/train": 0.4}')
    charts = Page(write_report([folder], tmp_path / "r.html")).charts()
    found = charts["Peak memory of a rank"]
    assert {line["name"]: set(line["y"]) for line in found["series"]} == {"plan": {8.5}, "memory/peak": {7}}
    assert (tmp_path / "r.html").read_text().count("<span>GB</span>") == 1
    assert not any("MFU" in name for name in charts)  # no row has it
    (folder / "plan.json").write_text("[1]")
    with pytest.raises(DataError, match=r"plan\.json: not a plan"):
        write_report([folder], tmp_path / "r.html")


def test_a_finished_run_has_a_report_without_a_plan_that_is_damaged(tmp_path: Path) -> None:
    folder, said = a_run(tmp_path / "a"), list[str]()
    whole = write_report([folder], tmp_path / "whole.html").read_text()
    (folder / "plan.json").write_text("[1]")
    assert write_report([folder], tmp_path / "r.html", said.append).read_text() == whole
    assert [line.partition(": ")[0] for line in said] == [f"{folder}/plan.json"]


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e400", str(10**400)])
def test_a_value_that_no_float_has_leaves_a_gap_as_a_null_does(tmp_path: Path, value: str) -> None:
    """The project's writer writes null for these; other programs may not."""

    def page(name: str, written: str) -> str:
        folder = a_run(tmp_path / name / "a")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"phase": "rl", "step": 7, "reward/mean": {written}, "loss": {written}, "mfu/train": 0.4}}\n')
        return write_report([folder], tmp_path / f"{name}.html").read_text()

    assert page("given", value) == page("null", "null")


@pytest.mark.parametrize("value", ["Infinity", str(10**400), '"8e9"'])
def test_a_plan_of_what_is_no_finite_number_is_refused_by_its_name(tmp_path: Path, value: str) -> None:
    folder = a_run(tmp_path / "a")
    (folder / "plan.json").write_text(f'{{"mfu/train": 0.4, "memory/peak": {value}}}')
    with pytest.raises(DataError, match=r"plan\.json: not a plan \(memory/peak is "):
        write_report([folder], tmp_path / "r.html")


def test_completions_are_counted_by_the_pushes_since_their_oldest_token(tmp_path: Path) -> None:
    """Of all steps alike, however many groups each has; not where none was sampled ahead."""
    metrics = MetricsWriter(a_run(tmp_path / "a"))
    metrics.write({"phase": "rl", "step": 7, "groups/trained": 6, "staleness/share/v0": 1.0})
    assert "Completions by staleness" not in Page(write_report([tmp_path / "a"], tmp_path / "r.html")).charts()
    ages = {f"staleness/share/v{age}": share for age, share in enumerate((0.5, 0.0, 0.5))}
    metrics.write({"phase": "rl", "step": 8, "groups/trained": 2, **ages})
    metrics.write({"phase": "rl", "step": 9, "groups/trained": 0})
    found = Page(write_report([tmp_path / "a"], tmp_path / "r.html")).charts()["Completions by staleness"]
    assert (found["axis"], found["bars"]) == ("staleness", True)
    assert [(line["x"], line["y"]) for line in found["series"]] == [([0, 1, 2], [87.5, 0, 12.5])]  # in %


def test_the_page_says_what_was_idle_in_the_last_rows(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=2)
    assert "waited for groups" not in Page(write_report([folder], tmp_path / "r.html")).text
    writer = MetricsWriter(folder)
    for step, idle in ((3, 0.9), (4, 0.1), (5, 0.2), (6, 0.2), (7, 0.3)):  # the last four count
        shares = {"idle/learner_fraction": idle, "idle/engine_fraction": 0.5}
        writer.write({"phase": "rl", "step": step, "seconds/step": 1.0, **shares})
    writer.close()
    said = "the learner waited for groups for 20 % of the time, 50 % of the servers' slots were unused."
    assert said in Page(write_report([folder], tmp_path / "r.html")).text


# report.html of several runs: what differs is named, seeds of one configuration are one arm, lines look different.
def test_runs_compared_share_axes_and_show_what_differs(tmp_path: Path) -> None:
    runs = [
        *(a_run(tmp_path / "a"), a_run(tmp_path / "b", scale=0.5, steps=4, seed=7), a_run(tmp_path / "x/a", warm=0)),
    ]
    page = Page(write_report(runs, tmp_path / "out" / "r.html"))
    charts = page.charts()
    assert page.names("Reward") == [(f"{tmp_path.name}/a", 0), (f"{tmp_path.name}/b", 1), ("x/a", 2)]
    assert [line["y"][line["x"].index(2)] for line in charts["Reward"]["series"]] == [0.2, 0.1, 0.2]
    keys = re.findall(r"(?m)^\s*((?:\w+\.)*\w+)\s*$", page.text)
    assert "seed" in page.text
    assert "train.steps" in page.text
    assert "rollout.group_size" not in page.text, keys
    assert sum(name.startswith("Step time by phase") for name in charts) == 3


def test_a_comparison_leaves_each_runs_own_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (a_run(tmp_path / name) for name in "ab")
    for runs, written in (((one,), "report.html"), ((one, two), "comparison.html")):
        assert (status_of("report", *map(str, runs)), capsys.readouterr().out) == (0, f"{one / written}\n")
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
    assert page.names("Reward") == [("learning_rate=0.0001 (2 seeds)", 0), ("learning_rate=0.001 (4 seeds)", 1)]
    lines = page.charts()["Reward"]["series"]
    slow, fast = ([line[name][line["x"].index(2)] for name in ("y", "low", "high")] for line in lines)
    rewards = [0.2, 0.22, 0.18, 0.24]
    mean, half = 0.21, 3.1824 * (sum((r - 0.21) ** 2 for r in rewards) / 3 / 4) ** 0.5
    assert slow == [0.12, 0.1, 0.14]
    assert fast == pytest.approx([mean, mean - half, mean + half], rel=2e-5)
    text = re.sub(r"\s+", " ", page.text)
    assert "with fewer than 4 runs goes from the least value to the greatest" in text
    assert "seed" in text
    assert text.count("6 of 6") == 6, "a row a run"
    assert [a.get("class") for tag, a in page.tags if tag == "td"].count("best") == 1


@pytest.mark.parametrize(
    ("names", "arm"),
    [(("loss-s0", "loss-s1"), "loss"), (("bias_seed=10", "bias_seed=11"), "bias"), (("lens-0-a", "lens-1-b"), "lens")],
)
def test_an_arm_is_named_by_what_its_runs_have_in_common(tmp_path: Path, names: tuple[str, ...], arm: str) -> None:
    runs = [a_run(tmp_path / name, seed=seed) for seed, name in enumerate(names)]
    assert Page(write_report(runs, tmp_path / "r.html")).names("Reward") == [(f"{arm} (2 seeds)", 0)]


def test_arms_that_differ_in_many_keys_are_named_by_those_that_tell_them_apart(tmp_path: Path) -> None:
    many = [(4, 1e-3), (4, 1e-4), (8, 1e-4)]
    sizes = [{"group_size": n, "prompts_per_step": 64 // n, "max_new_tokens": 8 * n} for n, _ in many]
    keys = [{"train": {"learning_rate": r}, "rollout": size} for size, (_, r) in zip(sizes, many, strict=True)]
    runs = [a_run(tmp_path / f"{seed}{i}", seed=seed, **one) for seed in (0, 1) for i, one in enumerate(keys)]
    names = Page(write_report(runs, tmp_path / "r.html")).names("Reward")
    assert [name for name, _ in names] == [f"group_size={n} learning_rate={r} (2 seeds)" for n, r in many]


def test_equal_runs_are_compared_not_averaged(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, seed=seed) for name, seed in (("before", 0), ("after", 0), ("other", 1))]
    names = Page(write_report(runs, tmp_path / "r.html")).names("Reward")
    assert [name for name, _ in names] == ["before", "after", "other"]


def _relative_luminance(color: str) -> float:
    """WCAG 2.2's, of #rrggbb."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_twenty_runs_are_told_apart_and_each_can_be_hidden(tmp_path: Path) -> None:
    page = Page(write_report([a_run(tmp_path / f"r{i}", steps=1, warm=0) for i in range(20)], tmp_path / "r.html"))
    lines = [f"s{style}" for _, style in page.names("Reward")]
    rules = re.findall(r"\n\.(s\d+)\{--c:var\((--c\d)\);--on:(\d+)px;--off:(\d+)px\}", page.text)
    looks = {style: (color, off != "0" and (on, off)) for style, color, on, off in rules}
    assert len({looks[style] for style in lines}) == len(lines) == 20
    for theme in page.themes():
        card = _relative_luminance(theme["--card"])
        for color in {looks[style][0] for style in lines}:
            low, high = sorted((_relative_luminance(theme[color]), card))
            assert (high + 0.05) / (low + 0.05) >= 3, f"{color}: a line's contrast by WCAG 2.2, 1.4.11"
    boxes = [a["id"] for tag, a in page.tags if a.get("type") == "checkbox" and "checked" in a]
    assert boxes == [f"run{style[1:]}" for style in lines]


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


# Which samples report.html shows, and how much of them.
def searched(page: Path) -> dict[str, Any]:
    """What the page's script searches."""
    (text,) = re.findall('<script type="application/json" id="samples">(.*?)</script>', page.read_text(), re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data


def drawn(page: Path) -> str:
    """The page without what its scripts draw."""
    return re.sub("(?s)<script.*?</script>", "", page.read_text())


def test_samples_are_of_the_first_middle_and_last_step_and_marked(tmp_path: Path) -> None:
    text = drawn(write_report([a_run(tmp_path / "a", steps=9)], tmp_path / "r.html"))
    assert [s for s in range(1, 10) if f"said-{s};" in text] == [1, 5, 9]
    assert text.count("✓ right") == 3
    text = drawn(write_report([a_run(tmp_path / "b", steps=2)], tmp_path / "r.html"))
    assert (text.count("✓ right"), text.count("✗ wrong")) == (1, 1)


def test_a_long_sample_is_shown_by_its_ends_and_prompts_differ_where_they_can(tmp_path: Path) -> None:
    folder, long = a_run(tmp_path / "a"), "begins" + "x" * 1_000_000 + "ends"
    texts = [("one", long), *[("one", f"again-{i};") for i in range(4)], ("two", "its-answer;")]
    SamplesWriter(folder).write(
        SampleRow(step=7, prompt=prompt, completion=text, answer=long, reward=0) for prompt, text in texts
    )
    out = write_report([folder], tmp_path / "r.html")
    text = drawn(out)
    assert out.stat().st_size < 1_000_000
    assert text.count("begins") == text.count("xends") == 5, "four answers and a completion"
    assert f"{len(long) - 20_000:,} characters left out" in text
    assert [f"again-{i};" in text for i in range(4)] == [True, True, False, False]
    assert "its-answer;" in text


def test_turns_are_apart_and_what_was_read_is_told_from_what_was_said(tmp_path: Path) -> None:
    turns = (SampleTurn(read="", sampled="call 7"), SampleTurn(read="<b>49", sampled="it is 49"))
    row = SampleRow(step=7, prompt="7*7=", completion="call 7it is 49", answer="49", reward=1, turns=turns)
    SamplesWriter(folder := a_run(tmp_path / "a")).write([row])
    page = write_report([folder], tmp_path / "r.html").read_text()
    shown = [("turn", "call 7"), ("prompt turn", "&lt;b&gt;49"), ("turn", "it is 49")]
    assert "".join(f'<span class="{kind}">{text}</span>' for kind, text in shown) in page


def test_the_latest_samples_can_be_searched_and_a_prompt_is_there_once(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=3)
    turns = (SampleTurn(read="", sampled="x"), SampleTurn(read=EVIL, sampled="y"))
    row = SampleRow(step=4, prompt=EVIL, completion="xy", answer="7", reward=0.5, turns=turns)
    SamplesWriter(folder).write([row, row])
    answers = ((3, True), (2, False), (1, True))
    page = write_report([folder], tmp_path / "r.html")
    assert page.read_text().count("<script") == 3  # uPlot, its own, and these samples
    assert searched(page) == {
        "prompts": [EVIL, "1+1="],
        "rows": [
            *([4, 0, "7", 0.5, False, 2, [["", "x"], [EVIL, "y"]]],) * 2,
            *([step, 1, "2", float(right), right, 7, [["", f"said-{step};"]]] for step, right in answers),
        ],
    }


@pytest.mark.parametrize("text", ["é" * 1000, "<" * 1000, "\ud800" * 1000])
def test_samples_take_their_bytes_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The latest are there; each of these characters is six bytes of the page."""
    monkeypatch.setattr(report, "_MOST_SEARCHED", most := 200_000)
    folder = a_run(tmp_path / "a")
    without = write_report([folder], tmp_path / "r.html").stat().st_size
    SamplesWriter(folder).write(
        SampleRow(step=7, prompt=f"{number // 2}", completion=text, answer="", reward=number) for number in range(100)
    )
    page = write_report([folder], tmp_path / "r.html")
    rows = searched(page)["rows"]
    assert [row[3] for row in rows] == [99 - i for i in range(len(rows))]
    assert 0.9 * most < 6000 * len(rows) < most
    assert page.stat().st_size < without + most + 30_000  # some of the last step's are drawn, too


def test_a_sample_of_many_long_turns_is_cut(tmp_path: Path) -> None:
    folder, turn = a_run(tmp_path / "a"), SampleTurn(read="r" * 100_000, sampled="s" * 100_000)
    row = SampleRow(step=7, prompt="", completion="s" * 10_000_000, answer="", reward=0, turns=(turn,) * 100)
    SamplesWriter(folder).write([row])
    first = searched(write_report([folder], tmp_path / "r.html"))["rows"][0]
    assert (first[0], first[5], len(first[6])) == (7, 10_000_000, 100)
    assert len(json.dumps(first)) < 500_000


def test_a_damaged_line_is_named_or_ends_what_can_be_searched(tmp_path: Path) -> None:
    folder, said = a_run(tmp_path / "a", steps=9), list[str]()
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join([*lines[:7], '{"step": 8}\n', *lines[8:]]))
    with pytest.raises(DataError, match=r"samples\.jsonl: a row of step 8"):
        write_report([folder], tmp_path / "r.html")
    page = write_report([folder], tmp_path / "r.html", said.append)
    assert [row[0] for row in searched(page)["rows"]] == [9]
    assert len(said) == 1


def test_a_run_without_samples_has_nothing_to_search(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    (folder / "samples.jsonl").unlink()
    assert "Search the latest samples" not in write_report([folder], tmp_path / "r.html").read_text()


# What a plan predicted stands beside the medians of the steps since the run's last start.
PLAN = {"seconds/train": 10.0, "seconds/weights": 3.0, "memory/peak": 60e9, "response/length_mean": 3584.0}


def run_with_steps(folder: Path, seconds: list[float], *, start: int = 0) -> Path:
    metrics = MetricsWriter(a_run(folder, steps=0, warm=0, train={"steps": 20, "max_staleness": 1}))
    for step, each in enumerate(seconds, 1):
        row = {"seconds/train": each, "memory/peak": 5e10 + step, "response/length_mean": 1792.0}
        metrics.write({"phase": "rl", "step": step, **row})
    metrics.close()
    (folder / "starts.jsonl").write_text(json.dumps({"step": start}) + "\n")
    return folder


def test_each_part_that_was_predicted_and_measured_has_a_row(tmp_path: Path) -> None:
    folder = run_with_steps(tmp_path / "a", [99.0, 99.0, 99.0, 50.0, 20.0, 4.0, 9.0, 5.0], start=3)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    card = make_plan_card(load_runs([folder])[0])
    assert card is not None
    assert card.rows == [
        ("train", "10 s", "5 s", "2.00"),
        ("memory", "60 GB", "50 GB", "1.20"),
        ("length of a completion", "3,584 tokens", "1,792 tokens", "2.00"),
    ]
    assert "steps 6 to 8" in card.notes[0]
    assert "Sampling overlaps training" in card.notes[1]
    text = write_report([folder], tmp_path / "r.html").read_text()
    assert "<h2>Predicted and measured</h2>" in text
    assert "<td>50 GB</td>" in text


def test_without_predicted_seconds_or_with_too_few_steps_there_is_no_card(tmp_path: Path) -> None:
    few, whole = run_with_steps(tmp_path / "few", [5.0] * 4), run_with_steps(tmp_path / "whole", [5.0] * 5)
    (few / "plan.json").write_text(json.dumps(PLAN))
    assert make_plan_card(load_runs([few])[0]) is None
    assert make_plan_card(load_runs([whole])[0]) is None
    (whole / "plan.json").write_text('{"memory/peak": 6e10}')
    assert make_plan_card(load_runs([whole])[0]) is None
    assert "Predicted and measured" not in write_report([whole], tmp_path / "r.html").read_text()


# The page itself: uPlot is in it, whole and with its license; it stays small, and no name can end its script.
UPLOT = Path(report.__file__).with_name("uplot")


def test_the_page_has_uplot_and_its_license_and_no_more_than_a_megabyte(tmp_path: Path) -> None:
    """A run of 2,000 steps that recorded every metric that has a chart; samples have bytes of their own."""
    out = write_report([every_metric(tmp_path / "a", steps=2000)], tmp_path / "r.html")
    assert len(Page(out).charts()) > 100
    assert out.stat().st_size <= 1_000_000
    text = out.read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE"):
        assert (UPLOT / name).read_text().strip() in text
    assert "Copyright (c) 2022 Leon Sorokin" in text


def test_no_name_of_a_run_ends_the_script_or_an_attribute(tmp_path: Path) -> None:
    """Names that repeat are told apart by their parents', so that they have slashes."""
    evil = "a<", "script><img src=x onerror=alert(1)>'\"&amp;"
    runs = [a_run(tmp_path.joinpath(parent, evil[1])) for parent in (evil[0], "b<")]
    page = Page(write_report(runs, tmp_path / "r.html"))
    assert page.names("Reward") == [("/".join(evil), 0), (f"b</{evil[1]}", 1)]
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (0.00051, "0.00051"), (3.05e-7, "3.05e-7"), (-2e-5, "-2e-5"), (12345.6, "12,346"),
     (999.94, "999.9"), (1.5e9, "1.5e9")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


def test_the_page_of_one_run_begins_with_its_verdicts(tmp_path: Path) -> None:
    """Each with the curve of a metric and a link to its chart on the page; a page of two runs has no card."""
    folders = [a_run(tmp_path / name, steps=20) for name in ("a", "b")]
    text = write_report(folders[:1], tmp_path / "r.html").read_text()
    card = text[text.index('<section class="card panel read"') : text.index('<dl class="tiles">')]
    assert re.findall(r'<b class="chip">(\w+)</b><p>(\w+)', card) == [("good", "Learning"), ("good", "A")]
    links = re.findall(r'href="#(.*?)"', card)
    assert links == ["chart:eval/accuracy", "chart:seconds/step"]
    assert all(f'<figure id="{link}"' in text for link in links)
    points = re.findall(r'points="(.*?)"', card)[0].split()
    assert (len(points), points[0], points[-1]) == (10, "0.0,26.0", "120.0,2.0")
    assert '<section class="card panel read"' not in write_report(folders, tmp_path / "both.html").read_text()
