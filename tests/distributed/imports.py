"""The modules that test ranks import before they are forked (see ranks.py)."""

from __future__ import annotations

import gc
import warnings

import pytest  # noqa: F401  as every test file does
import torch._dynamo  # noqa: F401  as an optimizer's first step does

warnings.filterwarnings("ignore", message=r"(Transformer Engine|Apex).* not installed")

import rl_megatron.learner.megatron  # noqa: E402, F401

gc.collect()
gc.freeze()  # megatron collects garbage several times at each save and load, and looks at all that is imported
