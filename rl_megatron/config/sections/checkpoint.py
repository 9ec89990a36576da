"""The ``checkpoint`` section: when a run saves itself, and what it keeps."""

from __future__ import annotations

import re
from typing import Literal

from rl_megatron.section import NonNegative, Positive, Section

CHECKPOINT = re.compile(r"(warm_start|step)_(\d{6,})")
"""The names of checkpoints in a run's ``checkpoints`` folder, whose other files are the user's."""


class CheckpointSection(Section):
    """Checkpoints of everything that a resume needs. ``every=0``: only after a warm start and after the last step."""

    every: NonNegative = 25
    """Steps between checkpoints."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every: Positive | None = None
    """Steps between checkpoints that are kept besides, for good: a multiple of ``every``. null: none is."""
    keep_best: NonNegative = 0
    """Number of checkpoints to keep besides whose ``eval/accuracy`` is the highest, of equal ones the later; ``every``
    is then a multiple of eval.every. After a resume that measures it otherwise, as on another set, so many of each way
    of measuring are kept."""
    async_save: bool = True
    """Whether training goes on while a checkpoint is written: it waits until the state is copied in the host's memory,
    which a rank keeps for the next one. A kill leaves the checkpoint before; a stop, the run's end and the next
    checkpoint wait for the one in hand. false: training waits until it is written, and no copy is held."""
    in_flight: Literal["tokens", "prompts"] = "tokens"
    """What a checkpoint holds of completions that servers are sampling, with train.max_staleness above 0. tokens:
    servers are interrupted and go on, and a resume continues each completion from its tokens; prompts: servers are left
    alone, and a resume samples these completions again from their prompts."""
