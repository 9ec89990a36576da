"""The ``data`` section: generated problems, or your own files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rl_megatron.section import Positive, Section


class ArithmeticData(Section):
    """Generated sums such as ``37+08=`` with the answer ``540``, lowest digit first; no problem is in both splits."""

    instead: ClassVar[str] = "data.type=arithmetic makes its own problems; add data=gsm8k to read files"
    type: Literal["arithmetic"] = "arithmetic"
    digits: Annotated[int, Field(ge=1, le=6)] = 2
    """Digits of the largest addend."""
    num_eval: Positive = 256
    """Held-out problems."""


class FileData(Section):
    """Your own problems: .jsonl or .parquet files with one problem a row, in the fields that these keys name."""

    instead: ClassVar[str] = "data.type=files reads problems from files; add data=arithmetic to generate sums"
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
    """Field of the training file that holds a worse answer: algorithm=dpo then trains on these pairs, and engines
    sample only for evaluations. null: the file has none."""
    prompt_template: str = "{prompt}"
    """Text of a prompt, in which the problem replaces {prompt}."""
    chat_template: bool = False
    """Whether to wrap the prompt as a user turn of the tokenizer's chat template."""
    max_eval: Positive | None = None
    """Number of held-out problems to use, the first of the file; null uses all."""
