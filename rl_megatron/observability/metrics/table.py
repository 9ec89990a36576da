"""Defines a metric, joins the rows of all subjects into one table, and checks rows of a run by it.

A name that is not in `METRICS` is an error, so docs/metrics.md (rendered from the table) is always complete.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl_megatron.observability.files import JsonRow, JsonValue
from rl_megatron.observability.metrics.costs import COSTS
from rl_megatron.observability.metrics.curve import Curve
from rl_megatron.observability.metrics.environments import ENVIRONMENTS
from rl_megatron.observability.metrics.experts import EXPERTS
from rl_megatron.observability.metrics.learning import LEARNING
from rl_megatron.observability.metrics.sampling import SAMPLING

logger = logging.getLogger(__name__)


_TIMED_UNITS = ("s", "ms", "tokens/s", "rank", "s/s")
_TIMED = ("overlap/", "idle/", "checkpoint/", "memory/", "mfu/", "plane/", "endpoint/", "devices/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One documented metric, or a family with a ``<name>`` or ``<k>``. ``unit`` is "" for a ratio or count."""

    name: str
    unit: str
    meaning: str
    curve: Curve | None

    @property
    def is_timing(self) -> bool:
        """Whether it depends on the clock, on when the run saved, on devices and what ranks hold or on connections, and
        not on the data alone."""
        return self.unit in _TIMED_UNITS or self.name.startswith(_TIMED)


METRICS: Mapping[str, Documented] = {
    name: Documented(name=name, unit=unit, meaning=meaning, curve=replace(drawn[0], metric=name) if drawn else None)
    for name, unit, meaning, *drawn in (*LEARNING, *SAMPLING, *ENVIRONMENTS, *EXPERTS, *COSTS)
}

_FAMILIES = [
    (re.compile(re.escape(name).replace("<name>", "[a-z][a-z0-9_]*").replace("<k>", "[1-9][0-9]*")), metric)
    for name, metric in METRICS.items()
    if "<" in name
]

STEPS = ("rl", "sft", "dpo", "reward_model")
"""The phases of rows of a job's steps."""
PHASES = ("warm_start", *STEPS, "eval")

PHASE_SECONDS = (
    "rollout",
    "logprobs",
    "reference",
    "values",
    "train",
    "critic",
    "weights",
    "eval",
    "checkpoint",
)
"""The parts of ``seconds/step``, in the order in which a step runs them."""


def documented(name: str) -> Documented | None:
    """The table's row for this name; for ``reward/part/style`` it is ``reward/part/<name>``."""
    if "<" in name:
        return None
    return METRICS.get(name) or next((metric for family, metric in _FAMILIES if family.fullmatch(name)), None)


def deterministic(row: JsonRow) -> dict[str, JsonValue]:
    """The row without metrics that depend on the clock: equal runs give rows equal to the bit."""
    return {name: value for name, value in row.items() if not _row_of(name).is_timing}


def render_docs() -> str:
    """docs/metrics.md, from the table."""
    head = f"""# Metrics

`runs/<name>/metrics.jsonl` holds one JSON object per line: one for each recorded supervised step of the warm start,
then one for each step of the job. Names are stable. A value that was NaN or infinite is `null`. TensorBoard tags and
W&B keys are the same names, prefixed by `warm_start/` in rows of the warm start. Log-probs, entropies and KLs are in
nats. Metrics in {", ".join(_TIMED_UNITS)}, and those of {", ".join(f"`{name}`" for name in _TIMED)}
depend on the clock, on when the run saved, on devices and what ranks hold, or on connections. Equal runs have equal
values of all others, to the bit, unless servers sample ahead: then the order in which they answer changes them.

Means and shares of tokens, sequences and pairs are over all minibatches of the step together, unless the meaning names
minibatches.

A metric that a run cannot have is absent, not 0: those "with max_staleness" if train.max_staleness is 0, those of
servers if the learner's processes sample.

| name | unit | meaning |
|---|---|---|
"""
    rows = ((m.name, m.unit or "-", m.meaning.replace("|", r"\|")) for m in METRICS.values())
    return head + "".join(f"| `{name}` | {unit} | {meaning} |\n" for name, unit, meaning in rows)


def checked_row(row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Check a row and make it ready for JSON: NaN and infinity become None, are counted and logged.

    Raises ValueError for a name that is not in the table and for a row without ``step`` and ``phase``.
    """
    out: dict[str, JsonValue] = {}
    bad = []
    for name, value in row.items():
        _row_of(name)
        if isinstance(value, float) and not math.isfinite(value):
            bad.append(f"{name}={value}")
            out[name] = None
        else:
            out[name] = value
    if type(out.get("step")) is not int or out.get("phase") not in PHASES:
        raise ValueError(f"a metrics row needs an integer step and a phase of {PHASES}; got {list(row)}")
    if bad:
        logger.warning("step %s (%s): not finite: %s", out["step"], out["phase"], ", ".join(bad))
        out["metrics/non_finite"] = len(bad)
    return out


def _row_of(name: str) -> Documented:
    metric = documented(name)
    if metric is None:
        near = difflib.get_close_matches(name, METRICS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"metric {name!r} is not documented{hint} Add a new metric to a file of observability/metrics")
    return metric


if __name__ == "__main__":
    print(render_docs(), end="")
