"""What a sequence classifier reads of a prompt and a completion: tokens of one text, or of two turns of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.chat_templates import TEMPLATE_ERRORS, begun_once, bounded_rendering
from rl_megatron.config.sections.reward import RewardModelSection
from rl_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierTexts:
    """Tokens by the classifier's own tokenizer, of which a text keeps its last ``max_tokens``."""

    tokenizer: Any
    chat_template: bool
    max_tokens: int

    def rows(self, prompt: str, texts: Sequence[str]) -> list[list[int]]:
        """Of the prompt with each of the texts of its completions."""
        rows: list[list[int]] = self.tokenizer(
            [self._whole(prompt, text) for text in texts],
            add_special_tokens=not self.chat_template,  # the template writes its own
            truncation=True,
            max_length=self.max_tokens,
        )["input_ids"]
        return [list(begun_once(row, self.tokenizer.bos_token_id)) for row in rows]  # the data's template may write it

    def _whole(self, prompt: str, text: str) -> str:
        if not self.chat_template:
            return prompt + text
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        with bounded_rendering():
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False))


def classifier_texts(folder: Path, section: RewardModelSection, config: Any, where: str) -> ClassifierTexts:
    """Reads the tokenizer of a classifier's folder; ``config`` is transformers' of it. Raises ConfigError, which begins
    with ``where``."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, truncation_side="left", local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if section.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"reward.model.chat_template=true, but the tokenizer of {folder} has no chat template; set it to false"
        )
    most = _max_tokens(config, tokenizer, section.max_tokens, where)
    texts = ClassifierTexts(tokenizer=tokenizer, chat_template=section.chat_template, max_tokens=most)
    try:
        texts.rows("1+1?", ["2"])
    except TEMPLATE_ERRORS as error:
        raise ConfigError(
            f"{where}: its chat template fails at a question and an answer: {type(error).__name__}: {error!s:.500}; "
            f"give {folder} a chat_template.jinja that shows both, or set reward.model.chat_template=false"
        ) from error
    return texts


def _max_tokens(config: Any, tokenizer: Any, wanted: int | None, where: str) -> int:
    known = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]  # either may be smaller
    most = min(int(limit) for limit in known if limit is not None)
    if wanted is not None and wanted > most:
        raise ConfigError(f"reward.model.max_tokens={wanted}: {where} reads at most {most}; set that, or null")
    return wanted or most
