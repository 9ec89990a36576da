"""Reads a model's tokenizer, and sets variables of its chat template, for a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rl_megatron.chat_templates import setting
from rl_megatron.config.run import TemplateVariable
from rl_megatron.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAVED = (
    "code of a model's folder is never run: save its tokenizer as tokenizer.json, and leave auto_map out of "
    "tokenizer_config.json (docs/weights.md, Kimi-K2's tokenizer)"
)


def read_tokenizer(folder: Path, variables: Mapping[str, TemplateVariable]) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, whose chat template has the ``variables`` wherever it is applied.

    Raises ConfigError if transformers cannot read it without code of the folder, or the template does not read a
    variable.
    """
    from transformers import AutoTokenizer

    if (folder / "tiktoken.model").is_file() and not (folder / "tokenizer.json").is_file():
        # transformers would split texts by another model's pattern
        raise ConfigError(f"{folder}: tiktoken.model does not say how texts are split, code beside it does; {_SAVED}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # its Rust part raises bare ones for torn files
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        advice = f"; {_SAVED}" if "trust_remote_code" in str(error) else ""
        raise ConfigError(f"{folder}: transformers cannot read its tokenizer: {said[0][:500]}{advice}") from error
    if not variables:
        return tokenizer
    template = tokenizer.chat_template
    if not isinstance(template, str):
        has = f"several chat templates ({', '.join(sorted(template))})" if template else "no chat template"
        advice = "give it one, as chat_template.jinja, or leave it out" if template else "leave it out"
        raise ConfigError(f"model.template_variables: the tokenizer of {folder} has {has}; {advice}")
    for name, value in variables.items():
        if not re.search(rf"\b{name}\b", template):
            raise ConfigError(
                f"model.template_variables.{name}={json.dumps(value)}: the chat template of {folder} does not read "
                f"{name}; leave it out, or write it as the template does"
            )
    tokenizer.chat_template = setting(variables, template)
    return tokenizer
