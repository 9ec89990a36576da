"""Turns written pairs of answers into rows: to learn from one against the other, or to score the whole of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_megatron.chat_templates import begun_once
from rl_megatron.data.samples import EndTokens, WrittenRow, supervised_rows, written_samples
from rl_megatron.errors import DataError
from rl_megatron.types import Prompt, Samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair = tuple[WrittenRow, WrittenRow]
"""The rows of the better and of the worse answer."""


def answer_pairs(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, ends: EndTokens) -> list[Pair]:
    """Each prompt with either answer, of which the tokens and the one of ``ends`` after them are learnt. Raises as
    `supervised_rows`."""
    better, worse = (
        supervised_rows(prompts, [(text,) for text in texts], tokenizer, ends)
        for texts in ([one.answer for one in prompts], [one.rejected[0] for one in prompts])
    )
    return list(zip(better, worse, strict=True))


def scored_pairs(
    prompts: Sequence[Prompt],
    texts: Sequence[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool,
) -> list[Pair]:
    """The whole ``texts`` of each prompt's pair, to be scored at their last tokens, with the prompt's margin."""
    flat = [text for pair in texts for text in pair]
    encoded = iter(tokenizer(flat, add_special_tokens=add_special_tokens)["input_ids"] if flat else [])
    made = []
    for prompt in prompts:
        better, worse = (scored_row(prompt.id, begun_once(next(encoded), tokenizer.bos_token_id)) for _ in range(2))
        made.append((replace(better, margin=prompt.margin), worse))
    return made


def scored_row(name: str, ids: Sequence[int]) -> WrittenRow:
    """The text of the tokens ``ids``, masked in at the last one.

    A position has its token as input and the next as target, so one more token puts the last among the inputs.
    """
    if not ids:
        raise DataError(f"prompt {name!r}: a text of its pair has no token to score")
    return WrittenRow(id=name, token_ids=np.array([*ids, ids[-1]], np.int32), turns=((len(ids), len(ids) + 1),))


def with_margins(rows: Sequence[WrittenRow]) -> Samples:
    """`written_samples` whose ``returns``, where a row is scored, are its margin."""
    samples = written_samples(rows)
    returns = torch.zeros(len(samples.targets))
    returns[samples.mask] = torch.tensor([row.margin for row in rows])
    return replace(samples, returns=returns)
