"""Mutants that a test has killed, as killed.jsonl records them: one a line, with the test that fails for it.

A mutant is known by its file and its place there (`draw.places`): the operator, the line's text, and where on it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import yaml

from tests.mutants.rooms import REPO

FILE = "tests/mutants/killed.jsonl"

Killed = dict[tuple[str, str], str]
"""(the file, the place) -> the test that kills the mutant."""


def killed_mutants(repository: Path = REPO) -> Killed:
    """What the file says; empty where there is none yet."""
    file = repository / FILE
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    each = [json.loads(line) for line in lines]
    return {(one["path"], one["place"]): one["test"] for one in each}


def write_killed(killed: Killed, repository: Path = REPO) -> None:
    """Writes the file, sorted, so that what a commit changes in it are the lines of its mutants."""
    lines = (
        json.dumps({"path": path, "place": place, "test": test}, ensure_ascii=False)
        for (path, place), test in sorted(killed.items())
    )
    (repository / FILE).write_text("".join(f"{line}\n" for line in lines), "utf-8")


def file_of(test: str) -> str:
    """The file of a test's name."""
    return test.split("::")[0]


def changed_tests(revision: str, repository: Path = REPO) -> set[str]:
    """The files of tests/ that differ from ``revision`` in the working tree, or that are only in one of both; 1 is the
    last commit's parent."""
    command = ["git", "diff", "--name-only", "--no-renames", "HEAD~1" if revision == "1" else revision, "--", "tests"]
    said = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout
    return set(said.splitlines())


# Mutants that no test can kill, as equivalents.yaml names them with their reasons. Imports nothing that draws them.
EQUIVALENTS = "tests/mutants/equivalents.yaml"

Equivalents = dict[tuple[str, str, str], str]
"""(the file, its changed lines before, and after, each stripped and joined by spaces) -> why both do the same."""


def named_equivalents() -> Equivalents:
    """What the file says. Raises ValueError for lines that their file does not have, or a mutant named twice."""
    out: Equivalents = {}
    for named in yaml.safe_load((REPO / EQUIVALENTS).read_text("utf-8")):
        path, line, mutant = named["path"], named["line"], named["mutant"]
        if line not in " ".join(x.strip() for x in (REPO / path).read_text("utf-8").splitlines()):
            raise ValueError(
                f"{EQUIVALENTS}: {path} has no line `{line}`; name the line that it has become, or leave it out"
            )
        if (path, line, mutant) in out:
            raise ValueError(f"{EQUIVALENTS}: {path} `{mutant}` is named twice; leave one out")
        out[path, line, mutant] = named["reason"]
    return out
