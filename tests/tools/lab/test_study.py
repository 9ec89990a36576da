"""A study: its file, its cells and their names, what is refused before anything starts; and its report."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from launcher.preflight.checks import preflight
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability.history import load_runs
from rl_megatron.observability.recorder import MetricsWriter
from tests.unit.launcher.commands import status_of
from tests.unit.observability.report_pages import Page
from tools.convert.upcycle import read_upcycling, upcycle
from tools.lab.report import curve_points, write_study_report
from tools.lab.run import max_running_cells
from tools.lab.states import (
    CellRecord,
    config_path,
    describe_drift,
    find_states,
    process_birth,
    record_path,
    states_table,
    write_record,
)
from tools.lab.study import Cell, Study, config_digest, outcome_folder, read_study, study_cells

ALGORITHMS = ["algorithm=grpo", "algorithm=gspo"]
RATES = ["train.learning_rate=1e-3", {"fast": ["train.learning_rate=3e-3", "train.lr_warmup_steps=5"]}]

SUMS = {"overrides": [f"eval.sets.sums.{key}" for key in ("samples=4", "temperature=1", "pass_at=2")]}


def study_of(folder: Path, **keys: object) -> Study:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"folder": str(folder / "runs"), **keys}))
    return read_study(path)


def one_cell(folder: Path, **keys: object) -> tuple[Study, Cell]:
    study = study_of(folder, seeds=[0], **keys)
    (cell,) = study_cells(study)
    return study, cell


def named(cells: list[Cell]) -> list[tuple[str, int]]:
    return [(cell.arm, cell.seed) for cell in cells]


def test_a_product_has_every_combination_and_the_first_seed_of_each_arm_comes_first(tmp_path: Path) -> None:
    axes = {"a": ALGORITHMS, "rate": RATES}
    cells = study_cells(study_of(tmp_path, axes=axes, seeds=[4, 7], overrides=["train.steps=9"]))
    arms = ["grpo learning_rate=1e-3", "grpo fast", "gspo learning_rate=1e-3", "gspo fast"]
    assert named(cells) == [(arm, seed) for seed in (4, 7) for arm in arms]
    fast = cells[3].config
    assert (fast.algorithm.ratio_level, fast.train.learning_rate, fast.train.lr_warmup_steps) == ("sequence", 3e-3, 5)
    assert {cell.config.train.steps for cell in cells} == {9}
    assert [cell.config.seed for cell in cells[::4]] == [4, 7]


def test_zip_takes_the_levels_in_step(tmp_path: Path) -> None:
    cells = study_cells(study_of(tmp_path, axes={"a": ALGORITHMS, "rate": RATES}, combine="zip", seeds=[0]))
    assert named(cells) == [("grpo learning_rate=1e-3", 0), ("gspo fast", 0)]


def test_arms_that_are_not_paired_have_seeds_of_their_own_that_no_other_arm_or_seed_moves(tmp_path: Path) -> None:
    before = study_cells(study_of(tmp_path, axes={"a": ALGORITHMS, "rate": RATES}, seeds=[0, 5], paired=False))
    seeds = {cell.seed for cell in before}
    assert (len(seeds), max(seeds) < 2**31) == (8, True)
    assert all(cell.config.seed == cell.seed for cell in before)
    labeled = ["algorithm=cispo", {"mine": "algorithm=gspo"}, "algorithm=grpo"]
    more = {"axes": {"a": labeled, "rate": ["train.learning_rate=9e-3", *RATES]}, "seeds": [7, 0, 5]}
    after = study_cells(study_of(tmp_path, **more, paired=False))
    assert len(after) == len({cell.seed for cell in after}) == 27
    assert {config_digest(cell.config) for cell in before} <= {config_digest(cell.config) for cell in after}


def test_a_cell_is_a_run_in_the_studys_folder(tmp_path: Path) -> None:
    for cell in study_cells(study_of(tmp_path, axes={"a": ALGORITHMS, "rate": RATES})):
        assert cell.folder == cell.config.run.dir / str(cell.config.run.name) == tmp_path / "runs" / cell.name


def test_a_folder_is_named_by_what_changes_numbers_alone(tmp_path: Path) -> None:
    (cell, *_) = study_cells(study_of(tmp_path, axes={"a": ALGORITHMS}))
    assert cell.name == f"grpo-s0-{config_digest(cell.config)}"
    same = ("run.name=x", "run.dir=y", "log.sinks=[]", "checkpoint.every=3", "model.cache_dir=z")
    other = ("seed=1", "train.steps=7", "learner.ep=1", "algorithm.clip_low=0.1", "data.num_eval=3")
    assert {config_digest(load_config("tiny_cpu", ["algorithm=grpo", key])) for key in same} == {
        config_digest(cell.config)
    }
    digests = {config_digest(load_config("tiny_cpu", ["algorithm=grpo", key])) for key in other}
    assert len(digests | {config_digest(cell.config)}) == 6


def test_a_run_is_found_again_under_another_label(tmp_path: Path) -> None:
    before = study_cells(study_of(tmp_path, axes={"a": ALGORITHMS}, seeds=[0]))
    before[1].folder.mkdir(parents=True)
    after = study_cells(study_of(tmp_path, axes={"a": [{"plain": ALGORITHMS[0]}, {"ours": ALGORITHMS[1]}]}, seeds=[0]))
    assert [cell.arm for cell in after] == ["plain", "ours"]
    assert after[1].folder == before[1].folder
    assert after[0].name.startswith("plain-s0-")


def test_a_base_is_beside_the_study(tmp_path: Path) -> None:
    save_resolved(load_config("tiny_cpu", ["train.steps=3"]), tmp_path / "base.yaml")
    _, cell = one_cell(tmp_path, base="base.yaml")
    assert (cell.arm, cell.config.train.steps) == ("base", 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"axis": {}}, r"mine\.yaml: axis=\{\}: no such key \(did you mean 'axes'\?\); keys: base, overrides, axes"),
        ({"budget": {"minute": 3}}, r"budget\.minute=3: no such key \(did you mean 'minutes'\?\)"),
        ({"budget": {"minutes": 0}}, r"budget\.minutes=0: must be greater than 0"),
        ({"axes": {"a": [3]}}, r"axes\.a\.0: 3: must be an override as text, a list of them, or one label"),
        ({"axes": {"a": []}}, r"axes\.a=\[\]: must be at least one$"),
        ({"contrasts": {"c": {}}}, r"contrasts\.c=\{\}: must be at least one$"),
        ({"contrasts": {"c": {"base": float("inf")}}}, r"contrasts\.c\.base=\.inf: must be a finite number"),
        ({"axes": {"a": [{"x": "train.steps=3", "y": "train.steps=4"}]}}, r"axes\.a: .*one label with its overrides"),
        ({"axes": {"a": ALGORITHMS, "b": RATES[:1]}, "combine": "zip"}, r"equally many levels; a has 2, b has 1"),
        ({"axes": {"a": ALGORITHMS, "b": ["algorithm=ppo"]}}, r"axes\.b and axes\.a both set algorithm"),
        ({"overrides": ["seed=3"]}, r"overrides: seed=3: the study gives each cell its seed; name them in `seeds`"),
        ({"axes": {"a": ["run.name=x"]}}, r"axes\.a: run\.name=x: a cell's folder is named by its configuration"),
        ({"seeds": 2}, r"seeds=2: must be a list, for example \[0, 1\]$"),
        ({"axes": {"a": {"x": "seed=1"}}}, r"axes\.a=.*: must be a list of levels, for example \[algorithm=grpo, l"),
        ({"axes": ["algorithm=grpo"]}, r"axes=\['algorithm=grpo'\]: must be a mapping, `name: value` a line$"),
        ({"overrides": "seed=1"}, r"overrides='seed=1': must be a list of overrides, for example \[train\.steps=60\]$"),
        ({"overrides": {"seed": 1}}, r"overrides=\{'seed': 1\}: must be a list of overrides, for example "),
        ({"evaluation": "eval/loss"}, r"evaluation='eval/loss': must be a mapping, `key: value` a line$"),
        (
            {"evaluation": {"metric": "accuracy"}, "axes": {"a": ["trian.steps=3"]}},
            r"trian=.*no such key .*\n.*metric=",
        ),
        ({"seeds": [1, 1]}, r"seeds=\[1, 1\]: a seed is given twice"),
        ({"evaluation": {"metric": "accuracy"}}, r"evaluation\.metric=accuracy: no such metric; docs/metrics\.md"),
        ({"evaluation": {"metric": "steps/made"}}, r"metric=steps/made: no such metric; it is called steps/completed"),
        ({"axes": {"a": ["trian.steps=3"]}}, r"steps=3 seed=0 and 2 more: trian=.*no such key \(did you mean 'train"),
        ({"axes": {"a": ["algorithm=gpso"]}}, r"gpso seed=0 and 2 more: .*no such file \(did you mean 'gspo'\?\)"),
        (
            {"axes": {"a": [*ALGORITHMS, "train.steps=x"]}},
            r"steps=x seed=0 and 2 more: train.steps='x': must be a valid integer",
        ),
        ({"axes": {"a": ["train.steps=400", "train.learning_rate=1e-3"]}}, r"are one configuration; a level changes"),
        ({"axes": {"a": [{"x": "train.steps=3"}, {"x": "train.steps=4"}]}}, r"two arms are named 'x'; add labels"),
        (
            {
                "base": "sft_tiny",
                "overrides": ["sft.epochs=2"],
                "axes": {"a": RATES},
                "evaluation": {"metric": "eval/loss"},
            },
            r"sft\.epochs=2: a study knows by train\.steps whether a cell is done; set that instead",
        ),
        (
            {"base": "sft_tiny", "axes": {"a": RATES}},
            r"3 seed=0 and 5 more: evaluation\.metric=eval/accuracy: job=sft never .* eval/loss and eval/perplexity$",
        ),
        ({"base": "dpo_tiny", "evaluation": {"metric": "eval/perplexity"}}, r"job=dpo never .*/loss and eval/pref"),
        ({"evaluation": {"metric": "eval/loss"}}, r"job=rl never records it; of held-out data .* eval/accuracy$"),
        (
            {"base": "dpo_tiny", "evaluation": {"metric": "reward/mean"}},
            r"base seed=0 and 2 more: evaluation\.metric=reward/mean: job=dpo never records it",
        ),
        ({"base": "sft_tiny", "evaluation": {"metric": "staleness/share/v0"}}, r"share/v0: job=sft never records it"),
        (
            {"base": "sft_tiny", "evaluation": {"metric": "eval/loss", "compute": "tokens"}},
            r"evaluation\.compute=tokens: job=sft samples no tokens; take steps, device_seconds or flops$",
        ),
        ({"evaluation": {"metric": "eval/typo/pass_at_8"}}, r"pass_at_8: eval\.sets has no typo; it has none$"),
        ({**SUMS, "evaluation": {"metric": "eval/sum/mean_at_4"}}, r"eval\.sets has no sum; it has sums$"),
        (
            {**SUMS, "evaluation": {"metric": "eval/sums/mean_at_8"}},
            r"eval\.sets\.sums gives mean_at_4, maj_at_4, pass_at_2; take one of these, or set its samples",
        ),
        ({**SUMS, "evaluation": {"metric": "eval/sums/pass_at_4"}}, r"pass_at_4: eval\.sets\.sums gives"),
        ({"evaluation": {"metric": "source/sums/reward"}}, r"reward: data\.sources has no sums; it has none$"),
        ({"base": "sft_tiny", "evaluation": {"metric": "source/a/epoch"}}, r"epoch: data\.sources has no a; it has"),
        ({"axes": {"a": ALGORITHMS}, "reference": "ppo"}, r"reference: 'ppo' is no arm; arms: grpo, gspo"),
        ({"axes": {"a": ALGORITHMS}, "contrasts": {"c": {"x": 1}}}, r"contrasts\.c: 'x' is no arm"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_cells(study_of(tmp_path, **keys))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("figure", ["mean_at_4", "maj_at_4", "pass_at_2", "length", "errors"])
def test_every_figure_that_a_set_records_can_be_compared(tmp_path: Path, figure: str) -> None:
    assert study_cells(study_of(tmp_path, **SUMS, evaluation={"metric": f"eval/sums/{figure}"}))


@pytest.mark.parametrize(
    ("base", "metric"),
    [
        ("sft_tiny", "eval/perplexity"),
        ("dpo_tiny", "eval/preference_margin"),
        ("reward_tiny", "eval/loss"),
        ("sft_tiny", "moe/load_imbalance"),
        ("tiny_cpu", "reward/mean"),
    ],
)
def test_what_a_job_records_can_be_compared(tmp_path: Path, base: str, metric: str) -> None:
    assert study_cells(study_of(tmp_path, base=base, evaluation={"metric": metric}))


DENSE = """{"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 260, "max_position_embeddings": 512,
"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": false}"""


@pytest.mark.parametrize(
    ("metric", "override", "why"),
    [
        ("critic/explained_variance", "algorithm=ppo", r"credit=completion has no critic; take algorithm=ppo$"),
        ("moe/z_loss", "learner.router.z_loss=0.1", r"learner\.router\.z_loss=0; set a coefficient$"),
        ("moe/first_flip/layer0", "train.route_flips=true", r"train\.route_flips=false; set it to true$"),
        ("moe/rerouted_fraction", "algorithm.routing_replay=r2", r"routing_replay=off; set r2 or r3$"),
        ("moe/dead_experts", "model.path=null", r"dense: model_type='qwen3' has no experts$"),
    ],
)
def test_a_metric_that_no_cell_has_is_refused(tmp_path: Path, metric: str, override: str, why: str) -> None:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text(DENSE)
    plain = f"model.path={tmp_path / 'dense'}" if "dense" in why else "algorithm=grpo"
    asked = {"evaluation": {"metric": metric}, "seeds": [0]}
    assert len(study_cells(study_of(tmp_path, axes={"a": [plain, override]}, **asked))) == 2
    with pytest.raises(ConfigError, match=rf"^evaluation\.metric={metric}: no cell records it: .*{why}"):
        study_cells(study_of(tmp_path, overrides=[plain], **asked))


def test_a_critic_on_the_policys_layers_has_no_step_of_its_own(tmp_path: Path) -> None:
    keys = ["algorithm=ppo", "algorithm.critic.backbone=policy"]
    asked = {"evaluation": {"metric": "critic/grad_norm"}, "seeds": [0]}
    with pytest.raises(ConfigError, match=r"backbone=policy trains it in the policy's own steps; take grad_norm$"):
        study_cells(study_of(tmp_path, overrides=keys, **asked))
    assert study_cells(study_of(tmp_path, overrides=keys[:1], **asked))


def test_more_cells_than_allowed_are_refused_not_left_out(tmp_path: Path) -> None:
    axes = {"a": [f"train.steps={i}" for i in range(1, 74)], "b": [f"eval.every={i}" for i in range(137)]}
    assert 73 * 137 == 10_001
    with pytest.raises(ConfigError, match="more than 10000 cells"):
        study_cells(study_of(tmp_path, axes=axes, seeds=[0]))


def test_what_a_machine_refuses_names_the_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_of(tmp_path, axes={"a": [*ALGORITHMS, {"mine": "reward.function=nowhere:reward"}]})
    assert status_of("experiment", "run", str(tmp_path / "mine.yaml")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: mine: ")
    assert "nowhere" in line
    assert not (tmp_path / "runs").exists()


def test_a_check_writes_a_file_a_cell_that_submit_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_of(tmp_path)
    assert status_of("experiment", "run", str(tmp_path / "mine.yaml"), "--check") == 0
    assert f"{study.folder}/cells" in capsys.readouterr().out
    cells = study_cells(study)
    assert sorted(path.stem for path in (tmp_path / "runs" / "cells").iterdir()) == sorted(c.name for c in cells)
    for cell in cells:
        assert load_config(str(config_path(cell)), []) == cell.config
    assert status_of("experiment", "submit", str(tmp_path / "mine.yaml"), "--dry-run") == 1
    assert "which `rl-megatron submit` takes" in capsys.readouterr().err


def test_cells_on_gpus_run_one_at_a_time(tmp_path: Path) -> None:
    gpu = ["learner.device=cuda", "learner.ep=1"]
    study = study_of(tmp_path, overrides=gpu)
    assert max_running_cells(study, study_cells(study)) == 1
    study = study_of(tmp_path, overrides=gpu, budget={"cells_at_once": 2})
    with pytest.raises(ConfigError, match="would share the same GPUs; allowed: 1"):
        max_running_cells(study, study_cells(study))


def test_cells_in_a_job_run_one_at_a_time_on_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ray = ["run.launcher=ray"]
    study = study_of(tmp_path, overrides=ray)
    assert max_running_cells(study, study_cells(study)) == 1
    study = study_of(tmp_path, overrides=ray, budget={"cells_at_once": 2})
    with pytest.raises(ConfigError, match=r"inside job 7, and each cell would place its ranks on all .*; allowed: 1"):
        max_running_cells(study, study_cells(study))


def test_cells_share_the_cores(tmp_path: Path) -> None:
    cores, thread = len(os.sched_getaffinity(0)), ["learner.ep=1", "learner.threads=1"]
    apart = [*thread, "algorithm=ppo", "roles.critic=separate"]  # the critic has a process of its own
    ray = [*thread, "run.launcher=ray"]  # and Ray's own take a core
    half = max(1, cores // 2)
    for keys, wanted in ((thread, cores), (["learner.ep=1"], 1), (apart, half), (ray, half)):
        study = study_of(tmp_path, overrides=keys)
        assert max_running_cells(study, study_cells(study)) == wanted


def test_states_are_read_from_folders_and_records(tmp_path: Path) -> None:
    levels = [{name: f"train.learning_rate={i}e-3"} for i, name in enumerate("abcdefg", 1)]
    study = study_of(tmp_path, axes={"x": levels}, seeds=[0], overrides=["train.steps=2"], budget={"cell_minutes": 1})
    cells, steps = study_cells(study), {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1}
    boot, ticks = process_birth(me := os.getpid()).split()
    dead = {"pid": me, "began": f"{boot} {int(ticks) - 1}", "starts": 1}  # another process had this number
    records = {
        "a": CellRecord(**dead, seconds=3.0, status=0),
        "b": CellRecord(pid=me, began=process_birth(me), starts=1, seconds=0.0),
        "c": CellRecord(**dead, seconds=61.0, status=0),
        "d": CellRecord(**dead, seconds=3.0),
        "f": CellRecord(**dead, seconds=3.0, status=1, reason="status 1: error: no"),
    }
    for cell in cells:
        if cell.arm in steps:
            cell.folder.mkdir(parents=True)
        for step in range(steps.get(cell.arm, -1) + 1):
            MetricsWriter(cell.folder).write({"step": step, "phase": "rl", "eval/accuracy": 0.25 * step})
        if cell.arm in records:
            write_record(cell, records[cell.arm])
    found = find_states(study, cells)
    assert [e.state.value for e in found] == ["done", "running", "spent", "stopped", "stopped", "failed", "waiting"]
    assert [each.value for each in found] == [0.5, 0.25, 0.25, 0.25, 0.25, None, None]
    text = states_table(study, found)
    assert text.splitlines()[0].endswith("run (value: eval/accuracy)")
    assert f"running        1/2      0.25       -  {found[2 - 1].cell.name}" in text
    assert "status 1: error: no" in text
    assert text.endswith("7 cells: 1 done, 1 spent, 1 running, 1 failed, 2 stopped, 1 waiting")
    task = {"pid": 0, "began": "", "starts": 1, "seconds": 0.0, "granted": None, "task": "12_0"}  # as 0.3.0 wrote it
    record_path(cells[0]).write_text(json.dumps(task))
    record_path(cells[3]).write_text(json.dumps({**task, **dead, "task": ""}))
    assert [find_states(study, cells)[i].state.value for i in (0, 3)] == ["done", "stopped"]
    (cells[0].folder / "metrics.jsonl").write_text('{"step": 2, "phase": "rl", "reward/late": 3}\n')
    assert find_states(study.with_outcome("reward/timeouts", None), cells)[0].value == 3  # by its old name
    record_path(cells[0]).write_text("{}")
    with pytest.raises(DataError, match="not the record of a cell"):
        find_states(study, cells)


def test_overrides_of_the_command_line_come_after_the_files_and_make_other_cells(tmp_path: Path) -> None:
    keys = {"axes": {"a": [["algorithm=grpo", "train.minibatches=1"], "algorithm=gspo"]}, "seeds": [0]}
    plain = study_of(tmp_path, overrides=["train.minibatches=4"], **keys)
    more = read_study(tmp_path / "mine.yaml", ["train.minibatches=8", "train.steps=7"])
    assert [cell.config.train.minibatches for cell in study_cells(plain)] == [1, 4]
    assert [cell.config.train.minibatches for cell in study_cells(more)] == [1, 8]  # an arm's own come last
    assert {cell.name for cell in study_cells(plain)}.isdisjoint(cell.name for cell in study_cells(more))
    assert more.folder == plain.folder
    with pytest.raises(ConfigError, match="overrides: seed=3: the study gives each cell its seed"):
        read_study(tmp_path / "mine.yaml", ["seed=3"])


def test_a_report_of_another_outcome_has_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["train.steps=3", "learner.ep=1", "train.route_flips=true"]
    for cell in study_cells(study_of(tmp_path, axes={"a": ALGORITHMS}, seeds=[0, 1], overrides=keys)):
        cell.folder.mkdir(parents=True)
        save_resolved(cell.config, cell.folder / "config.yaml")
        writer = MetricsWriter(cell.folder)
        for step in (1, 2, 3):
            flips = 0.1 * step + cell.seed + (cell.arm == "gspo")
            writer.write({"step": step, "phase": "rl", "eval/accuracy": 0.5, "moe/flips_update": flips})
        writer.close()
    path = str(tmp_path / "mine.yaml")
    assert status_of("experiment", "report", path, "--metric", "moe/flips_update", "--last", "2") == 0
    page = tmp_path / "runs/outcomes/moe-flips_update,last=2/report.html"
    assert str(page) in capsys.readouterr().out
    found = json.loads((page.parent / "results.json").read_text())
    assert found["arms"]["grpo"]["value"] == pytest.approx(0.75)  # of 0.2 and 0.3, 1.2 and 1.3
    assert found["differences"]["gspo - grpo"]["value"] == pytest.approx(1.0)
    assert not (tmp_path / "runs/results.json").exists()
    assert status_of("experiment", "report", path, "--last", "3") == 0
    assert sorted(each.name for each in (tmp_path / "runs/outcomes").iterdir()) == ["last=3", "moe-flips_update,last=2"]
    assert not (tmp_path / "runs/results.json").exists()
    assert status_of("experiment", "report", path, "--metric", "moe/flip") == 1
    assert "--metric moe/flip: no such metric" in capsys.readouterr().err
    assert status_of("experiment", "report", path, "--metric", "eval/perplexity") == 1
    assert "evaluation.metric=eval/perplexity: job=rl never records it" in capsys.readouterr().err


def test_every_option_of_a_report_is_in_its_folders_name() -> None:
    """Overrides that come out alike differ by a hash; their order counts, as the last one of a key holds."""
    assert outcome_folder(None, None, []) == Path()
    assert outcome_folder(None, None, ["train.minibatches=16"]) == Path("outcomes/train.minibatches=16")
    assert outcome_folder("kl/old_policy", 5, ["a.b=1", "c=2"]) == Path("outcomes/kl-old_policy,last=5,a.b=1,c=2")
    alike = [["a=x/y"], ["a=x y"], ["a=x-y"], ["a=x,b=y"], ["a=x", "b=y"], ["b=y", "a=x"], ["k=" + 300 * "a"]]
    names = [outcome_folder(None, None, given).name for given in alike]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 140


# The studies of docs/studies: the cells that each has, and that the configuration of every one is accepted.
STUDIES = Path(__file__).parents[3] / "docs" / "studies"
SIZES = {"loss_and_rate": (4, 12), "moe_stability": (7, 35), "moe_stability_rates": (56, 56)}
SIZES |= {"moe_stability_smoke": (4, 8), "sizes": (12, 24), "staleness": (2, 10), "turn_credit": (4, 20)}


def cells(name: str, *more: str) -> list[Cell]:
    return study_cells(read_study(STUDIES / f"{name}.yaml", more))


def problems(cell: Cell, tmp_path: Path) -> list[str]:
    model = cell.config.model.model_copy(update={"cache_dir": tmp_path})
    return list(preflight(cell.config.model_copy(update={"model": model})).texts("problem"))


def test_every_study_is_listed_and_has_so_many_arms_and_cells() -> None:
    assert {path.stem for path in STUDIES.glob("*.yaml")} == SIZES.keys()
    for name, (arms, count) in SIZES.items():
        found = cells(name)
        assert (len({cell.arm for cell in found}), len(found)) == (arms, count), name


def test_the_arms_of_moe_stability_are_as_its_page_says(tmp_path: Path) -> None:
    found = cells("moe_stability")
    assert Counter(cell.seed for cell in found) == dict.fromkeys(range(5), 7)
    assert [cell.seed for cell in found[:7]] == [0] * 7
    for arm, config in {cell.arm: cell.config for cell in found[:7]}.items():
        kind, loss, *replay = arm.split()
        tiny = config.model.tiny
        assert tiny.experts_per_token * tiny.expert_width == 32  # equal active width
        assert (tiny.num_experts, config.rollout.router_noise) == ((16, 0.1) if kind == "moe" else (1, 0.0))
        assert config.algorithm.routing_replay == (replay[0] if replay else "off")
        assert config.algorithm.ratio_level == ("sequence" if loss == "gspo" else "token")
        assert (config.algorithm.objective == "cispo") is (loss == "cispo")
        assert config.train.minibatches == 8
        assert config.train.route_flips
    assert [text for cell in found[:7] for text in problems(cell, tmp_path)] == []


@pytest.mark.parametrize("more", ["train.minibatches=16", "rollout.router_noise=0.3"])
def test_further_degrees_and_levels_are_other_cells_of_the_same_folder(more: str) -> None:
    plain, others = cells("moe_stability"), cells("moe_stability", more)
    same = {cell.folder for cell in plain} & {cell.folder for cell in others}
    dense = {cell.folder for cell in plain if cell.arm.startswith("dense")}
    assert same == (dense if "noise" in more else set())  # arms without experts have no noise in either
    assert {cell.folder.parent for cell in plain} == {cell.folder.parent for cell in others}


def test_sizes_start_from_folders_that_upcycling_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cells("sizes")
    expected = {f"runs/sizes_models/w{width}-e{experts}" for width in (32, 48, 64, 96) for experts in (4, 8, 16)}
    assert {str(cell.config.model.path) for cell in found} == expected
    monkeypatch.chdir(tmp_path)
    spec = TinySizes(hidden_size=32, num_experts=1, experts_per_token=1, expert_width=16)
    dense = make_tiny_model(spec, tmp_path / "cache", seed=0)
    (tmp_path / "runs/sizes_models").mkdir(parents=True)
    upcycle(dense, Path("runs/sizes_models/w32-e4"), read_upcycling("experts=4,topk=2"))
    (smallest,) = (cell for cell in found if cell.arm == "width 32 of 4" and cell.seed == 0)
    assert problems(smallest, tmp_path) == []


# The page and the files of a study: its numbers are those of the runs' rows, and no cell is left out silently.
SEEDS, STEPS = [0, 1, 2, 3], 40
ARMS = ["moe grpo", "moe gspo", "dense grpo", "dense gspo"]
AT = np.arange(0, STEPS + 1, 2)


def recorded(cell: Cell, values: np.ndarray, tokens: int = 100) -> None:
    cell.folder.mkdir(parents=True)
    save_resolved(cell.config, cell.folder / "config.yaml")
    writer = MetricsWriter(cell.folder)
    for step, value in zip(AT, values, strict=False):
        row = {"phase": "rl", "step": int(step), "eval/accuracy": float(value), "seconds/step": 2.0}
        more = {"reward/mean": float(value), "reward/std": 0.5, **({"flops/train": 7e9} if step else {})}
        writer.write({**row, "tokens/rollout": tokens, **more})


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
    cells, values = study_cells(read), dict[tuple[str, int], np.ndarray]()
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
    assert fits["moe gspo"]["refused"].startswith("no bend yet")
    assert fits["dense gspo"]["parameters"]["A"]["value"] == pytest.approx(0.7, abs=0.03)

    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", page))
    assert f"{cells[12].name} (failed at step 8 of {STEPS}: error: &lt;no price&gt;)" in text
    assert f"{cells[15].name} (waiting)" in text
    assert "moe gspo: no fit (no bend yet" in text
    assert len(re.findall(r'<th><span class="runname s\d">[a-z]+-[a-z]+-s\d-', page)) == 15
    assert page.count('type="checkbox"') == 4, "a color an arm"
    charts = Page(tmp_path / "out" / "report.html").charts()
    for title in ("eval/accuracy", "dense gspo: eval/accuracy by RL steps"):
        assert any("low" in line for line in charts[title]["series"]), "a band"


def test_a_difference_is_put_in_words(tmp_path: Path) -> None:
    """Of two seeds: an arm that is higher, and one that differs by 0 and 0.06, for which 11 pairs give ± 0.028."""
    results = {"base": [0.1, 0.2], "high": [0.5, 0.601], "low": [0.0, 0.1001], "near": [0.1, 0.26]}
    axes = {"a": [{name: f"train.learning_rate={i}e-3"} for i, name in enumerate(results, 1)]}
    read = study_of(tmp_path, axes=axes, seeds=[0, 1], overrides=["train.steps=2"])
    cells = study_cells(read)
    for cell in cells:
        recorded(cell, np.array([0.0, results[cell.arm][cell.seed]]))
    page = write_study_report(read, cells, tmp_path / "report.html").read_text()
    for words in ("higher", "lower", "no difference seen; about 11 pairs would show one of this size", "0 to 0.7853"):
        assert re.search(rf"<td[^>]*>{words}</td>", page), words


def test_a_study_without_a_step_says_what_to_do(tmp_path: Path) -> None:
    read = study_of(tmp_path)
    with pytest.raises(DataError, match="no cell has recorded a step yet; start them with rl-megatron experiment run"):
        write_study_report(read, study_cells(read), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("compute", "spent"), [("steps", 4.0), ("tokens", 300.0), ("device_seconds", 12.0), ("flops", 1.4e10)]
)
def test_compute_is_what_was_spent_up_to_a_value(tmp_path: Path, compute: str, spent: float) -> None:
    """Rows of steps 0, 2 and 4, each of 2 s and 100 tokens, the last two of 7e9 FLOPs; the default run has 2 processes.
    The tables have every measure, whichever a fit takes."""
    read, cell = one_cell(tmp_path, evaluation={"compute": compute})
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
    assert curve_points(read, cell, load_runs([cell.folder])[0])[-1] == (4.0, spent, 0.3)


def test_a_measure_of_compute_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    read, cell = one_cell(tmp_path, evaluation={"compute": "flops"})
    cell.folder.mkdir(parents=True)
    for step in range(3):
        MetricsWriter(cell.folder).write({"phase": "rl", "step": step, "eval/accuracy": 0.1})
    save_resolved(cell.config, cell.folder / "config.yaml")
    with pytest.raises(DataError, match=r"evaluation.compute=flops, but no row has flops/train, as those of older"):
        write_study_report(read, [cell], tmp_path / "report.html")


def test_compute_that_some_rows_lack_is_blank_in_tables_and_refused_where_it_is_compared(tmp_path: Path) -> None:
    """A run that an older version began: of its steps 2 and 4 only the second has FLOPs."""
    read, cell = one_cell(tmp_path)
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
    read = study_of(tmp_path, overrides=["train.steps=0"], seeds=[0, 1], axes=axes)
    for cell in study_cells(read):
        recorded(cell, np.array([{"low": 0.2, "high": 0.3}[cell.arm] + 0.1 * cell.seed]))
    page = write_study_report(read, study_cells(read), tmp_path / "report.html").read_text()
    found = json.loads((tmp_path / "results.json").read_text())["differences"]["high - low"]
    assert (found["value"], found["low"], found["high"]) == (pytest.approx(0.1), None, None)
    assert "none: all 2 are equal" in page
    assert "their spread does not predict the next" in page
    low = next(row for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "high - low" in row)
    assert "<td>-</td>" in re.sub(r"\s|class=\S+", "", low), low


def test_a_cell_that_ran_with_another_versions_default_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is the same: that is of the values that differ from the defaults."""
    study, cell = one_cell(tmp_path, overrides=["train.steps=4"])
    recorded(cell, np.array([0.1, 0.2, 0.3]))
    assert describe_drift(cell) == ""
    train = cell.config.train.model_copy(update={"epochs": 3})
    save_resolved(cell.config.model_copy(update={"train": train}), cell.folder / "config.yaml")
    now = cell.config.train.epochs
    wanted = f"it ran with train.epochs=3; now it would with train.epochs={now}: remove it to repeat"
    assert describe_drift(cell) == wanted
    assert wanted in write_study_report(study, [cell], tmp_path / "report.html").read_text()
    status_of("experiment", "status", str(tmp_path / "mine.yaml"))
    assert f"note: {cell.name}: {wanted}" in capsys.readouterr().out


def test_no_ended_cell_is_left_out_or_counted_silently(tmp_path: Path) -> None:
    """One cell was stopped by its time, one recorded no value of the metric, one went to its end."""
    axes = {"a": [{name: f"train.learning_rate={i}e-3"} for i, name in enumerate(("spent", "mute", "whole"), 1)]}
    keys = {"overrides": ["train.steps=4"], "seeds": [0], "budget": {"cell_minutes": 1}}
    read = study_of(tmp_path, axes=axes, **keys)
    spent, mute, whole = study_cells(read)
    recorded(spent, np.array([0.1, 0.2]))
    write_record(spent, CellRecord(pid=1, began="", starts=1, seconds=60.5, status=0))
    recorded(mute, np.array([]))
    MetricsWriter(mute.folder).write({"phase": "rl", "step": 4, "reward/mean": 0.5})
    recorded(whole, np.array([0.1, 0.2, 0.3]))
    page = write_study_report(read, [spent, mute, whole], tmp_path / "report.html").read_text()
    notes = re.findall(r'<p class="note">([^<]*)', page)
    assert f"Counted as it is: {spent.name} (spent at step 2 of 4: budget.cell_minutes=1 are over)" in notes
    why = "Without a value of eval/accuracy, so not in means, differences and fits"
    assert f"{why}: {mute.name} (done at step 4 of 4)" in notes
    assert whole.name not in " ".join(notes)
    assert "mute: no fit (no run has values to fit)." in notes
    results = json.loads((tmp_path / "results.json").read_text())
    cells = [(each["state"], each["result"]) for each in results["cells"]]
    assert cells == [("spent", 0.2), ("done", None), ("done", 0.3)]


def test_tokens_of_a_job_that_samples_none_are_blank(tmp_path: Path) -> None:
    keys = {"base": "sft_tiny", "overrides": ["train.steps=2"], "evaluation": {"metric": "eval/loss"}}
    read, cell = one_cell(tmp_path, **keys)
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
    keys = {"overrides": [f"train.steps={STEPS}"], "seeds": [0], "evaluation": {"last": last}}
    read = study_of(tmp_path, axes=axes, **keys)
    diverged, whole = study_cells(read)
    values = 0.1 + 0.6 / (1 + (6 / np.maximum(AT, 0.01)) ** 1.6)
    recorded(diverged, np.append(values[:-1], np.nan))
    recorded(whole, values)
    MetricsWriter(whole.folder).write({"phase": "rl", "step": STEPS, "reward/mean": 0.5})
    page = write_study_report(read, [diverged, whole], tmp_path / "report.html").read_text()
    notes = re.findall(r'<p class="note">([^<]*)', page)
    why = "Without finite last values of eval/accuracy, so not in means, differences and fits"
    assert f"{why}: {diverged.name} (done at step {STEPS} of {STEPS})" in notes
    assert "diverged: no fit (no run has values to fit)." in notes
    found = json.loads((tmp_path / "results.json").read_text())
    assert [each["result"] for each in found["cells"]] == [None, pytest.approx(values[-last:].mean())]
    assert found["fits"]["whole"]["refused"] is None
    assert [each.value for each in find_states(read, [diverged, whole])] == [None, pytest.approx(values[-1])]


def test_the_mean_under_a_fit_is_taken_step_by_step(tmp_path: Path) -> None:
    """Runs sample 90, 100 and 110 tokens a step, so that no two values are at the same compute."""
    keys = {"overrides": [f"train.steps={STEPS}"], "seeds": [0, 1, 2], "evaluation": {"compute": "tokens"}}
    read = study_of(tmp_path, **keys)
    cells, rng = study_cells(read), np.random.default_rng(3)
    for cell, tokens in zip(cells, (90, 100, 110), strict=True):
        curve = 0.1 + 0.6 / (1 + (6 / (AT + 2)) ** 1.6)
        recorded(cell, curve + 0.01 * rng.normal() + 0.003 * rng.normal(size=len(AT)), tokens=tokens)
    write_study_report(read, cells, tmp_path / "report.html")
    (chart,) = [c for title, c in Page(tmp_path / "report.html").charts().items() if "sampled tokens" in title]
    fit, means = chart["series"]
    assert (len(fit["y"]), len(means["y"]), chart["axis"]) == (60, len(AT), "sampled tokens")
