"""The chart of a metric in reports, which stands in the metric's row."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

STEPS = ("rl", "sft", "dpo", "reward_model")
"""The phases of rows of a job's steps."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart of its row's metric, with a band (+- ``spread``; ``band`` names it) or a peak.

    A metric with ``<name>``, or with ``<k>`` too, makes a chart for each that a run has recorded.
    """

    section: str  # of the report, whose charts are in the order of the rows
    title: str
    _: KW_ONLY
    metric: str = ""  # the table sets it to the row's
    band: str = ""
    spread: str | None = None
    peak: str | None = None
    limits: tuple[float, float] | None = None
    warm_start: bool = False  # the warm start's rows come first, shaded
    hide_constant: bool = False  # no chart for a constant metric
    compared: bool = False  # only if several runs are compared
    first: bool = False  # before all others on the page of one run


MetricTuples = tuple[tuple[str, str, str] | tuple[str, str, str, Curve], ...]
"""Name, unit and meaning of each metric of a subject, and its chart unless another's shows it, or none does."""
