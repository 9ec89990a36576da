"""What the formulas of `time` do not know, fitted to published runs by bench/step_time.py (docs/scaling.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the formulas do not know: shares of peaks, and costs that follow from no data sheet.

    ``gemm`` and ``gemm_fp8``: shares of the peak of large products; of ``tile`` rows or columns a product has half of
    that. ``power``: exponent of a GPU's watts per TFLOP/s, as Blackwell's clocks fall under load. ``attention``: share
    of the peak. ``passes``: reads or writes of a layer's hidden states between products. ``links``: share of NVLink's
    and the network's rates; ``plain``: of those, by an all-to-all without kernels of its own. ``hidden``: share of
    messages that overlapping hides. ``host``: seconds to launch one layer's forward pass. ``imbalance``: rows of the
    fullest experts over the mean, with natural routing. ``age``: share of time a month that an older stack takes more.
    ``fixed``: seconds of a step beside all others.
    """

    gemm: float
    gemm_fp8: float
    tile: float
    power: float
    attention: float
    passes: float
    links: float
    plain: float
    hidden: float
    host: float
    imbalance: float
    age: float
    fixed: float


PRIOR = Constants(
    gemm=0.75,
    gemm_fp8=0.65,
    tile=100.0,
    power=0.5,
    attention=0.55,
    passes=15.0,
    links=0.6,
    plain=0.6,
    hidden=0.6,
    host=8e-4,
    imbalance=1.15,
    age=0.015,
    fixed=0.3,
)
"""Physical values, towards which the fit is drawn; those that it leaves alone stay as they are here."""
FITTED = replace(PRIOR, gemm=0.648, gemm_fp8=0.842, attention=0.589, links=0.659, imbalance=1.156, fixed=0.328)
"""Constants fitted to bench/published_runs.json by bench/step_time.py, which free six of them."""
RANGE = (0.75, 1.3)
"""Times the predicted rate of training between which a measured one is expected (docs/scaling.md)."""
MEMORY = 0.8  # share of a GPU's memory rate that kernels reach; not fitted: ``passes`` would take it back
