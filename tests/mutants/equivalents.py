"""Mutants that no test can kill, as equivalents.yaml names them with their reasons. Imports nothing that draws them."""

from __future__ import annotations

from pathlib import Path

import yaml

REPO = Path(__file__).parents[2]
FILE = "tests/mutants/equivalents.yaml"

Equivalents = dict[tuple[str, str, str], str]
"""(the file, its changed lines before, and after, each stripped and joined by spaces) -> why both do the same."""


def named_equivalents() -> Equivalents:
    """What the file says. Raises ValueError for lines that their file does not have, or a mutant named twice."""
    out: Equivalents = {}
    for named in yaml.safe_load((REPO / FILE).read_text("utf-8")):
        path, line, mutant = named["path"], named["line"], named["mutant"]
        if line not in " ".join(x.strip() for x in (REPO / path).read_text("utf-8").splitlines()):
            raise ValueError(f"{FILE}: {path} has no line `{line}`; name the line that it has become, or leave it out")
        if (path, line, mutant) in out:
            raise ValueError(f"{FILE}: {path} `{mutant}` is named twice; leave one out")
        out[path, line, mutant] = named["reason"]
    return out
