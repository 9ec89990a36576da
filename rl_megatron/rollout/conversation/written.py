"""Conversations that somebody wrote, as rows of tokens: each turn of the assistant after the prompt that it answers.

A turn is trained on after the very prompt for which the model would sample it, as the chat template writes that. Where
a template shows a turn otherwise later on (Qwen3 drops its thinking), the turns after it begin a new row. The
template's texts and the turns' are encoded apart, as they are when a model samples. No model has code of its own here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from rl_megatron.data.samples import WrittenRow
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.forms import WrittenConversation, written_conversation
from rl_megatron.rollout.conversation.shown import RowTexts, ShownConversations
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_of_turns(tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> int | None:
    """The token with which turns of conversations are learnt to end; None for a tokenizer without a chat template, and
    for one that ends no turn or does not show it after its own prompt."""
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    made_up = Prompt(id="", text=json.dumps({"messages": messages, "tools": []}), token_ids=(), answer="")
    try:
        (row,) = WrittenConversations(tokenizer, stop_token_ids).rows([made_up])
    except (ConfigError, DataError):
        return None
    return int(row.token_ids[-1])


class WrittenConversations(ShownConversations):
    """Makes rows of conversations by the chat template of a model, whose sampling ends with ``stop_token_ids``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
        """Raises ConfigError for a tokenizer without a usable chat template. One that writes today's date writes this
        moment's in all rows: midnight must not come between two texts of one."""
        now = {"strftime_now": datetime.now().astimezone().strftime}
        template = ChatTemplate(tokenizer, options=now)
        self._tokenizer, self._stops = tokenizer, np.array(stop_token_ids, np.int32)
        endings = (template.decode(self._stops[i : i + 1], special=True) for i in range(len(self._stops)))
        super().__init__(template, tuple(endings))

    def rows(self, prompts: Sequence[Prompt]) -> list[WrittenRow]:
        """The rows of the prompts, of each one or several, in their order. Raises as ``rows_of``."""
        found = self.rows_of([written_conversation(one) for one in prompts])
        return [row for rows in found for row in rows]

    def rows_of(self, conversations: Sequence[WrittenConversation]) -> list[list[WrittenRow]]:
        """The rows of each conversation.

        Raises DataError that names its prompt: the template refuses its messages, does not show a turn after its own
        prompt, or writes no token before it, or none there that ends sampling.
        """
        made = [self.texts(one) for one in conversations]
        texts = [text for rows in made for row in rows for text, _ in row.parts]
        encoded = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        return [
            [self._row(one.id, row, [next(encoded) for _ in row.parts]) for row in rows]
            for one, rows in zip(conversations, made, strict=True)
        ]

    def _row(self, name: str, row: RowTexts, encoded: Sequence[Sequence[int]]) -> WrittenRow:
        tokens, turns = list[int](), list[tuple[int, int]]()
        for (text, is_turn), ids in zip(row.parts, encoded, strict=True):
            if is_turn:
                ends = np.flatnonzero(np.isin(np.array(ids, np.int64), self._stops))
                if not len(ends) or self._tokenizer.decode(ids[ends[-1] + 1 :]).strip():
                    raise DataError(
                        f"prompt {name!r}: the chat template ends a turn with {text[-40:]!r}, in which no token ends "
                        f"sampling (ids {self._stops.tolist()}), so a model would learn to go on; add its id to "
                        "eos_token_id in generation_config.json"
                    )
                if behind := self._tokenizer.decode(ids[ends[0] + 1 : ends[-1]], skip_special_tokens=True).strip():
                    raise DataError(
                        f"prompt {name!r}: a turn goes on with {behind[:40]!r} after a token that ends sampling (id "
                        f"{ids[ends[0]]}), where no model would; take that token's text out of the message, or "
                        "give it a weight of 0"
                    )
                if not tokens:
                    raise DataError(
                        f"prompt {name!r}: the chat template writes nothing before its first turn, {text[:40]!r}, and "
                        "tokens are learnt behind others; give the messages before it a text"
                    )
                turns.append((len(tokens), len(tokens) + int(ends[0]) + 1))
            tokens += ids
        return WrittenRow(id=name, token_ids=np.array(tokens[: turns[-1][1]], np.int32), turns=tuple(turns))
