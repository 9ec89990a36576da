"""Rewards a completion that equals the answer, apart from surrounding white space."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.types import Completion, Prompt, Scored


async def exact_match(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
    """1.0 if a text equals ``prompt.answer``, else 0.0."""
    answer = prompt.answer.strip()
    return [Scored(total=float(text.strip() == answer), answer=text.strip()) for text in texts]
