"""The page and the files of a study: its numbers are those of the runs' rows, and no cell is left out silently."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from rl_megatron.config.io import save_resolved
from rl_megatron.errors import DataError
from rl_megatron.experiments.cells import Cell, cells_of
from rl_megatron.experiments.report import figure_files, write_study_report
from rl_megatron.experiments.results import points_of
from rl_megatron.experiments.states import CellRecord, drift_of, find_states, write_record
from rl_megatron.experiments.study import Study, read_study
from rl_megatron.observability.history import load_runs
from rl_megatron.observability.metrics.writer import MetricsWriter
from tests.unit.launcher.commands import status_of

SEEDS, STEPS = [0, 1, 2, 3], 40
ARMS = ["moe grpo", "moe gspo", "dense grpo", "dense gspo"]
AT = np.arange(0, STEPS + 1, 2)


def recorded(cell: Cell, values: np.ndarray, tokens: int = 100) -> None:
    cell.folder.mkdir(parents=True)
    save_resolved(cell.config, cell.folder / "config.yaml")
    writer = MetricsWriter(cell.folder)
    for step, value in zip(AT, values, strict=False):
        row = {"phase": "rl", "step": int(step), "eval/accuracy": float(value), "seconds/step": 2.0}
        writer.write(
            {
                **row,
                "tokens/rollout": tokens,
                **({"flops/train": 7e9} if step else {}),
                "reward/mean": float(value),
                "reward/std": 0.5,
            }
        )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[Cell], dict[tuple[str, int], np.ndarray]]:
    """Sixteen cells: one has failed, one waits, one has collapsed, and one arm goes up without a bend."""
    folder, rng = tmp_path_factory.mktemp("study"), np.random.default_rng(4)
    model = [{"moe": "model.tiny.num_experts=8"}, {"dense": "model.tiny.num_experts=4"}]
    path = folder / "four.yaml"
    keys = {"overrides": [f"train.steps={STEPS}"], "seeds": SEEDS, "folder": str(folder / "runs")}
    interaction = {"moe gspo": 1, "moe grpo": -1, "dense gspo": -1, "dense grpo": 1}
    axes = {"model": model, "loss": ["algorithm=grpo", "algorithm=gspo"]}
    text = {**keys, "axes": axes, "contrasts": {"interaction": interaction}, "evaluation": {"last": 2}}
    path.write_text(yaml.safe_dump(text, sort_keys=False))
    read = read_study(path)
    cells, values = cells_of(read), dict[tuple[str, int], np.ndarray]()
    for cell in cells:
        middle = np.maximum(AT, 0.01)
        curve = 0.1 + 0.6 / (1 + (6 / middle) ** 1.6) if cell.arm != "moe gspo" else 0.1 + 0.01 * AT
        of_cell = curve + 0.02 * rng.normal() + 0.005 * rng.normal(size=len(AT))
        if (cell.arm, cell.seed) == ("dense grpo", 2):
            of_cell[15:] = 0.02
        if (cell.arm, cell.seed) == ("dense gspo", 3):
            continue
        failed = (cell.arm, cell.seed) == ("moe grpo", 3)
        recorded(cell, of_cell[:5] if failed else of_cell)
        if failed:
            write_record(cell, CellRecord(pid=1, began="", starts=1, seconds=9.0, status=1, reason="error: <no price>"))
        else:
            values[cell.arm, cell.seed] = of_cell
    return read, cells, values


def test_results_are_those_of_the_rows(
    study: tuple[Study, list[Cell], dict[tuple[str, int], np.ndarray]], tmp_path: Path
) -> None:
    read, cells, values = study
    page = write_study_report(read, cells, tmp_path / "out" / "report.html").read_text()
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    last = {key: float(np.mean(of_cell[-2:])) for key, of_cell in values.items()}
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["arm"], int(r["seed"])): float(r["result"]) for r in rows if r["result"]} == pytest.approx(last)
    assert [r["state"] for r in rows].count("done") == len(last) == 14

    pairs = [s for s in SEEDS if all((arm, s) in last for arm in ARMS)]
    assert pairs == [0, 1, 2]
    weights = {"moe gspo": 1, "moe grpo": -1, "dense gspo": -1, "dense grpo": 1}
    sums = [sum(weight * last[arm, seed] for arm, weight in weights.items()) for seed in pairs]
    half = 4.302652729749 * np.std(sums, ddof=1) / np.sqrt(3)  # t of 2 degrees
    found = document["differences"]["interaction"]
    assert (found["value"], found["high"], found["count"]) == pytest.approx((np.mean(sums), np.mean(sums) + half, 3))
    assert list(document["differences"]) == [*(f"{arm} - moe grpo" for arm in ARMS[1:]), "interaction"]

    fits = document["fits"]
    assert fits["moe gspo"]["refused"].startswith("it has not bent")
    assert fits["dense gspo"]["parameters"]["A"]["value"] == pytest.approx(0.7, abs=0.03)

    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", page))
    assert f"{cells[12].name} (failed at step 8 of {STEPS}: error: &lt;no price&gt;)" in text
    assert f"{cells[15].name} (waiting)" in text
    assert "moe gspo: refused, as it has not bent" in text
    assert len(re.findall(r'<th><span class="runname s\d">[a-z]+-[a-z]+-s\d-', page)) == 15
    assert page.count('type="checkbox"') == 4, "a colour an arm"
    for figure in ("curves", "fit-dense-gspo"):
        root = ElementTree.parse(tmp_path / "out" / "figures" / f"{figure}.svg").getroot()
        assert root.tag.endswith("svg")
        assert any(each.get("fill-opacity") for each in root.iter()), "a band"


def test_a_study_without_a_step_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"folder": str(tmp_path / "runs")}))
    read = read_study(tmp_path / "s.yaml")
    with pytest.raises(DataError, match="no cell has recorded a step yet; start them with rl-megatron experiment run"):
        write_study_report(read, cells_of(read), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("compute", "spent"), [("steps", 4.0), ("tokens", 300.0), ("device_seconds", 12.0), ("flops", 1.4e10)]
)
def test_compute_is_what_was_spent_up_to_a_value(tmp_path: Path, compute: str, spent: float) -> None:
    """Rows of steps 0, 2 and 4, each of 2 s and 100 tokens, the last two of 7e9 FLOPs; the default run has 2 processes.

    The tables have every measure, whichever a fit takes.
    """
    (tmp_path / "s.yaml").write_text(
        yaml.safe_dump({"folder": str(tmp_path / "runs"), "seeds": [0], "evaluation": {"compute": compute}})
    )
    read = read_study(tmp_path / "s.yaml")
    (cell,) = cells_of(read)
    recorded(cell, np.array([0.1, 0.2, 0.3]))
    write_study_report(read, [cell], tmp_path / "runs" / "report.html")
    with (tmp_path / "runs" / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    name = "step" if compute == "steps" else compute
    assert (float(rows[-1][name]), rows[-1]["eval/accuracy"]) == (spent, "0.3")
    every = {"tokens": 300.0, "device_seconds": 12.0, "flops": 1.4e10}
    with (tmp_path / "runs" / "results.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert {name: float(row[name]) for name in every} == every
    assert points_of(read, cell, load_runs([cell.folder])[0])[-1] == (4.0, spent, 0.3)


def test_a_measure_of_compute_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        yaml.safe_dump({"folder": str(tmp_path / "runs"), "seeds": [0], "evaluation": {"compute": "flops"}})
    )
    read = read_study(tmp_path / "s.yaml")
    (cell,) = cells_of(read)
    cell.folder.mkdir(parents=True)
    for step in range(3):
        MetricsWriter(cell.folder).write({"phase": "rl", "step": step, "eval/accuracy": 0.1})
    save_resolved(cell.config, cell.folder / "config.yaml")
    with pytest.raises(DataError, match=r"evaluation.compute=flops, but no row has flops/train, as those of older"):
        write_study_report(read, [cell], tmp_path / "report.html")


def test_compute_that_some_rows_lack_is_blank_in_tables_and_refused_where_it_is_compared(tmp_path: Path) -> None:
    """A run that an older version began: of its steps 2 and 4 only the second has FLOPs."""
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"folder": str(tmp_path / "runs"), "seeds": [0]}))
    read = read_study(tmp_path / "s.yaml")
    (cell,) = cells_of(read)
    recorded(cell, np.array([0.1, 0.2, 0.3]))
    file = cell.folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    del rows[1]["flops/train"]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_study_report(read, [cell], tmp_path / "report.html")
    with (tmp_path / "results.csv").open() as table:
        (row,) = csv.DictReader(table)
    assert (row["tokens"], row["flops"]) == ("300.0", "")
    with (tmp_path / "curves.csv").open() as table:
        assert [row["flops"] for row in csv.DictReader(table)] == ["0.0", "", ""]
    flops = read.model_copy(update={"evaluation": read.evaluation.model_copy(update={"compute": "flops"})})
    why = "evaluation.compute=flops, but 1 of 2 rows have no flops/train, the first of step 2, as those of older"
    with pytest.raises(DataError, match=why):
        write_study_report(flops, [cell], tmp_path / "report.html")


def test_equal_differences_have_no_interval_and_the_page_says_so(tmp_path: Path) -> None:
    """0.3 - 0.2 and 0.4 - 0.3 differ by rounding alone."""
    axes = {"a": [{name: f"train.learning_rate={i}e-3"} for i, name in enumerate(("low", "high"), 1)]}
    text = {"overrides": ["train.steps=0"], "seeds": [0, 1], "axes": axes, "folder": str(tmp_path / "runs")}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(text))
    read = read_study(tmp_path / "s.yaml")
    for cell in cells_of(read):
        recorded(cell, np.array([{"low": 0.2, "high": 0.3}[cell.arm] + 0.1 * cell.seed]))
    page = write_study_report(read, cells_of(read), tmp_path / "report.html").read_text()
    found = json.loads((tmp_path / "results.json").read_text())["differences"]["high - low"]
    assert (found["value"], found["low"], found["high"]) == (pytest.approx(0.1), None, None)
    assert "none: all 2 are equal" in page
    assert "their spread says nothing of the next" in page
    low = next(row for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "high - low" in row)
    assert "<td>-</td>" in re.sub(r"\s|class=\S+", "", low), low


def test_a_done_cell_that_ran_with_another_versions_default_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is the same: that is of the values that differ from the defaults."""
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump({"overrides": ["train.steps=4"], "seeds": [0], "folder": str(tmp_path / "runs")}))
    (cell,) = cells_of(read_study(path))
    recorded(cell, np.array([0.1, 0.2, 0.3]))
    assert drift_of(cell) == ""
    train = cell.config.train.model_copy(update={"epochs": 3})
    save_resolved(cell.config.model_copy(update={"train": train}), cell.folder / "config.yaml")
    now = cell.config.train.epochs
    wanted = f"it ran with train.epochs=3; now it would with train.epochs={now}: remove it to repeat"
    assert drift_of(cell) == wanted
    assert wanted in write_study_report(read_study(path), [cell], tmp_path / "report.html").read_text()
    status_of("experiment", "status", str(path))
    assert f"note: {cell.name}: {wanted}" in capsys.readouterr().out


def test_no_ended_cell_is_left_out_or_counted_silently(tmp_path: Path) -> None:
    """One cell was stopped by its time, one recorded no value of the metric, one went to its end."""
    axes = {"a": [{name: f"train.learning_rate={i}e-3"} for i, name in enumerate(("spent", "mute", "whole"), 1)]}
    keys = {"overrides": ["train.steps=4"], "seeds": [0], "budget": {"cell_minutes": 1}, "axes": axes}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"folder": str(tmp_path / "runs"), **keys}, sort_keys=False))
    read = read_study(tmp_path / "s.yaml")
    spent, mute, whole = cells_of(read)
    recorded(spent, np.array([0.1, 0.2]))
    write_record(spent, CellRecord(pid=1, began="", starts=1, seconds=60.5, status=0))
    recorded(mute, np.array([]))
    MetricsWriter(mute.folder).write({"phase": "rl", "step": 4, "reward/mean": 0.5})
    recorded(whole, np.array([0.1, 0.2, 0.3]))
    page = write_study_report(read, [spent, mute, whole], tmp_path / "report.html").read_text()
    notes = re.findall(r'<p class="note">([^<]*)', page)
    assert f"Counted as it is: {spent.name} (spent at step 2 of 4: budget.cell_minutes=1 are over)" in notes
    assert (
        f"Without a value of eval/accuracy, so not in means, differences and fits: {mute.name} (done at step 4 of 4)"
        in notes
    )
    assert whole.name not in " ".join(notes)
    assert "mute: refused, as no run has values to fit." in notes
    results = json.loads((tmp_path / "results.json").read_text())
    cells = [(each["state"], each["result"]) for each in results["cells"]]
    assert cells == [("spent", 0.2), ("done", None), ("done", 0.3)]


def test_tokens_of_a_job_that_samples_none_are_blank(tmp_path: Path) -> None:
    keys = {"base": "sft_tiny", "overrides": ["train.steps=2"], "seeds": [0], "evaluation": {"metric": "eval/loss"}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"folder": str(tmp_path / "runs"), **keys}))
    read = read_study(tmp_path / "s.yaml")
    (cell,) = cells_of(read)
    cell.folder.mkdir(parents=True)
    for step in range(3):
        MetricsWriter(cell.folder).write({"phase": "sft", "step": step, "eval/loss": 3.0 - step})
    save_resolved(cell.config, cell.folder / "config.yaml")
    write_study_report(read, [cell], tmp_path / "report.html")
    with (tmp_path / "results.csv").open() as table:
        assert [row["tokens"] for row in csv.DictReader(table)] == [""], "the job samples none"


@pytest.mark.parametrize("last", [1, 3])
def test_a_run_whose_last_value_is_not_finite_has_no_result(tmp_path: Path, last: int) -> None:
    """Its values from before it diverged stand for nothing; rows without the metric measured nothing."""
    axes = {"a": [{name: f"train.learning_rate={i}e-3"} for i, name in enumerate(("diverged", "whole"), 1)]}
    keys = {"overrides": [f"train.steps={STEPS}"], "seeds": [0], "axes": axes, "evaluation": {"last": last}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"folder": str(tmp_path / "runs"), **keys}, sort_keys=False))
    read = read_study(tmp_path / "s.yaml")
    diverged, whole = cells_of(read)
    values = 0.1 + 0.6 / (1 + (6 / np.maximum(AT, 0.01)) ** 1.6)
    recorded(diverged, np.append(values[:-1], np.nan))
    recorded(whole, values)
    MetricsWriter(whole.folder).write({"phase": "rl", "step": STEPS, "reward/mean": 0.5})
    page = write_study_report(read, [diverged, whole], tmp_path / "report.html").read_text()
    notes = re.findall(r'<p class="note">([^<]*)', page)
    why = "Without finite last values of eval/accuracy, so not in means, differences and fits"
    assert f"{why}: {diverged.name} (done at step {STEPS} of {STEPS})" in notes
    assert "diverged: refused, as no run has values to fit." in notes
    found = json.loads((tmp_path / "results.json").read_text())
    assert [each["result"] for each in found["cells"]] == [None, pytest.approx(values[-last:].mean())]
    assert found["fits"]["whole"]["refused"] is None
    assert [each.value for each in find_states(read, [diverged, whole])] == [None, pytest.approx(values[-1])]


def test_the_mean_under_a_fit_is_taken_step_by_step(tmp_path: Path) -> None:
    """Runs sample 90, 100 and 110 tokens a step, so that no two values are at the same compute."""
    study = {"folder": str(tmp_path / "runs"), "overrides": [f"train.steps={STEPS}"], "seeds": [0, 1, 2]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({**study, "evaluation": {"compute": "tokens"}}))
    read = read_study(tmp_path / "s.yaml")
    cells, rng = cells_of(read), np.random.default_rng(3)
    for cell, tokens in zip(cells, (90, 100, 110), strict=True):
        curve = 0.1 + 0.6 / (1 + (6 / (AT + 2)) ** 1.6)
        recorded(cell, curve + 0.01 * rng.normal() + 0.003 * rng.normal(size=len(AT)), tokens=tokens)
    write_study_report(read, cells, tmp_path / "report.html")
    root = ElementTree.parse(tmp_path / "figures" / "fit-base.svg").getroot()
    (dotted,) = [each for each in root.iter() if each.get("stroke-dasharray") and each.get("d", "").count("L") > 1]
    assert dotted.get("d", "").count("L") == len(AT) - 1


def test_a_report_that_is_made_again_leaves_no_figure_of_the_one_before(tmp_path: Path) -> None:
    """An arm that has another name now; a file of the user's stays."""
    found = []
    for arm in ("before", "after"):
        axes = {"model": [{arm: "model.tiny.num_experts=4"}]}
        study = {"folder": str(tmp_path / arm), "overrides": [f"train.steps={STEPS}"], "seeds": [0], "axes": axes}
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(study))
        read = read_study(tmp_path / "s.yaml")
        (cell,) = cells_of(read)
        recorded(cell, 0.1 + 0.6 / (1 + (6 / (AT + 2)) ** 1.6))
        write_study_report(read, [cell], tmp_path / "report.html")
        found.append(sorted(path.name for path in (tmp_path / "figures").iterdir()))
        (tmp_path / "figures" / "mine.svg").touch()
    assert found == [["curves.svg", "fit-before.svg"], ["curves.svg", "fit-after.svg", "mine.svg"]]


def test_figures_of_names_that_come_out_alike_are_numbered() -> None:
    assert figure_files(["curves", "fit a b", "fit a/b", "fit β", "fit γ"]) == [
        "curves",
        "fit-a-b",
        "fit-a-b-2",
        "fit",
        "fit-2",
    ]
