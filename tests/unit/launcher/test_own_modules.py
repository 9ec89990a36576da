"""Preflight looks for packages of the user's own; those of layers are in tests/unit/learner/test_own_family.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.preflight import own_modules
from launcher.preflight.checks import preflight
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config


def test_advantages_and_pair_losses_of_packages_that_are_not_there_are_found_too() -> None:
    of_rows = ("algorithm.advantage_mean", "algorithm.preference.loss")
    for recipe, key in (*(("tiny_cpu", key) for key in of_rows), ("dpo_tiny", "dpo.loss")):
        row = ["algorithm=dpo"] if "preference" in key else []
        said = preflight(load_config(recipe, [*row, f"{key}=nowhere:mine"])).texts("problem")
        assert f"{key}=nowhere:mine: no module 'nowhere'; install it or put its folder on PYTHONPATH" in said


def test_an_objective_of_a_package_that_is_not_there_is_found_before_ranks_start() -> None:
    keys = ("algorithm=gmpo", "algorithm.objective=nowhere.of:mine")
    (found,) = preflight(load_config("tiny_cpu", [*keys])).texts("problem")
    assert (
        found == "algorithm.objective=nowhere.of:mine: no module 'nowhere'; install it or put its folder on PYTHONPATH"
    )
    there = preflight(load_config("tiny_cpu", ["algorithm=gmpo", "algorithm.objective=tests.shares:share_of"]))
    assert there.texts("problem") == []
    assert "algorithm.objective=tests.shares:share_of, which ranks import" in there.texts("unchecked")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("its.layers:norms", "'norms' of its.layers is not there; did you mean 'norm'?"),
        ("its.layer:norm", "no module 'its.layer'; install it or put its folder on PYTHONPATH"),
        ("its.layers.deep:norm", "no module 'its.layers.deep'; install it or put its folder on PYTHONPATH"),
        ("its:norm", "'norm' of its is not there"),
        ("its.layers:norm", None),
        ("its.layers:other", None),
        ("its.layers:given", None),
        ("its.layers:late", None),
        ("its.all:anything", None),
        ("its.made:anything", None),
        ("its.broken:anything", None),  # as ranks say, with the line
        ("its.plain.deep.mod:norm", None),
        ("its.plain.deep.mod:norms", "'norms' of its.plain.deep.mod is not there; did you mean 'norm'?"),
        ("its.plain.mod:norm", "no module 'its.plain.mod'; install it or put its folder on PYTHONPATH"),
        ("its.updated:anything", None),
        ("its.matched:first", None),
        ("its.matched:rest", None),
        ("its.matched:others", None),
        ("its.matched:anything", "'anything' of its.matched is not there"),
        ("its.moved.elsewhere:anything", None),
        ("its.registers.made:anything", None),
        ("os.path:join", None),
        ("plainly.deep.mod:norm", None),
    ],
)
def test_a_name_that_is_not_in_its_module_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, said: str | None
) -> None:
    texts = {
        "__init__": "raise SystemExit('imported')",
        "layers": "from a import b as other\nif other:\n    given = late = 1\ndef norm(shape, layer): ...",
        "all": "from a import *",
        "made": "globals()['any' + 'thing'] = 1",
        "broken": "def (",
        "plain/deep/mod": "def norm(shape, layer): ...",
        "../plainly/deep/mod": "def norm(shape, layer): ...",
        "updated": "import sys\nsys.modules[__name__].__dict__.update(anything=1)",
        "matched": "match a:\n    case [first, *rest]: ...\n    case {'b': 1, **others}: ...",
        "moved/__init__": "__path__ = ['/elsewhere']",
        "registers": "import sys\nsys.modules[__name__ + '.made'] = sys",
    }
    (tmp_path / "its").mkdir()
    for name, text in texts.items():
        file = tmp_path / "its" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = own_modules.check(Subject(load_config("tiny_cpu", [f"learner.layers={own}"]), False))
    wanted = ("problem", f"learner.layers={own}: {said}") if said else None
    assert [(one.kind, one.text) for one in found] == [
        wanted or ("unchecked", f"learner.layers={own}, which ranks import")
    ]
