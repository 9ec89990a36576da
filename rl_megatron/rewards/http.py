"""Asks a server for rewards: JSON over HTTP. docs/data.md shows request and answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from rl_megatron.config.sections.reward import HttpSection
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.http.client import TryAgain, check_status, post_json, quote_beginning, retried
from rl_megatron.http.urls import split_url
from rl_megatron.rewards.scoring import ABSTAINS, queued_slot
from rl_megatron.types import Completion, Prompt, RewardResult

MAX_ANSWER_BYTES = 1 << 20

_RETRIES, _SLOTS = 3, 16
_WAIT = 0.5  # seconds, before the first retry


class HttpReward:
    """POSTs the completions of a prompt to ``url``; at most 16 requests are in flight.

    It retries, after a wait that doubles, without a connection, without an answer in time, and on status 408, 429 and
    5xx. Any other status but 200 and an answer of another form are errors without a retry. It follows no redirects and
    uses no proxies. Raises ConfigError for a URL that it cannot use.
    """

    def __init__(self, url: str, section: HttpSection, *, key: str) -> None:
        self._url, self._section = url, section
        _check(url, key)
        self._slots = asyncio.Semaphore(_SLOTS)

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[RewardResult]:
        """Raises RewardError that names the URL, the prompt and the answer."""
        body, about = _request(prompt, completions, texts), f"{self._url}, prompt {prompt.id!r}"
        try:
            answer = await retried(lambda: self._attempt(body), retries=_RETRIES, wait=_WAIT, about=about)
            return _rewards(answer, len(completions))
        except (TryAgain, ValueError, OverflowError) as error:  # OverflowError: an integer over any float
            raise RewardError(f"{about}: {error}") from error

    async def _attempt(self, body: bytes) -> bytes:
        seconds = self._section.timeout_seconds
        async with queued_slot(self._slots):
            headers, limit = {"Accept": "application/json"}, f"reward.http.timeout_seconds={seconds}"
            status, answer = await post_json(
                self._url, body, headers, max_bytes=MAX_ANSWER_BYTES, seconds=seconds, limit=limit
            )
        check_status(status, answer)
        return answer


def _check(url: str, key: str) -> None:
    """Raises ConfigError for a URL that cannot be used."""
    example = "http://host:port/path"
    if not split_url(url, key=key, example=example).hostname:
        raise ConfigError(f"{key}={url!r:.200}: it names no host; write it as {example}")


def _request(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> bytes:
    asked = {
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "meta": dict(prompt.meta),
        "completions": [
            {"text": text, "num_tokens": len(c.token_ids), "finish_reason": c.finish_reason}
            for c, text in zip(completions, texts, strict=True)
        ],
    }
    return json.dumps(asked).encode()


def _rewards(answer: bytes, count: int) -> list[RewardResult]:
    """Parses ``{"rewards": [...]}``; a null abstains. Raises ValueError that shows the answer."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON: {quote_beginning(answer)}") from error
    rewards = value.get("rewards") if isinstance(value, dict) else None
    if not isinstance(rewards, list):
        raise ValueError(f'the answer is {quote_beginning(answer)}; it must be {{"rewards": [number, ...]}}')
    if len(rewards) != count:
        raise ValueError(f"the answer holds {len(rewards)} rewards for {count} completions: {quote_beginning(answer)}")
    for i, reward in enumerate(rewards):
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise ValueError(f"rewards[{i}] is {reward!r:.80}; it must be a number or null")
    return [ABSTAINS if reward is None else RewardResult(total=float(reward)) for reward in rewards]
