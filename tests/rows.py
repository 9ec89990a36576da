"""Losses of rows written as keys of the ``algorithm`` section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rl_megatron.algorithms.auxiliary import PreferenceLoss
from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection, PreferenceSection

ROWS = Path(__file__).parents[1] / "conf" / "algorithm"
NAMES = sorted(path.stem for path in ROWS.glob("*.yaml"))
PAIR_ROWS = [name for name in NAMES if "\npreference:" in (ROWS / f"{name}.yaml").read_text()]
"""Rows that train on pairs."""
WITH_TURNS = ("gigpo",)
"""Rows that want an environment."""
BESIDE: Mapping[str, tuple[str, ...]] = {
    "gdpo": ("reward.function=exact_match", "reward.parts.exact_match=1", "reward.parts.length=0.5")
}
"""Keys without which a row is refused: GDPO compares the parts of a reward."""


def config_of(name: str, *keys: str) -> RunConfig:
    """A small run's, by the row ``algorithm=name``."""
    base = "calculator" if name in WITH_TURNS else "tiny_cpu"
    return load_config(base, [f"algorithm={name}", *BESIDE.get(name, ()), *keys])


def policy_loss(*, kl_coefficient: float = 0.0, max_new_tokens: int = 1, **row: object) -> PolicyLoss:
    section = AlgorithmSection.model_validate(row)
    return PolicyLoss(row=section, kl_coefficient=kl_coefficient, max_new_tokens=max_new_tokens)


def changed(loss: PolicyLoss, **row: object) -> PolicyLoss:
    """The same loss with other choices."""
    given = loss.row.model_dump(exclude_defaults=True) | row
    return policy_loss(kl_coefficient=loss.kl_coefficient, max_new_tokens=loss.max_new_tokens, **given)


def pair_loss(beta: float, **keys: object) -> PreferenceLoss:
    return PreferenceLoss(row=PreferenceSection.model_validate(keys), beta=beta)
