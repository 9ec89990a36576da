"""The paths and tests that documents name exist, and the site shows what their comments say."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

from launcher.preflight.checks import CHECKS
from tests.documents import blocks

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPO / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
DOCUMENTS += [*sorted((REPO / "docs").rglob("*.md")), REPO / "slurm" / "README.md"]
OTHERS = ("examples/", "verl/", "areal/", "trl/", "slime/", "src/transformers/")  # files of peers
EXAMPLES = {"my_rewards.py", "utils.py"}  # a reader's own; one that must not be


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True)
    return [f"/{path}" for path in listed.stdout.splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_tests_that_a_document_names_are_there(document: Path) -> None:
    """As ``unit/test_extensions.py::test_a_transport``."""
    named = re.findall(r"`([\w./-]+\.py)::(\w+)`", document.read_text(encoding="utf-8"))
    files = {path: REPO / "tests" / path for path, _ in named}
    texts = {path: file.read_text(encoding="utf-8") if file.is_file() else "" for path, file in files.items()}
    there = {path: set(re.findall(r"^(?:async )?def (\w+)\(", text, re.M)) for path, text in texts.items()}
    assert [f"{path}::{test}" for path, test in named if test not in there[path]] == []


def test_the_page_of_running_has_a_row_for_each_check_before_a_run() -> None:
    page = (REPO / "docs" / "running.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| check \|.*\n\|---.*\n((?:\|.*\n)*)", page, re.M)
    assert re.findall(r"^\| ([a-z ]+) \|", table, re.M) == list(CHECKS)


def test_every_page_is_in_the_sites_navigation_once() -> None:
    """``make docs`` says so too, later."""
    listed = re.findall(r"^ +- (\S+\.md)$", (REPO / "docs" / "site.yaml").read_text(encoding="utf-8"), re.M)
    pages = [str(path.relative_to(REPO)) for path in [*DOCUMENTS, REPO / "CHANGELOG.md"]]
    assert sorted(listed) == sorted(pages)


def test_the_site_shows_whether_each_block_of_commands_is_run() -> None:
    (name,) = re.findall(r"^hooks: \[(\S+)\]", (REPO / "docs" / "site.yaml").read_text(encoding="utf-8"), re.M)
    shown = runpy.run_path(str(REPO / "docs" / name))["on_page_markdown"]
    assert shown("<!-- run -->\n```sh\n<!-- run by tests/x_y.py -->\n<!-- a note -->\n", page=None).splitlines() == [
        *("<small>Run by a test</small>", "", "```sh"),
        *(r"<small>Run by tests/x\_y.py</small>", "", "<!-- a note -->"),
    ]
    assert shown("  <!-- not run: wants a_b* & more -->\n") == (
        "  <small>Not run here: wants a\\_b\\* &amp; more</small>\n\n"
    )
    for document in DOCUMENTS:
        marks = [block.mark for block in blocks(document, "sh", "bash", "shell", "console")]
        assert shown(document.read_text(encoding="utf-8")).count("<small>") == len(marks), document


def test_the_versions_that_are_supported_are_those_that_are_asked_for() -> None:
    """By pyproject.toml and constraints.txt; each row of the table says until when."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (REPO / "constraints.txt").read_text(), re.M))
    asked = {re.split(r"[>=<]", line)[0]: re.findall(r"\d[\d.]*", line) for line in project["dependencies"]}
    text = (REPO / "docs" / "install.md").read_text(encoding="utf-8").partition("### For how long")[2]
    rows = dict(re.findall(r"^\| ([\w ,-]+) \| ([^|]+) \| [^|]{20,} \|$", text, re.M))
    assert rows["this project"] == project["version"].rpartition(".")[0]
    assert rows["Python"].split(", ")[0] == project["requires-python"].removeprefix(">=")
    least, beyond = asked["torch"]
    assert rows["torch"].split(", ")[0] == least == pinned["torch"].rpartition(".")[0]
    assert f"{rows['torch'].split(', ')[-1]}.99" < beyond
    assert rows["megatron-core"].split(", ") == asked["megatron-core"]
    assert "vLLM, SGLang" in rows


def test_each_feature_beside_other_frameworks_names_a_test_that_a_command_runs() -> None:
    page = (REPO / "docs" / "peers.md").read_text(encoding="utf-8")
    table, notes = page.partition("## What they have")[0], page.partition("\n[^")[2]
    tests = dict(re.findall(r"^\[?\^?(\w+)\]: (.*?)(?=^\[\^|\Z)", notes, re.M | re.S))
    rows = re.findall(r"^\| (?!here)([^|]+) \| ([^|]+) \|", table.replace("| | here", ""), re.M)
    assert len(rows) > 20
    linked = {feature: re.findall(r"\[\^(\w+)\]", cell) for feature, cell in rows}
    assert [feature for feature, names in linked.items() if not names] == []
    named = {name for names in linked.values() for name in names}
    assert [name for name in sorted(named) if not re.search(r"`[\w/]+\.py::\w+`", tests[name])] == []


def test_the_extras_that_install_md_lists_are_those_of_the_wheel() -> None:
    """Others are for those who work on this project."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (REPO / "docs" / "install.md").read_text(encoding="utf-8").partition("| extra | for |")[2]
    listed = re.findall(r"^\| `(\w+)` \|", text.partition("\n\n")[0], re.M)
    assert {*listed} == {*project["optional-dependencies"]} - {"test", "dev", "mutants"}
    assert {"ray", "wandb", "vllm", "sglang", "te", "docs"} <= {*listed}


def test_the_readme_counts_the_rows_of_algorithms() -> None:
    """And docs/algorithms.md has a line for each."""
    rows = {path.stem for path in (REPO / "conf" / "algorithm").glob("*.yaml")}
    (counted,) = re.findall(r"\*\*(\d+) algorithms as rows", (REPO / "README.md").read_text())
    named = set(
        re.findall(
            r"^\| (\w+) \|.*\| [^|]*(?:arXiv:|Williams)[^|]*\|$", (REPO / "docs/algorithms.md").read_text(), re.M
        )
    )
    assert (int(counted), named) == (len(rows), rows)
