"""A reward model: a Hugging Face sequence classifier that runs in batches in the controller process.

A sequence classifier reads a prompt and a completion as tokens of one text, or of two turns of a chat.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_megatron.chat_templates import TemplateFailed, strip_second_bos, template_texts
from rl_megatron.config.sections.reward import RewardModelSection
from rl_megatron.errors import ConfigError, download_hint
from rl_megatron.rewards.scoring import queued_slot
from rl_megatron.rewards.threads import run_in_daemon_thread
from rl_megatron.types import Completion, Prompt, RewardResult

if TYPE_CHECKING:
    from torch import Tensor

_BATCH_SIZE = 32  # completions in a forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierTexts:
    """The classifier's own tokenizer, which keeps the last ``max_tokens`` tokens of a text."""

    tokenizer: Any
    chat_template: bool
    max_tokens: int

    def rows(self, prompt: str, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of the prompt with each of the texts of its completions."""
        rows: list[list[int]] = self.tokenizer(
            self._wholes(prompt, texts),
            add_special_tokens=not self.chat_template,  # the template writes its own
            truncation=True,
            max_length=self.max_tokens,
        )["input_ids"]
        return [
            list(strip_second_bos(row, self.tokenizer.bos_token_id)) for row in rows
        ]  # the data's template may write it

    def _wholes(self, prompt: str, texts: Sequence[str]) -> list[str]:
        if not self.chat_template:
            return [prompt + text for text in texts]
        asked = {"role": "user", "content": prompt}
        chats = [[asked, {"role": "assistant", "content": text}] for text in texts]
        wholes = template_texts(self.tokenizer, chats, opened=False)
        for one in wholes:
            if isinstance(one, TemplateFailed):
                raise one
        return list(map(str, wholes))


def classifier_texts(folder: Path, section: RewardModelSection, config: Any, where: str) -> ClassifierTexts:
    """Reads the tokenizer of a classifier's folder; ``config`` is its transformers configuration. Raises ConfigError,
    which begins with ``where``."""
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
    except TemplateFailed as error:
        raise ConfigError(
            f"{where}: its chat template fails at a question and an answer: {error!s:.500}; "
            f"give {folder} a chat_template.jinja that shows both, or set reward.model.chat_template=false"
        ) from error
    return texts


def _max_tokens(config: Any, tokenizer: Any, wanted: int | None, where: str) -> int:
    known = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]  # either may be smaller
    most = min(int(limit) for limit in known if limit is not None)
    if wanted is not None and wanted > most:
        raise ConfigError(f"reward.model.max_tokens={wanted}: {where} reads at most {most}; set that, or null")
    return wanted or most


class ClassifierReward:
    """Scores prompt and completion as one text: the logit of the only label, or the probability of ``label``.

    It scores one group at a time, in batches of only that group, so that rewards do not depend on other groups.
    Raises ConfigError for a folder that holds no such classifier.
    """

    def __init__(self, folder: Path, section: RewardModelSection, *, key: str) -> None:
        where = f"{key}=hf:{folder}"
        if not (folder / "config.json").is_file():
            given = f"give the folder of a Hugging Face sequence classifier{download_hint(folder)}"
            raise ConfigError(f"{where}: it has no config.json; {given}")
        self._section = section
        self._model = _load(folder, where)
        self._pad: int | None = self._model.config.pad_token_id  # None: a text's last token is read, whichever it is
        self._label = _label(self._model.config, section.label, where)
        self._texts = classifier_texts(folder, section, self._model.config, where)
        self._turn = asyncio.Semaphore(1)
        self._alone = threading.Lock()  # held by the computing thread, even if its group was given up

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[RewardResult]:
        """Scores the texts after the groups that came before."""
        given_up = threading.Event()
        async with queued_slot(self._turn):
            try:
                return await run_in_daemon_thread(partial(self._score, prompt.text, list(texts), given_up))
            finally:
                given_up.set()

    def _score(self, prompt: str, texts: Sequence[str], given_up: threading.Event) -> list[RewardResult]:
        """Returns rewards; ends before the next batch once ``given_up`` is set, because no caller waits then."""
        import torch

        found = list[RewardResult]()
        with self._alone, torch.inference_mode():
            for start in range(0, len(texts), _BATCH_SIZE):
                if given_up.is_set():
                    break
                found += [
                    RewardResult(total=float(reward))
                    for reward in self._forward(prompt, texts[start : start + _BATCH_SIZE])
                ]
        return found

    def _forward(self, prompt: str, texts: Sequence[str]) -> Tensor:
        """Returns rewards [len(texts)] float32."""
        import torch

        rows = self._texts.rows(prompt, texts)
        longest = max(map(len, rows))
        pad = self._model.config.pad_token_id = _padding(rows) if self._pad is None else self._pad
        ids = [[*row, *[pad] * (longest - len(row))] for row in rows]
        attended = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        placed = [torch.tensor(one) for one in (ids, attended)]
        logits: Tensor = self._model(input_ids=placed[0], attention_mask=placed[1]).logits.float()
        return logits[:, 0] if self._section.label is None else logits.softmax(-1)[:, self._label]


def _load(folder: Path, where: str) -> Any:
    """Loads the classifier in evaluation mode."""
    import torch
    from transformers import AutoModelForSequenceClassification

    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if loading["missing_keys"]:
        raise ConfigError(
            f"{where}: its files lack {', '.join(sorted(loading['missing_keys']))}, so these weights would be random; "
            "give a folder that was saved as a sequence classifier"
        )
    return model.eval()


def _padding(rows: Sequence[Sequence[int]]) -> int:
    """Returns a token with which no row ends: a decoder's classifier reads the last token that is not padding."""
    ends = {row[-1] for row in rows if row}
    return next(token for token in range(len(rows) + 1) if token not in ends)


def _label(config: Any, wanted: str | None, where: str) -> int:
    """Returns the index of the label to read. Raises ConfigError that names the labels."""
    labels = {str(name): int(index) for index, name in sorted(config.id2label.items())}
    if wanted is None:
        if config.num_labels == 1:
            return 0
        raise ConfigError(
            f"{where}: it has {config.num_labels} labels; set reward.model.label to one of {', '.join(labels)}"
        )
    if wanted not in labels:
        raise ConfigError(f"reward.model.label={wanted!r}: {where} has the labels {', '.join(labels)}")
    return labels[wanted]
