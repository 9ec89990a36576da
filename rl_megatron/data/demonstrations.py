"""What the data shows of an answer, in the form of a completion that no version of the weights sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rl_megatron.data.problems.rendering import demonstration_in
from rl_megatron.data.samples import EndTokens, check_ends, check_tokens, supervised_rows
from rl_megatron.errors import DataError
from rl_megatron.types import Completion, Prompt, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """The demonstration of a prompt: the text of its source's field, or its answer, and the token that ends it."""

    fields: Mapping[str, str | None]  # by source, as in ``data.fields.demonstration``
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: EndTokens
    stop_token_ids: Sequence[int]
    vocab_size: int  # of the policy
    most: int  # tokens, as many as the policy may sample

    def __call__(self, prompt: Prompt) -> Completion:
        """It has no spans, and its log-probs are 0: who wrote it was certain. Raises DataError for one of more tokens
        than are sampled, with a token that the model lacks, or with one that ends sampling before its end."""
        name, place = self.fields[prompt.source], f"prompt {prompt.id!r}"
        text = prompt.answer if name is None else demonstration_in(prompt.meta, place, name)
        rows = supervised_rows([prompt], [(text,)], self.tokenizer, self.end_token_ids)
        check_tokens(rows, self.vocab_size)
        check_ends(rows, self.stop_token_ids)
        tokens = rows[0].token_ids[len(prompt.token_ids) :]
        if len(tokens) > self.most:
            raise DataError(
                f"{place}: its demonstration has {len(tokens)} tokens, but rollout.max_new_tokens={self.most}; raise "
                "the latter, or leave the row out"
            )
        return Completion(token_ids=tokens, logprobs=np.zeros(len(tokens), np.float32), finish_reason="stop", spans=())


def with_demonstrations(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups, in which demonstrations are trajectories like the sampled ones, after them: what is compared and
    trained on."""
    return [
        group
        if (shown := group.demonstration) is None
        else replace(group, trajectories=(*group.trajectories, *shown.trajectories), demonstration=None)
        for group in groups
    ]
