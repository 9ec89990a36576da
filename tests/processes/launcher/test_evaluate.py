"""rl-megatron eval of a folder against transformers' own greedy answers, through the in-process engine and a server of
it; its file, its refusals, and the comparison of two files. tests/e2e/test_resume.py evaluates a run's checkpoints."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher.build.data import load_data
from launcher.build.model import starting_folder
from launcher.build.trained import format_variables, trained_model
from launcher.commands.evaluate import measure_model
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.resume import fixed
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.evaluation.figures import difference_interval, share_interval
from rl_megatron.evaluation.results import paired_figures, read_results
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from tests.savings import Shards
from tests.unit.launcher.commands import status_of

REWARD = """
def odd(prompt, completions, texts):
    return [float(len(text) % 2) for text in texts]


def even(prompt, completions, texts):
    return [float(sum(map(int, c.token_ids)) % 2 == 0) for c in completions]
"""
KEYS = (
    *("data.num_eval=12", "rollout.max_new_tokens=8", "reward.function=even_rewards:even"),
    *("eval.sets.greedy.limit=12", "eval.sets.drawn.samples=4", "eval.sets.drawn.temperature=1.0"),
    *("eval.sets.drawn.pass_at=2", "eval.sets.drawn.top_k=5", "eval.sets.drawn.limit=6"),
    *("eval.sets.likeliest.temperature=1.0", "eval.sets.likeliest.top_k=1"),
    *("eval.sets.wide.data.type=arithmetic", "eval.sets.wide.data.digits=3", "eval.sets.wide.data.num_eval=5"),
)
JUDGED = """
from pathlib import Path

FAILS = Path("fails")


def judge(prompt, completions, texts):
    with open("asked", "a") as file:
        file.write(f"{len(completions)} {prompt.id}\\n")
    if FAILS.exists() and len(completions) == 4:
        raise ValueError("no judge today")
    return [float(sum(map(int, one.token_ids)) % 2 == 0) for one in completions]
"""
IN_PARTS = (
    *("data.num_eval=5", "rollout.max_new_tokens=4", "reward.function=judging:judge", "reward.on_error=fail"),
    *("eval.sets.one.limit=3", "eval.sets.two.samples=4", "eval.sets.three.samples=3"),
    *("eval.sets.two.temperature=1.0", "eval.sets.three.temperature=1.0", "--name", "all"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return starting_folder(load_config("tiny_cpu", [f"model.cache_dir={tmp_path_factory.mktemp('models')}"]))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "even_rewards.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status, and all that was printed."""
    status, printed = status_of("eval", *arguments), capsys.readouterr()
    return status, printed.out + printed.err


def of_transformers(folder: Path) -> list[int]:
    """Of the twelve held-out problems, which transformers' greedy answer gets the reward."""
    data = load_data(load_config("tiny_cpu", [*KEYS, f"model.path={folder}"]), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = []
    for prompt in data.held_out:
        ids = torch.tensor([prompt.token_ids])
        with torch.inference_mode():
            eos_token_id = list(data.stop_token_ids)
            made = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=eos_token_id, pad_token_id=0)
        right.append(int(int(made[0, ids.shape[1] :].sum()) % 2 == 0))
    return right


def test_figures_are_of_transformers_answers(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "slurm.environment.TOKEN=abc"
    status, text = said(capsys, str(folder), *KEYS, secret, "--name", "inside")
    assert status == 0, text
    save_resolved(load_config("tiny_cpu", [*KEYS, secret]), here / "config.yaml")
    private = (here / "eval" / "inside.json").stat().st_mode
    assert private == (here / "config.yaml").stat().st_mode
    assert not private & 0o077
    found, right = read_results(here / "eval" / "inside.json"), of_transformers(folder)
    assert 0 < sum(right) < 12
    greedy = found.sets["greedy"]
    assert list(greedy.measured.right) == right
    assert greedy.figures["mean@1"] == share_interval([float(one) for one in right])
    assert f"{sum(right) / 12:.4f}" in text
    assert list(found.sets["likeliest"].measured.right) == right  # drawn from one token
    drawn = found.sets["drawn"]
    assert (len(drawn.measured.right), drawn.measured.samples) == (6, 4)
    assert set(drawn.figures) == {"mean@4", "pass@2", "all@2"}
    assert [len(one.partition("+")[0]) for one in found.sets["wide"].measured.problems] == [3] * 5
    assert found.config["eval"]["sets"]["drawn"]["top_k"] == 5

    status, text = said(capsys, str(folder), *KEYS, "rollout.server.replicas=1", "--name", "server")
    assert status == 0, text
    served = read_results(here / "eval" / "server.json")
    assert (here / "eval" / "server.json").stat().st_mode == (here / "even_rewards.py").stat().st_mode
    assert served.weights == found.weights
    for name in ("greedy", "likeliest", "wide"):
        assert served.sets[name].measured.right == found.sets[name].measured.right
    assert "checksums verify all but 0 of" in (here / "eval" / "log.txt").read_text()


def results(path: Path, sets: dict[str, Sequence[int]], samples: int, problems: str = "p") -> Path:
    """A file as rl-megatron eval writes it."""
    written = {
        name: {
            **dict.fromkeys(("digest", "questions", "rows"), problems),
            "section": {"pass_at": [1, 2] if samples > 1 else []},
            "measured": {
                "problems": [f"{problems}{i}" for i in range(len(right))],
                "samples": samples,
                "right": right,
                "votes": None,
                "errors": 0,
                "length": 1.0,
                "truncated": 0.0,
                "seconds": 0.0,
            },
            "figures": {},
        }
        for name, right in sets.items()
    }
    whole = {"model": path.stem, "weights": "w", "engine": "local", "config": {}, "sets": written}
    path.write_text(json.dumps(whole))
    return path


def test_two_files_are_compared_problem_by_problem(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = results(here / "first.json", {"math": [0, 2, 4, 4], "only": [1]}, 4)
    second = results(here / "second.json", {"math": [1, 4, 4, 3]}, 4)
    status, text = said(capsys, "--compare", str(first), str(second))
    assert status == 0, text
    mean, pairs = paired_figures(read_results(first), read_results(second))
    assert (mean.figure, mean.first, mean.second) == ("mean", 10 / 16, 12 / 16)
    assert mean.difference == difference_interval([0, 0.5, 1, 1], [0.25, 1, 1, 0.75], samples=4)
    assert (pairs.figure, pairs.first) == ("pass@2", pytest.approx((0 + 5 / 6 + 1 + 1) / 4))
    assert "+0.1250" in text
    assert text.splitlines()[:2] == [f"A: {first}", f"B: {second}"]
    assert "left out: only" in text


def test_what_cannot_be_compared_is_refused(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = results(here / "first.json", {"math": [1, 0]}, 1)
    other = results(here / "other.json", {"math": [1, 0]}, 1, problems="q")
    with pytest.raises(DataError, match="set math: the two have different problems"):
        paired_figures(read_results(first), read_results(other))
    (here / "torn.json").write_text("{}")
    (here / "adapters").mkdir()
    (here / "adapters" / "adapter_config.json").write_text("{}")
    refused = {
        ("--compare", str(first), str(here / "torn.json")): "torn.json: model: Field required; give a file that",
        ("--compare", str(first), str(first), str(folder)): "--compare takes two files",
        (): "give a MODEL",
        (str(here / "none"),): "no such folder; give a Hugging Face folder, a run's folder or checkpoints/step_N",
        (str(here),): "neither .metadata",
        (str(here / "adapters"),): "it has peft's adapters alone; give the checkpoint of their run",
        (str(folder), "reward.function=ranks:judge", "reward_models.judge.path=away/judge"): (
            f"reward_models.judge.path=away/judge: it has no config.json, seen from {here}; give the absolute"
        ),
        (str(folder), "eval.sets.a.data.type=files", "eval.sets.a.data.eval=none.jsonl"): "none.jsonl",
        (
            str(folder),
            "--config",
            "calculator",
            "environment.concurrency=10000000",
        ): "10000000 trajectories (environment.concurrency): the controller opens about",
    }
    for arguments, why in refused.items():
        status, text = said(capsys, *arguments)
        assert status == 1
        assert why in " ".join(text.split()), text
    (here / "eval").mkdir()
    (here / "eval" / f"{folder.name}.json").touch()
    (kept := here / "eval" / f".{folder.name}.json.unfinished").touch()  # a file without results does not end it
    status, text = said(capsys, str(folder), *KEYS, "--name", folder.name)
    assert (status, kept.exists()) == (1, True)
    assert "exists; remove it, or give another name with --name" in " ".join(text.split())


def test_an_exported_folder_is_configured_as_its_run(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, default = here / "run", load_config("tiny_cpu", [])
    shutil.copytree(folder, exported := run / "hf_step_000004")
    save_resolved(of_run := load_config("tiny_cpu", KEYS), run / "config.yaml")
    assert trained_model(exported, None, []).config == default  # a folder beside any config.yaml
    (run / "checkpoints").mkdir()
    assert trained_model(exported, None, []).config == of_run != default
    assert trained_model(exported, None, ["data.num_eval=3"]).config == load_config(
        "tiny_cpu", [*KEYS, "data.num_eval=3"]
    )
    assert trained_model(exported, "tiny_cpu", []).config == default
    monkeypatch.chdir(exported)
    assert trained_model(Path(), None, []).config == of_run


def test_a_run_of_pairs_samples_as_one_without_their_keys(tmp_path: Path) -> None:
    of_run, run = load_config("dpo_tiny", ["algorithm.kl.reference=/models/other"]), tmp_path / "run"
    (exported := run / "hf").mkdir(parents=True)
    (exported / "config.json").touch()
    (run / "checkpoints").mkdir()
    save_resolved(of_run, run / "config.yaml")
    config, default = trained_model(exported, None, []).config, RunConfig()
    assert (config.job, config.dpo, config.algorithm) == ("rl", default.dpo, default.algorithm)


async def saved(folder: Path) -> Path:
    """A checkpoint whose shards nobody reads."""
    state = TrainerState(step=4, prompts={"epoch": 0, "next": 0}, stream=None)
    store = CheckpointStore(folder, keep=1, config=fixed(RunConfig()))
    return (await (await store.save(state, {"learner": Shards()})).finish()).folder


def test_prompts_have_the_variables_of_the_runs_template_whatever_sets_are_given(folder: Path, here: Path) -> None:
    run, sets, rows = here / "run", here / "sets.yaml", here / "rows.jsonl"
    shutil.copytree(folder, exported := run / "hf_step_000004")
    (exported / "chat_template.jinja").write_text("{{ messages[0]['content'] }} {{ who }}{{ whom }}")
    rows.write_text('{"question": "hi", "answer": "x"}\n')
    data = {"type": "files", "train": str(rows), "eval": str(rows), "chat_template": True, "on_leak": "keep"}
    given = {"data": data, "model": {"path": str(exported)}}
    sets.write_text(json.dumps({**given, "model": {**given["model"], "template_variables": {"who": "it"}}}))
    ours = {**given["model"], "template_variables": {"who": "she", "whom": 1}}
    save_resolved(RunConfig.model_validate({**given, "model": ours}), run / "config.yaml")
    for model in (run, asyncio.run(saved(run / "checkpoints")), exported):
        for config, overrides, wanted in (
            (None, [], "she1"),
            (str(sets), [], "she1"),
            (str(sets), ["model.template_variables.who=he"], "he1"),
        ):
            found = trained_model(model, config, overrides).config
            assert load_data(found, exported).held_out[0].text == f"hi {wanted}", (model, config, overrides)
            assert format_variables(found) == f'; variables of its chat template: who="{wanted[:-1]}", whom=1'
    assert format_variables(trained_model(folder, str(sets), []).config) == '; variables of its chat template: who="it"'


def test_a_runs_configuration_of_another_version_is_named(folder: Path, tmp_path: Path) -> None:
    """Also where another is given: the model's own keys are the run's."""
    run = tmp_path / "run"
    (run / "checkpoints/step_000001").mkdir(parents=True)
    exported = Path(shutil.copytree(folder, run / "hf"))
    (run / "config.yaml").write_text("rollout: {removed_key: 3}")
    for model in (run / "checkpoints/step_000001", exported):
        for config in (None, "tiny_cpu"):
            with pytest.raises(ConfigError) as raised:
                trained_model(model, config, ["eval.every=7"])
            said = str(raised.value)
            assert said.startswith(f"{run / 'config.yaml'}, by which the run trained the model, cannot be read here: ")
            assert "rollout.removed_key=3: no such key" in said
            assert "if another version of rl_megatron wrote it" in said


async def test_of_two_at_once_with_one_name_the_second_is_refused(folder: Path, here: Path) -> None:
    target = trained_model(folder, None, ["data.num_eval=2", "rollout.max_new_tokens=2"])
    measured = [measure_model(target, name) for name in ("a", "b", "a")]
    first, other, second = await asyncio.gather(*measured, return_exceptions=True)
    assert (first, other) == (Path("eval/a.json"), Path("eval/b.json"))
    assert str(second).startswith("eval/a.json: another running evaluation will write it; wait for its end, or give")
    assert isinstance(second, ConfigError)
    assert sorted((here / "eval").glob("*.json")) == [here / "eval" / "a.json", here / "eval" / "b.json"]
    (here / "eval" / f"{target.name}.json").touch()
    assert await measure_model(target, None) == Path(f"eval/{target.name}-2.json")


def asked(folder: Path) -> tuple[int, Counter[int]]:
    """The exit status, and how many prompts were judged, by how many completions each had; the check before has two."""
    Path("asked").write_text("")
    status = status_of("eval", str(folder), *IN_PARTS)
    lines = Path("asked").read_text().splitlines()
    return status, Counter(count for line in lines if (count := int(line.split()[0])) != 2)


def test_sets_measured_before_a_stop_are_kept(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is anything else kept: the results are those of an evaluation that nobody stopped."""
    (here / "judging.py").write_text(JUDGED)
    whole = here / "eval" / "all.json"
    assert asked(folder) == (0, Counter({1: 3, 4: 5, 3: 5}))
    uninterrupted = json.loads(whole.read_text())
    whole.unlink()

    (here / "fails").touch()
    status, found = asked(folder)
    assert (status, found[1], found[3]) == (1, 3, 0)
    assert not whole.exists()
    (here / "fails").unlink()
    capsys.readouterr()
    assert asked(folder) == (0, Counter({4: 5, 3: 5}))
    said = " ".join(capsys.readouterr().out.split())
    assert "already measured by a stopped evaluation: one (remove eval/.all.json.unfinished" in said
    again = json.loads(whole.read_text())
    for results in (uninterrupted, again):
        for one in results["sets"].values():
            del one["measured"]["seconds"]
    assert list(again["sets"]) == ["one", "two", "three"]
    assert again == uninterrupted
    left = whole.parent / ".all.json.unfinished"
    assert not left.exists()
    left.touch()  # as of an evaluation that was killed once it had its results
    assert asked(folder)[0] == 1
    assert not left.exists()
