"""A study's file: its cells, their names, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from launcher.programs.experiment import cells_at_once
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.experiments.cells import Cell, cells_of, config_digest
from rl_megatron.experiments.states import CellRecord, birth_of, find_states, record_path, states_table, write_record
from rl_megatron.experiments.study import Study, outcome_folder, read_study
from rl_megatron.observability.metrics.writer import MetricsWriter
from tests.unit.launcher.commands import status_of

ALGORITHMS = ["algorithm=grpo", "algorithm=gspo"]
RATES = ["train.learning_rate=1e-3", {"fast": ["train.learning_rate=3e-3", "train.lr_warmup_steps=5"]}]

SUMS = {"overrides": [f"eval.sets.sums.{key}" for key in ("samples=4", "temperature=1", "pass_at=2")]}


def study_of(folder: Path, **keys: object) -> Study:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"folder": str(folder / "runs"), **keys}))
    return read_study(path)


def named(cells: list[Cell]) -> list[tuple[str, int]]:
    return [(cell.arm, cell.seed) for cell in cells]


def test_a_product_has_every_combination_and_the_first_seed_of_each_arm_comes_first(tmp_path: Path) -> None:
    cells = cells_of(
        study_of(tmp_path, axes={"a": ALGORITHMS, "rate": RATES}, seeds=[4, 7], overrides=["train.steps=9"])
    )
    arms = ["grpo learning_rate=1e-3", "grpo fast", "gspo learning_rate=1e-3", "gspo fast"]
    assert named(cells) == [(arm, seed) for seed in (4, 7) for arm in arms]
    fast = cells[3].config
    assert (fast.algorithm.ratio_level, fast.train.learning_rate, fast.train.lr_warmup_steps) == ("sequence", 3e-3, 5)
    assert {cell.config.train.steps for cell in cells} == {9}
    assert [cell.config.seed for cell in cells[::4]] == [4, 7]


def test_zip_takes_the_levels_in_step(tmp_path: Path) -> None:
    cells = cells_of(study_of(tmp_path, axes={"a": ALGORITHMS, "rate": RATES}, combine="zip", seeds=[0]))
    assert named(cells) == [("grpo learning_rate=1e-3", 0), ("gspo fast", 0)]


def test_arms_that_are_not_paired_have_seeds_of_their_own_that_no_other_arm_or_seed_moves(tmp_path: Path) -> None:
    before = cells_of(study_of(tmp_path, axes={"a": ALGORITHMS, "rate": RATES}, seeds=[0, 5], paired=False))
    seeds = {cell.seed for cell in before}
    assert (len(seeds), max(seeds) < 2**31) == (8, True)
    assert all(cell.config.seed == cell.seed for cell in before)
    labelled = ["algorithm=cispo", {"mine": "algorithm=gspo"}, "algorithm=grpo"]
    more = {"axes": {"a": labelled, "rate": ["train.learning_rate=9e-3", *RATES]}, "seeds": [7, 0, 5]}
    after = cells_of(study_of(tmp_path, **more, paired=False))
    assert len(after) == len({cell.seed for cell in after}) == 27
    assert {config_digest(cell.config) for cell in before} <= {config_digest(cell.config) for cell in after}


def test_a_cell_is_a_run_in_the_studys_folder(tmp_path: Path) -> None:
    for cell in cells_of(study_of(tmp_path, axes={"a": ALGORITHMS, "rate": RATES})):
        assert cell.folder == cell.config.run.dir / str(cell.config.run.name) == tmp_path / "runs" / cell.name


def test_a_folder_is_named_by_what_changes_numbers_alone(tmp_path: Path) -> None:
    (cell, *_) = cells_of(study_of(tmp_path, axes={"a": ALGORITHMS}))
    assert cell.name == f"grpo-s0-{config_digest(cell.config)}"
    same = ("run.name=x", "run.dir=y", "log.tensorboard=false", "checkpoint.every=3", "model.cache_dir=z")
    other = ("seed=1", "train.steps=7", "learner.ep=1", "algorithm.clip_low=0.1", "data.num_eval=3")
    assert {config_digest(load_config("tiny_cpu", ["algorithm=grpo", key])) for key in same} == {
        config_digest(cell.config)
    }
    assert (
        len(
            {config_digest(load_config("tiny_cpu", ["algorithm=grpo", key])) for key in other}
            | {config_digest(cell.config)}
        )
        == 6
    )


def test_a_run_is_found_again_under_another_label(tmp_path: Path) -> None:
    before = cells_of(study_of(tmp_path, axes={"a": ALGORITHMS}, seeds=[0]))
    before[1].folder.mkdir(parents=True)
    after = cells_of(study_of(tmp_path, axes={"a": [{"plain": ALGORITHMS[0]}, {"ours": ALGORITHMS[1]}]}, seeds=[0]))
    assert [cell.arm for cell in after] == ["plain", "ours"]
    assert after[1].folder == before[1].folder
    assert after[0].name.startswith("plain-s0-")


def test_a_base_is_beside_the_study(tmp_path: Path) -> None:
    save_resolved(load_config("tiny_cpu", ["train.steps=3"]), tmp_path / "base.yaml")
    (cell,) = cells_of(study_of(tmp_path, base="base.yaml", seeds=[0]))
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
        ({"seeds": [1, 1]}, r"seeds=\[1, 1\]: a seed is given twice"),
        ({"evaluation": {"metric": "accuracy"}}, r"evaluation\.metric=accuracy: no such metric; docs/metrics\.md"),
        ({"axes": {"a": ["trian.steps=3"]}}, r"steps=3 seed=0 and 2 more: trian=.*no such key \(did you mean 'train"),
        ({"axes": {"a": ["algorithm=gpso"]}}, r"gpso seed=0 and 2 more: .*no such file \(did you mean 'gspo'\?\)"),
        (
            {"axes": {"a": [*ALGORITHMS, "train.steps=x"]}},
            r"steps=x seed=0 and 2 more: train.steps='x': must be a valid integer",
        ),
        ({"axes": {"a": ["train.steps=400", "train.learning_rate=1e-3"]}}, r"are one configuration; a level changes"),
        (
            {"axes": {"a": [{"x": "train.steps=3"}, {"x": "train.steps=4"}]}},
            r"two arms are named 'x'; give their levels",
        ),
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
            r"eval\.sets\.sums gives mean_at_4, maj_at_4, pass_at_2, all_at_2; take one of these, or set its samples",
        ),
        ({**SUMS, "evaluation": {"metric": "eval/sums/all_at_4/low"}}, r"all_at_4/low: eval\.sets\.sums gives"),
        ({"evaluation": {"metric": "source/sums/reward"}}, r"reward: data\.sources has no sums; it has none$"),
        ({"base": "sft_tiny", "evaluation": {"metric": "source/a/epoch"}}, r"epoch: data\.sources has no a; it has"),
        ({"axes": {"a": ALGORITHMS}, "reference": "ppo"}, r"reference: 'ppo' is no arm; arms: grpo, gspo"),
        ({"axes": {"a": ALGORITHMS}, "contrasts": {"c": {"x": 1}}}, r"contrasts\.c: 'x' is no arm"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cells_of(study_of(tmp_path, **keys))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("figure", ["mean_at_4", "maj_at_4/high", "pass_at_2", "all_at_2/low", "length", "seconds"])
def test_every_figure_that_a_set_records_can_be_compared(tmp_path: Path, figure: str) -> None:
    assert cells_of(study_of(tmp_path, **SUMS, evaluation={"metric": f"eval/sums/{figure}"}))


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
    assert cells_of(study_of(tmp_path, base=base, evaluation={"metric": metric}))


DENSE = """{"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 260, "max_position_embeddings": 512,
"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": false}"""


@pytest.mark.parametrize(
    ("metric", "override", "why"),
    [
        ("critic/explained_variance", "algorithm=ppo", r"credit=completion has no critic; take algorithm=ppo$"),
        ("moe/z_loss", "learner.router.z_loss=0.1", r"learner\.router\.z_loss=0; set a coefficient$"),
        ("moe/flips_update/layer0", "train.route_flips=true", r"train\.route_flips=false; set it to true$"),
        ("moe/rerouted_fraction", "algorithm.routing_replay=r2", r"routing_replay=off; set r2 or r3$"),
        ("moe/dead_experts", "model.path=null", r"dense: model_type='qwen3' has no experts$"),
    ],
)
def test_a_metric_of_parts_that_no_cell_has_is_refused_and_one_that_an_arm_has_is_not(
    tmp_path: Path, metric: str, override: str, why: str
) -> None:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text(DENSE)
    plain = f"model.path={tmp_path / 'dense'}" if "dense" in why else "algorithm=grpo"
    asked = {"evaluation": {"metric": metric}, "seeds": [0]}
    assert len(cells_of(study_of(tmp_path, axes={"a": [plain, override]}, **asked))) == 2
    with pytest.raises(ConfigError, match=rf"^evaluation\.metric={metric}: no cell records it: .*{why}"):
        cells_of(study_of(tmp_path, overrides=[plain], **asked))


@pytest.mark.parametrize("name", ["grad_norm", "learning_rate"])
def test_a_critic_on_the_policys_layers_has_no_step_of_its_own(tmp_path: Path, name: str) -> None:
    keys = ["algorithm=ppo", "algorithm.critic.backbone=policy"]
    asked = {"evaluation": {"metric": f"critic/{name}"}, "seeds": [0]}
    with pytest.raises(ConfigError, match=rf"backbone=policy trains it in the policy's own steps; take {name}$"):
        cells_of(study_of(tmp_path, overrides=keys, **asked))
    assert cells_of(study_of(tmp_path, overrides=keys[:1], **asked))


def test_more_cells_than_allowed_are_refused_not_left_out(tmp_path: Path) -> None:
    axes = {"a": [f"train.steps={i}" for i in range(1, 74)], "b": [f"eval.every={i}" for i in range(137)]}
    assert 73 * 137 == 10_001
    with pytest.raises(ConfigError, match="more than 10000 cells"):
        cells_of(study_of(tmp_path, axes=axes, seeds=[0]))


def test_the_studies_of_the_documents_can_start() -> None:
    paths = sorted((Path(__file__).resolve().parents[3] / "docs" / "studies").glob("*.yaml"))
    assert paths
    for path in paths:
        assert cells_of(read_study(path))


def test_what_a_machine_refuses_names_the_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_of(tmp_path, axes={"a": [*ALGORITHMS, {"mine": "reward.function=nowhere:reward"}]})
    assert status_of("experiment", "run", str(tmp_path / "mine.yaml")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: mine: ")
    assert "nowhere" in line
    assert not (tmp_path / "runs").exists()


def test_cells_on_gpus_run_one_at_a_time(tmp_path: Path) -> None:
    gpu = ["learner.device=cuda", "learner.ep=1"]
    study = study_of(tmp_path, overrides=gpu)
    assert cells_at_once(study, cells_of(study)) == 1
    study = study_of(tmp_path, overrides=gpu, budget={"cells_at_once": 2})
    with pytest.raises(ConfigError, match="would share the same GPUs; allowed: 1"):
        cells_at_once(study, cells_of(study))


def test_cells_in_a_job_run_one_at_a_time_on_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ray = ["run.launcher=ray"]
    study = study_of(tmp_path, overrides=ray)
    assert cells_at_once(study, cells_of(study)) == 1
    study = study_of(tmp_path, overrides=ray, budget={"cells_at_once": 2})
    with pytest.raises(ConfigError, match=r"inside job 7, and each cell would place its ranks on all .*; allowed: 1"):
        cells_at_once(study, cells_of(study))


def test_cells_share_the_cores(tmp_path: Path) -> None:
    cores, thread = len(os.sched_getaffinity(0)), ["learner.ep=1", "learner.threads=1"]
    apart = [*thread, "algorithm=ppo", "roles.critic=separate"]  # the critic has a process of its own
    ray = [*thread, "run.launcher=ray"]  # and Ray's own take a core
    for keys, wanted in (
        (thread, cores),
        (["learner.ep=1"], 1),
        (apart, max(1, cores // 2)),
        (ray, max(1, cores // 2)),
    ):
        study = study_of(tmp_path, overrides=keys)
        assert cells_at_once(study, cells_of(study)) == wanted


def test_states_are_read_from_folders_and_records(tmp_path: Path) -> None:
    levels = [{name: f"train.learning_rate={i}e-3"} for i, name in enumerate("abcdefg", 1)]
    study = study_of(tmp_path, axes={"x": levels}, seeds=[0], overrides=["train.steps=2"], budget={"cell_minutes": 1})
    cells = cells_of(study)
    steps = {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1}
    me = os.getpid()
    boot, ticks = birth_of(me).split()
    dead = {"pid": me, "began": f"{boot} {int(ticks) - 1}", "starts": 1}  # another process had this number
    records = {
        "a": CellRecord(**dead, seconds=3.0, status=0),
        "b": CellRecord(pid=me, began=birth_of(me), starts=1, seconds=0.0),
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
    states = ["done", "running", "spent", "stopped", "stopped", "failed", "waiting"]
    assert [each.state.value for each in found] == states
    assert [each.value for each in found] == [0.5, 0.25, 0.25, 0.25, 0.25, None, None]
    text = states_table(found)
    assert "status 1: error: no" in text
    assert text.endswith("7 cells: 1 done, 1 spent, 1 running, 1 failed, 2 stopped, 1 waiting")
    record_path(cells[0]).write_text("{}")
    with pytest.raises(DataError, match="not the record of a cell"):
        find_states(study, cells)


def test_overrides_of_the_command_line_come_after_the_files_and_make_other_cells(tmp_path: Path) -> None:
    keys = {"axes": {"a": [["algorithm=grpo", "train.minibatches=1"], "algorithm=gspo"]}, "seeds": [0]}
    plain = study_of(tmp_path, overrides=["train.minibatches=4"], **keys)
    more = read_study(tmp_path / "mine.yaml", ["train.minibatches=8", "train.steps=7"])
    assert [cell.config.train.minibatches for cell in cells_of(plain)] == [1, 4]
    assert [cell.config.train.minibatches for cell in cells_of(more)] == [1, 8]  # an arm's own come last
    assert {cell.name for cell in cells_of(plain)}.isdisjoint(cell.name for cell in cells_of(more))
    assert more.folder == plain.folder
    with pytest.raises(ConfigError, match="overrides: seed=3: the study gives each cell its seed"):
        read_study(tmp_path / "mine.yaml", ["seed=3"])


def test_a_report_of_another_outcome_lies_in_a_folder_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(
        tmp_path,
        axes={"a": ALGORITHMS},
        seeds=[0, 1],
        overrides=["train.steps=3", "learner.ep=1", "train.route_flips=true"],
    )
    for cell in cells_of(study):
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
