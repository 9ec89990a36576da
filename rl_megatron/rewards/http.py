"""Asks a server for rewards: JSON over HTTP. docs/rewards.md shows request and answer."""

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
from rl_megatron.config.sections.services import SERVICE
from rl_megatron.errors import ConfigError, RewardError, ServiceError
from rl_megatron.rewards.scoring import turn_of
from rl_megatron.services import Services
from rl_megatron.types import Completion, Prompt, Scored

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 20
_PASSING = (408, 429)  # statuses below 500 after which another attempt may succeed


class _TryAgain(Exception):
    """An attempt failed, but another may succeed."""


class HttpReward:
    """POSTs the completions of a prompt to ``url``, or to the replica of a service of the run whose turn it is.

    At most ``concurrency`` requests are in flight.

    It retries, after a wait that doubles, without a connection, without an answer in time, and on status 408, 429 and
    5xx. Any other status but 200 and an answer of another form is an error at once. It follows no redirects and uses
    no proxies. Raises ConfigError for a URL that it cannot use.
    """

    def __init__(self, url: str, section: HttpSection, *, key: str, services: Services) -> None:
        self._url, self._section, self._services = url, section, services
        if not url.startswith(SERVICE):
            _check(url, key)
        self._trusted = ssl.create_default_context()
        self._slots = asyncio.Semaphore(section.concurrency)

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        """Raises RewardError that names the URL, the prompt and the answer."""
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
                logger.warning("%s, prompt %r: %s; retrying in %g s", self._url, prompt.id, error, wait)
            except (ServiceError, ValueError, OverflowError) as error:  # OverflowError: an integer beyond any float
                raise RewardError(f"{self._url}, prompt {prompt.id!r}: {error}") from error
            await asyncio.sleep(wait)
            wait *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, body: bytes) -> bytes:
        limit = self._section.timeout_seconds
        try:
            async with turn_of(self._slots):
                url, key = await self._where()
                async with asyncio.timeout(limit):
                    status, answer = await self._post(url, key, body)
        except TimeoutError as error:
            raise _TryAgain(f"no answer within reward.http.timeout_seconds={limit}") from error
        except httpx2.TransportError as error:
            raise _TryAgain(f"{type(error).__name__}: {error!s:.500}") from error
        if status == 200:
            return answer
        said = f"status {status}: {_shown(answer)}"
        if status in _PASSING or status >= 500:
            raise _TryAgain(said)
        raise ValueError(said)

    async def _where(self) -> tuple[str, dict[str, str]]:
        """The address to ask and its key as a header, once a service that is being restarted serves. Raises
        ServiceError."""
        if not self._url.startswith(SERVICE):
            return self._url, {}
        name, slash, path = self._url.removeprefix(SERVICE).partition("/")
        address = await self._services.serving(name)
        return f"{address.url}{slash}{path}", {"Authorization": f"Bearer {address.key}"}

    async def _post(self, url: str, key: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Status and body of one request on its own connection, which a cancellation closes."""
        client = httpx2.AsyncClient(timeout=None, trust_env=False, verify=self._trusted)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        async with client, client.stream("POST", url, content=body, headers=headers | key) as response:
            answer = bytearray()
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    break
            return response.status_code, bytes(answer)


def _check(url: str, key: str) -> None:
    """Raises ConfigError for a URL that cannot be used."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for an invalid port
    except ValueError as error:
        raise ConfigError(f"{key}={url!r:.200}: {error}; write it as http://host:port/path") from error
    if re.search(r"[^!-~]", url):
        raise ConfigError(f"{key}={url!r:.200}: it holds white space or non-ASCII characters; write these as %XX")
    if not parts.hostname:
        raise ConfigError(f"{key}={url!r:.200}: it names no host; write it as http://host:port/path")


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
    """The rewards of ``{"rewards": [...]}``, NaN for a null. Raises ValueError that shows the answer."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON: {_shown(answer)}") from error
    rewards = value.get("rewards") if isinstance(value, dict) else None
    if not isinstance(rewards, list):
        raise ValueError(f'the answer is {_shown(answer)}; it must be {{"rewards": [number, ...]}}')
    if len(rewards) != count:
        raise ValueError(f"the answer holds {len(rewards)} rewards for {count} completions: {_shown(answer)}")
    for i, reward in enumerate(rewards):
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise ValueError(f"rewards[{i}] is {reward!r:.80}; it must be a number or null")
    return [Scored(total=math.nan if reward is None else float(reward)) for reward in rewards]


def _shown(answer: bytes) -> str:
    return repr(answer[:80].decode(errors="replace"))
