"""The ``data`` section: generated problems, or your own files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rl_megatron.section import Positive, Section


class ArithmeticData(Section):
    """Made on the spot: sums ``37+08=`` with the answer ``540``, lowest digit first, split by problem."""

    instead: ClassVar[str] = "data.type=arithmetic makes its own problems; add data=gsm8k to read files"
    type: Literal["arithmetic"] = "arithmetic"
    digits: Annotated[int, Field(ge=1, le=6)] = 2
    """Digits of the largest addend."""
    num_eval: Positive = 256
    """Held-out problems."""


class FileData(Section):
    """Your own problems: .jsonl or .parquet files, one object a row, field names by config."""

    instead: ClassVar[str] = "data.type=files reads problems from files; add data=arithmetic to have sums made"
    type: Literal["files"]
    train: Path
    """Problems to train on."""
    eval: Path
    """Held-out problems."""
    prompt_field: str = "question"
    """Field that holds the problem, as text."""
    answer_field: str = "answer"
    """Field that holds the correct answer."""
    rejected_field: str | None = None
    """Field of the training file that holds a worse answer, when given: algorithm=dpo then trains on these pairs alone,
    and nothing is sampled but evaluations."""
    prompt_template: str = "{prompt}"
    """Text around the problem, which replaces {prompt}."""
    chat_template: bool = False
    """Whether to wrap the prompt as a user turn of the tokenizer's chat template."""
    max_eval: Positive | None = None
    """Use only the first so many held-out problems; null uses all."""
