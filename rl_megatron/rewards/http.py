"""A reward that a server gives: JSON over HTTP. docs/rewards.md has the two bodies."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx2

from rl_megatron.config.sections.reward import HttpSection
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.types import Completion, Prompt, Scored

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 20
_PASSING = (408, 429)  # statuses below 500 that another attempt may not meet


class _TryAgain(Exception):
    """An attempt failed in a way that may pass."""


class HttpReward:
    """POSTs the completions of a prompt to ``url``; at most ``concurrency`` requests are in flight.

    An attempt without a connection, without an answer in time or of status 408, 429 or 5xx is made again after a wait
    that doubles; any other status but 200, and an answer of another shape, is an error at once. Redirects are not
    followed and proxies not asked. Raises ConfigError for a URL that cannot be asked.
    """

    def __init__(self, url: str, section: HttpSection, *, key: str) -> None:
        self._url, self._section = url, section
        _check(url, key)
        self._trusted = ssl.create_default_context()
        self._slots = asyncio.Semaphore(section.concurrency)

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        """Raises RewardError that names the URL, the prompt and what was answered."""
        body = _request(prompt, completions, texts)
        wait = self._section.backoff_seconds
        for left in range(self._section.retries, -1, -1):
            try:
                answer = await self._attempt(body)
                return _rewards(answer, len(completions))
            except _TryAgain as error:
                if not left:
                    tries = self._section.retries + 1
                    raise RewardError(f"{self._url}, prompt {prompt.id!r}: {error}; attempts made: {tries}") from error
                logger.warning("%s, prompt %r: %s; again in %g s", self._url, prompt.id, error, wait)
            except (ValueError, OverflowError) as error:  # the second: an integer beyond any float
                raise RewardError(f"{self._url}, prompt {prompt.id!r}: {error}") from error
            await asyncio.sleep(wait)
            wait *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, body: bytes) -> bytes:
        limit = self._section.timeout_seconds
        try:
            async with self._slots, asyncio.timeout(limit):
                status, answer = await self._post(body)
        except TimeoutError as error:
            raise _TryAgain(f"no answer in reward.http.timeout_seconds={limit}") from error
        except httpx2.TransportError as error:
            raise _TryAgain(f"{type(error).__name__}: {error!s:.500}") from error
        if status == 200:
            return answer
        said = f"status {status}: {_shown(answer)}"
        if status in _PASSING or status >= 500:
            raise _TryAgain(said)
        raise ValueError(said)

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of one request on a connection of its own; who cancels it closes that."""
        client = httpx2.AsyncClient(timeout=None, trust_env=False, verify=self._trusted)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        async with client, client.stream("POST", self._url, content=body, headers=headers) as response:
            answer = bytearray()
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    break
            return response.status_code, bytes(answer)


def _check(url: str, key: str) -> None:
    """Raises ConfigError for what cannot be asked."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises where it is no port
    except ValueError as error:
        raise ConfigError(f"{key}={url!r:.200}: {error}; write it as http://host:port/path") from error
    if re.search(r"[^!-~]", url):
        raise ConfigError(f"{key}={url!r:.200}: it holds white space or letters outside ASCII; write those as %XX")
    if not parts.hostname:
        raise ConfigError(f"{key}={url!r:.200}: it names no host; write it as http://host:port/path")
    if parts.username is not None:
        raise ConfigError(f"{key}: a URL with a user name or password in it is written to logs; leave them out")


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


def _rewards(answer: bytes, count: int) -> list[Scored]:
    """The rewards of ``{"rewards": [...]}``, NaN for a null. Raises ValueError that shows what is there instead."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON: {_shown(answer)}") from error
    rewards = value.get("rewards") if isinstance(value, dict) else None
    if not isinstance(rewards, list):
        raise ValueError(f'the answer is {_shown(answer)}; wanted is {{"rewards": [number, ...]}}')
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards answered for {count} completions: {_shown(answer)}")
    for i, reward in enumerate(rewards):
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise ValueError(f"rewards[{i}] is {reward!r:.80}; a number or null is wanted")
    return [Scored(total=math.nan if reward is None else float(reward)) for reward in rewards]


def _shown(answer: bytes) -> str:
    return repr(answer[:80].decode(errors="replace"))
