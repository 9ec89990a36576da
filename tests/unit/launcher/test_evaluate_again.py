"""rl-megatron eval after one that was stopped: what it had measured is kept, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from launcher.build.model import starting_folder
from rl_megatron.config.io import load_config
from tests.unit.launcher.commands import status_of

JUDGE = """
from pathlib import Path

FAILS = Path("fails")


def judge(prompt, completions, texts):
    with open("asked", "a") as file:
        file.write(f"{len(completions)} {prompt.id}\\n")
    if FAILS.exists() and len(completions) == 4:
        raise ValueError("no judge today")
    return [float(sum(map(int, one.token_ids)) % 2 == 0) for one in completions]
"""
KEYS = (
    *("data.num_eval=5", "rollout.max_new_tokens=4", "reward.function=judging:judge", "reward.on_error=fail"),
    *("eval.sets.one.limit=3", "eval.sets.two.samples=4", "eval.sets.three.samples=3"),
    *("eval.sets.two.temperature=1.0", "eval.sets.three.temperature=1.0", "--name", "all"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return starting_folder(load_config("tiny_cpu", [f"model.cache_dir={tmp_path_factory.mktemp('models')}"]))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "judging.py").write_text(JUDGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def asked(folder: Path, *more: str) -> tuple[int, Counter[int]]:
    """The exit status, and how many prompts were judged, by how many completions each had; the check before has two."""
    Path("asked").write_text("")
    status = status_of("eval", str(folder), *KEYS, *more)
    lines = Path("asked").read_text().splitlines()
    return status, Counter(count for line in lines if (count := int(line.split()[0])) != 2)


def test_sets_that_were_measured_before_a_stop_are_not_measured_again(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "measured already, by an evaluation that was stopped: one (remove eval/.all.json.unfinished" in said
    again = json.loads(whole.read_text())
    for results in (uninterrupted, again):
        for one in results["sets"].values():
            del one["measured"]["seconds"]
    assert list(again["sets"]) == ["one", "two", "three"]
    assert again == uninterrupted
    assert [path.name for path in whole.parent.glob("*all.json*")].count(".all.json.unfinished") == 0
