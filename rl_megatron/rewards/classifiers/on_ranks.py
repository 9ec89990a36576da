"""A reward model on ranks of the run: the same score as ``hf:`` of its folder, computed by the learner's code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rl_megatron.config.sections.reward import RANKS, RankedModelSection, RewardModelSection, RewardSection
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.classifiers.in_process import classifier_texts
from rl_megatron.types import Completion, Prompt, RewardResult

logger = logging.getLogger(__name__)


class TextScores(Protocol):
    """A reward model's scores of texts."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text."""

    async def __call__(self, texts: Sequence[Sequence[int]], /) -> Sequence[float]:
        """Returns the score of each text, given its tokens."""


class RewardModels:
    """The reward models on ranks of one run, by their names; rewards call them after ranks have loaded them."""

    def __init__(self, sections: Mapping[str, RankedModelSection] | None = None) -> None:
        self.folders: Mapping[str, Path] = {name: one.path for name, one in (sections or {}).items()}
        """The folders of the models that ranks will hold."""
        self.loaded: dict[str, TextScores] = {}
        """The models that ranks have loaded."""


class RankedReward:
    """Scores prompt and completion as one text, a group at a time, so that rewards do not depend on other groups.

    A text that is too long for a micro-batch of the ranks is cut at its beginning, and the log reports it once.
    Raises ConfigError for a name that is not among ``models``, and for a folder without a classifier of one label or
    without its tokenizer.
    """

    def __init__(self, name: str, section: RewardModelSection, models: RewardModels, *, key: str) -> None:
        where = f"{key}={RANKS}{name:.80}"
        if name not in models.folders:
            known = ", ".join(models.folders) or "none"
            raise ConfigError(f"{where}: reward_models has {known}; give one of these, or reward_models.<name>.path")
        folder = models.folders[name]
        config = _config(folder, f"{where}: reward_models.{name}.path={folder}")
        if config.num_labels != 1:
            raise ConfigError(
                f"{where}: the classifier in {folder} has {config.num_labels} labels, and ranks score by one alone; "
                "give one with one label, or hf:<path> with reward.model.label"
            )
        self._name, self._loaded = name, models.loaded
        self._texts = classifier_texts(folder, section, config, where)
        self._pad: int | None = config.pad_token_id
        self._told = False  # True after the log has reported cut texts

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[RewardResult]:
        """Raises RewardError before ranks have loaded the model."""
        if (model := self._loaded.get(self._name)) is None:
            raise RewardError(f"no ranks have loaded the reward model {self._name!r:.80} yet")
        rows = await asyncio.to_thread(self._rows, prompt.text, texts, model.max_tokens)
        return [RewardResult(total=score) for score in await model([self._read(row) for row in rows])]

    def _rows(self, prompt: str, texts: Sequence[str], limit: int) -> list[list[int]]:
        """Returns tokens of the prompt with each text; a longer row keeps its last ``limit``."""
        rows = self._texts.rows(prompt, texts)
        longest = max(map(len, rows), default=0)
        if longest <= limit:
            return rows
        if not self._told:
            self._told = True
            logger.warning(
                "reward_models.%s: of a prompt and completion of %d tokens it reads the last "
                "learner.max_tokens_per_micro_batch=%d, and so of all that are longer; raise that, or set "
                "reward.model.max_tokens to it",
                self._name,
                longest,
                limit,
            )
        return replace(self._texts, max_tokens=limit).rows(prompt, texts)

    def _read(self, row: list[int]) -> list[int]:
        """Returns the row up to the last token that is not padding, where transformers reads the score."""
        last = next((at for at in reversed(range(len(row))) if row[at] != self._pad), 0)
        return row[: last + 1]


def local_reward(section: RewardSection, models: Mapping[str, RankedModelSection]) -> RewardSection:
    """Returns the reward of a command without ranks: its reward models are in this process, as ``hf:`` folders."""

    def here(name: str | None) -> str | None:
        if name is None or not name.startswith(RANKS):
            return name
        return f"hf:{models[name.removeprefix(RANKS)].path}"

    parts = {name: one.model_copy(update={"function": here(one.function)}) for name, one in section.parts.items()}
    return section.model_copy(update={"function": here(section.function), "parts": parts})


def _config(folder: Path, where: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{where}: {error}") from error
