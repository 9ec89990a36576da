"""report.html: what it shows is what the run wrote, and nothing in a run can break out of the page."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from rl_megatron.errors import DataError
from rl_megatron.observability import report
from rl_megatron.observability.files import JsonRow, read_jsonl
from rl_megatron.observability.log import run_log
from rl_megatron.observability.metrics.table import METRICS, PHASE_SECONDS
from rl_megatron.observability.metrics.writer import MetricsWriter
from rl_megatron.observability.report import write_report
from rl_megatron.observability.samples import SampleRow, SamplesWriter
from tests.unit.observability.report_pages import EVIL, Page, a_run


def test_what_matters_now_comes_first_on_the_page_of_one_run(tmp_path: Path) -> None:
    """And where several are compared, each chart is in its own section."""
    metrics = MetricsWriter(a_run(tmp_path / "a"))
    metrics.write({"phase": "rl", "step": 7, "reward/mean": 0.5, "memory/peak": 5, "tokens_per_second/rollout": 9.0})
    alone = [*Page(write_report([tmp_path / "a"], tmp_path / "one.html")).charts()]
    assert alone.index("Where the time goes") < alone.index("Rollout speed") < alone.index("Loss")
    assert alone.index("Most memory that a rank has held") < alone.index("Loss")
    both = [
        *Page(
            write_report([tmp_path / "a", a_run(tmp_path / "b", rollout={"group_size": 8})], tmp_path / "r.html")
        ).charts()
    ]
    assert (
        both.index("Loss") < both.index("Rollout speed") < next(n for n, name in enumerate(both) if "time goes" in name)
    )
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

    text = write_report([folder], out, costs=Counted()).read_text()
    assert rows == read_jsonl(folder / "metrics.jsonl")
    assert f"<p>{len(rows)} GPU-hours &lt;b&gt;</p>" in text


def test_headlines_are_the_runs_figures(tmp_path: Path) -> None:
    page = Page(write_report([a_run(tmp_path / "a")], tmp_path / "a" / "report.html"))
    text = re.sub(r"\s+", " ", page.text)
    for part in ("0.0 %→20.0 %→90.0 %", "Final reward 0.6 ", "6 of 6", "0 min 12 s", "Sampled tokens/s 150 "):
        assert part.replace(" ", "") in text.replace(" ", ""), part


@pytest.mark.parametrize(("job", "last", "moved"), [("sft", 1.25, "better"), ("dpo", 1.75, "worse")])
def test_headlines_of_a_job_on_written_text_are_what_it_records(
    tmp_path: Path, job: str, last: float, moved: str
) -> None:
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
    assert figures == {
        "Held-out loss: first → last": f"1.5→{last}",
        **ordered,
        "Steps": "2 of 2",
        "Time": "0 min 4 s",
        "Trained tokens/s": "2,000",
    }
    assert f'<b class="{moved}">' in page.read_text()
    compared = write_report(folders, tmp_path / "both.html").read_text()
    table = compared[compared.index("<h2>Runs</h2>") : compared.index("<h2>Learning</h2>")]
    columns = ["Run", "Held-out loss", *ordered, "Steps", "Time", "Trained tokens/s"]
    assert re.findall(r"<th>([A-Z][^<]*)</th>", table) == columns
    assert "<td>-</td>" not in table


def test_each_recorded_point_can_be_read_by_hovering(tmp_path: Path) -> None:
    charts = Page(write_report([a_run(tmp_path / "a")], tmp_path / "r.html")).charts()
    points = charts["Held-out accuracy"]["points"]
    assert [(label, values[0][2]) for _, label, values in points] == [
        ("warm-start step 0", "0"),
        ("warm-start step 10", "0.1"),
        ("warm-start step 20", "0.2"),
        ("step 2", "0.3"),
        ("step 4", "0.6"),
        ("step 6", "0.9"),
    ]
    assert [x for x, _, _ in points] == sorted(x for x, _, _ in points)
    reward = charts["Reward"]["points"][1]
    assert reward[1:] == ["step 2", [[0, reward[2][0][1], "0.2 (-0.05 to 0.45)"]]]
    assert charts["Where the time goes"]["points"][0][2] != []


def test_no_two_phases_of_a_step_have_one_color(tmp_path: Path) -> None:
    every = {f"seconds/{name}": 0.01 for name in PHASE_SECONDS} | {"seconds/step": 1.0}
    folder = a_run(tmp_path / "a")
    MetricsWriter(folder).write({"phase": "rl", "step": 7, **every})
    page = Page(write_report([folder], tmp_path / "r.html"))
    colors = dict(re.findall(r"\.stack \.(s\d+)\{--c:var\((--p\d)\)\}", page.text))
    assert len(page.styles("bar")) == len(PHASE_SECONDS) + 1
    for theme in page.themes():
        assert len({theme[colors[style]] for style in page.styles("bar")}) == len(PHASE_SECONDS) + 1


def test_each_reward_part_has_a_chart_of_its_own(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=1)
    assert not [title for title in Page(write_report([folder], tmp_path / "r.html")).charts() if "part" in title]
    parts = {"reward/part/right": 0.25, "reward/part/style": 1.0}
    sets = {"eval/aime/pass_at_8": 0.5, "eval/aime/pass_at_8/low": 0.25, "eval/aime/pass_at_8/high": 0.75}
    row = {"step": 2, "phase": "rl", **parts, **sets, "source/math/share": 0.75, "source/math/reward": 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(row)}\n")
    charts = Page(write_report([folder], tmp_path / "r.html")).charts()
    assert [title for title in charts if "part" in title] == ["Reward part right", "Reward part style"]
    assert charts["Reward part right"]["points"][0][2][0][2] == "0.25"
    assert {"Source math: reward", "Source math: share of the groups"} <= charts.keys()
    assert charts["Set aime: pass@8"]["points"][0][2][0][2] == "0.5 (0.25 to 0.75)"


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
        page = write_report(shown, tmp_path / "r.html").read_text()
        assert "secret-" not in page
    assert "WANDB_API_KEY" in write_report(runs[:1], tmp_path / "r.html").read_text()


def test_nothing_from_a_run_is_markup_and_nothing_is_fetched(tmp_path: Path) -> None:
    def tags(sample: str, name: str) -> list[str]:
        folder = a_run(tmp_path / name, data={"type": "files", "train": sample, "eval": "e"})
        SamplesWriter(folder).write([SampleRow(step=9, prompt=sample, completion=sample, answer=sample, reward=0)])
        other = a_run(tmp_path / f"other {name}")
        page = Page(write_report([folder, other], tmp_path / "r.html"))
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
    assert [label for _, label, _ in page.charts()["Loss"]["points"]] == ["step 1"]
    assert "Held-out accuracy" not in page.charts()
    assert "Sample completions" not in page.text
    warm_only = a_run(tmp_path / "w", steps=1)
    lines = (warm_only / "metrics.jsonl").read_text().splitlines(keepends=True)
    (warm_only / "metrics.jsonl").write_text("".join(lines[:3]))
    points = Page(write_report([warm_only], tmp_path / "r.html")).charts()["Held-out accuracy"]["points"]
    assert [label for _, label, _ in points] == ["warm-start step 0", "warm-start step 10", "warm-start step 20"]


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
    assert {curve.section for curve in curves} == {"Headlines", *report._SECTIONS}
    shown = {name for c in curves for name in (c.metric, c.spread, c.low, c.high, c.peak)} - {None}
    shown |= {f"seconds/{phase}" for phase in PHASE_SECONDS}
    axes_and_totals = {
        "step",
        "phase",
        "warm_start/step",
        "tokens/rollout",
        "tokens/train",
        "flops/train",
        "weights/bytes",
        "weights/route",
        "checkpoint/bytes",
        "checkpoint/step",
        "devices/<name>",
        "devices/layout",
    }
    assert METRICS.keys() - shown - axes_and_totals == {"metrics/non_finite"}
    assert shown <= METRICS.keys()


def test_memory_and_mfu_are_beside_the_plans(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | ({"memory/peak": 7e9} if row["phase"] == "rl" else {}) for row in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plan.json").write_text('{"memory/peak": 8.5e9, "mfu/train": 0.4}')
    charts = Page(write_report([folder], tmp_path / "r.html")).charts()
    found = charts["Most memory that a rank has held (dotted: plan)"]
    assert [name for name, _ in found["names"]] == ["plan", "memory/peak"]
    assert {tuple(text for *_, text in values) for *_, values in found["points"]} == {("8.5", "7")}
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
    charts = Page(write_report([tmp_path / "a"], tmp_path / "r.html")).charts()
    found = charts["Completions by staleness"]["points"]
    assert [(label, values[0][2]) for _, label, values in found] == [
        ("staleness 0", "87.5%"),
        ("staleness 1", "0.0%"),
        ("staleness 2", "12.5%"),
    ]


def test_the_page_says_what_was_idle_in_the_last_rows(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=2)
    assert "waited for groups" not in Page(write_report([folder], tmp_path / "r.html")).text
    writer = MetricsWriter(folder)
    for step, idle in ((3, 0.9), (4, 0.1), (5, 0.2), (6, 0.2), (7, 0.3)):  # the last four count
        shares = {"idle/learner_fraction": idle, "idle/engine_fraction": 0.5, "overlap/stretch": 1.25}
        writer.write({"phase": "rl", "step": step, "seconds/step": 1.0, **shares})
    writer.close()
    said = (
        "the learner waited for groups for 20 % of the time, 50 % of the servers' slots were unused, a step took 1.25"
    )
    assert said in Page(write_report([folder], tmp_path / "r.html")).text
