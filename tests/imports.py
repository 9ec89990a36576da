"""The modules that test ranks and runs import before they are forked (tests/forks.py)."""

from __future__ import annotations

import gc
import warnings

gc.disable()  # imports make many objects, and no garbage
import pytest  # noqa: E402, F401  as every test file does
import torch._dynamo  # noqa: E402, F401  as an optimizer's first step does

warnings.filterwarnings("ignore", message=r"(Transformer Engine|Apex).* not installed")

import typer  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402, F401  as a controller does

import launcher.__main__  # noqa: E402
import launcher.build.jobs  # noqa: E402
import launcher.preflight.checks  # noqa: E402
import launcher.worker.process  # noqa: E402
import rl_megatron.engines.local.engine  # noqa: E402
import rl_megatron.engines.local.server  # noqa: E402
import rl_megatron.learner.megatron  # noqa: E402
import rl_megatron.weights.routes.group  # noqa: E402, F401
from rl_megatron.observability import report  # noqa: E402

list(typer.main.get_command(launcher.__main__.app).commands.values())  # imports the module of each
report.template()  # compiled: each run writes its report

gc.enable()
gc.freeze()  # megatron collects garbage several times at each save and load, and looks at all that is imported
