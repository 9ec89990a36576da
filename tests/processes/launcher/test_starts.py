"""starts.jsonl: which code and which versions each start of a run had, on its page and beside those of other runs."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest

import rl_megatron
from launcher.runs.resume import record_start
from rl_megatron.observability.report import write_report
from tests.unit.observability.report_pages import Page, a_run


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    return subprocess.run(["git", *who, "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout


def an_environment(folder: Path, **versions: str) -> Path:
    """Its interpreter's path."""
    for name, version in versions.items():
        info = folder / f"lib/python3.12/site-packages/{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin/python"


def test_each_start_is_recorded_and_what_it_changed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracles are git's own words and importlib.metadata's."""
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    run.mkdir()
    (mine / "rewards.py").write_text("A = 1\n")
    git(mine, "init", "-q")
    git(mine, "add", ".")
    git(mine, "commit", "-qm", "one")
    monkeypatch.chdir(mine)
    assert record_start(run, step=0, engine=an_environment(tmp_path / "old", vllm="0.32.0")) == []
    (mine / "rewards.py").write_text("A = 2\n")
    assert record_start(run, step=40, engine=an_environment(tmp_path / "new", vllm="0.33.0", torch="2.15.0")) == [
        f"code/here is {(commit := git(mine, 'rev-parse', 'HEAD').strip())}, with changes; this run's last start, from "
        f"step 0, had {commit}",
        "engine/vllm is 0.33.0; this run's last start, from step 0, had 0.32.0",
        "engine/torch is 2.15.0; this run's last start, from step 0, had none",
    ]
    with (run / "starts.jsonl").open("a") as file:
        file.write('{"step": 4')  # torn by a kill
    monkeypatch.chdir(tmp_path)
    assert [line.partition(";")[0] for line in record_start(run, step=40, engine=None)] == [
        "code/here is not there",
        "engine/torch is not there",
        "engine/vllm is not there",
    ]
    rows = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 40, 40]
    assert {row["torch"] for row in rows} == {importlib.metadata.version("torch")}


def test_an_installed_package_is_not_of_the_commit_around_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkout it is."""
    own, here = tmp_path / "mine/rl_megatron", tmp_path / "elsewhere"
    for folder in (own, here):
        folder.mkdir(parents=True)
    (own / "__init__.py").touch()
    (own.parent / "rewards.py").touch()
    monkeypatch.setattr(rl_megatron, "__file__", str(own / "__init__.py"))
    monkeypatch.chdir(here)
    git(own.parent, "init", "-q")
    for added, said in (("rewards.py", set[str]()), ("rl_megatron", {"code/rl_megatron"})):
        git(own.parent, "add", added)
        git(own.parent, "commit", "-qm", "one")
        record_start(tmp_path, step=0, engine=Path("python"))
        row = json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[-1])
        assert {name for name in row if name.startswith("code/")} == said


def test_a_damaged_record_is_named_and_ends_neither_the_start_nor_the_page(tmp_path: Path) -> None:
    """In the middle, as a last line, torn too; nothing that a resume needs is in the file."""
    path, last = (run := a_run(tmp_path / "a")) / "starts.jsonl", '{"step": 1, "torch": "2.0"}'
    for before, lines in (
        (f"x\n\x00\n[]\n{last}\n", (1, 2, 3)),
        (f"{last}\nx\n", (2,)),
        (f'{last}\n\n{{"st', (2,)),
        ("x", ()),
    ):
        path.write_text(before)
        said = record_start(run, step=2, engine=None)
        damaged = [line for line in said if line.startswith(f"{path}:")]
        assert [int(line.split(":")[1]) for line in damaged] == [*lines]
        assert all(line.endswith("; the run goes on without it") for line in damaged)
        assert any("torch" in line and "from step 1, had 2.0" in line for line in said) == (last in before)
        assert path.read_text().splitlines()[:-1] == before[: before.rfind("\n") + 1].splitlines()
        assert json.loads(path.read_text().splitlines()[-1])["step"] == 2
    path.write_text(f"{last}\nx\n")
    left_out = list[str]()
    assert "torch" in Page(write_report([run], tmp_path / "one.html", left_out.append)).text
    assert [f"{path}:2: not JSON" in why for why in left_out] == [True]


def test_a_page_shows_versions_and_how_those_of_runs_differ(tmp_path: Path) -> None:
    one, other, older = (a_run(tmp_path / name) for name in ("one", "other", "older"))
    (one / "starts.jsonl").write_text(
        '{"step": 0, "time": "t", "torch": "2.13.0", "numpy": "2.4"}\n'
        '{"step": 9, "time": "u", "torch": "2.15.0", "numpy": "2.4"}\n'
        '{"step": 9, "time": "v", "torch": "2.15.0", "ray": "2.60.0"}\n'
    )
    (other / "starts.jsonl").write_text('{"step": 0, "time": "t", "torch": "2.13.0", "numpy": "2.4"}\n')
    text = " ".join(Page(write_report([one], tmp_path / "one.html")).text.split())
    assert "torch 2.13.0; from step 9: 2.15.0" in text.replace("torch2", "torch 2")
    assert "numpy 2.4; from step 9: none" in text.replace("numpy2", "numpy 2")
    assert "ray none; from step 9: 2.60.0" in text.replace("raynone", "ray none")
    text = Page(write_report([one, other, older], tmp_path / "both.html")).text
    assert (
        "Not made with the same code and packages: torch 2.13.0; from step 9: 2.15.0, 2.13.0; numpy 2.4; from step 9: "
        "none, 2.4; ray none; from step 9: 2.60.0, none."
    ) in text
    assert "Not made with" not in Page(write_report([other, older], tmp_path / "same.html")).text
