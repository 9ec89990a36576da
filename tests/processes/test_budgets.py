"""Nothing grows past its budget, and a budget follows what shrinks."""

from __future__ import annotations

import yaml

from tests.budgets import FILE, counts


def test_nothing_grows_past_its_budget() -> None:
    budgets, now = yaml.safe_load(FILE.read_text()), counts()
    assert budgets.keys() == now.keys()
    grown = {name: f"{now[name]}, budget {budgets[name]}" for name in now if now[name] > budgets[name]}
    assert grown == {}, "remove as much, or raise the budget in tests/budgets.yaml by a decision in docs/adr"
