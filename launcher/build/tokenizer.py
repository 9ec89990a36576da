"""Reads a model's tokenizer, and sets variables of its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rl_megatron.config.run import TemplateVariable
from rl_megatron.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(folder: Path, variables: Mapping[str, TemplateVariable]) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, whose chat template has the ``variables`` wherever it is applied.

    Raises ConfigError if transformers cannot read it, or the template does not read a variable.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # its Rust part raises bare ones for torn files
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ConfigError(f"{folder}: transformers cannot read its tokenizer: {said[0][:500]}") from error
    if not variables:
        return tokenizer
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigError(f"model.template_variables: the tokenizer of {folder} has no chat template; leave it out")
    for name, value in variables.items():
        if not re.search(rf"\b{name}\b", template):
            raise ConfigError(
                f"model.template_variables.{name}={json.dumps(value)}: the chat template of {folder} does not read "
                f"{name}; leave it out, or write it as the template does"
            )
    tokenizer.chat_template = "".join(f"{{% set {name} = {_literal(v)} %}}" for name, v in variables.items()) + template
    return tokenizer


def _literal(value: TemplateVariable) -> str:
    """As Jinja reads it: numbers, true and false as in JSON; a text in quotes, without what Jinja would unescape."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
    return json.dumps(value)
