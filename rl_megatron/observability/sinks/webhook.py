"""A webhook, such as Slack's: a message at the end of a run."""

from __future__ import annotations

import html
import threading
from typing import Final
from urllib.parse import urlsplit

import httpx2
from typing_extensions import override

from rl_megatron.errors import ConfigError, truncate
from rl_megatron.http.urls import is_loopback
from rl_megatron.observability.files import JsonRow
from rl_megatron.observability.sinks.sink import MetricSink, RunEnd, SinkSettings

VARIABLE: Final = "RL_MEGATRON_WEBHOOK"
"""The environment variable with the URL, which is a secret: it is not in config.yaml, in logs or in errors."""
_ATTEMPTS, _WAIT_SECONDS, _TIMEOUT_SECONDS = 3, 1.0, 8.0
_MAX_ERROR = 600  # characters


class WebhookSink(MetricSink):
    """Posts ``{"text": ...}`` when the run finishes, stops or fails. Proxies of the environment are used, and no
    redirect is followed."""

    def __init__(self, settings: SinkSettings) -> None:
        if settings.argument:
            raise ConfigError(f"log.sinks=webhook:…: give the URL in the environment variable {VARIABLE} alone")
        self._url = settings.environment.get(VARIABLE, "")
        if not _is_safe(self._url):
            problem = "is no https:// URL, or http:// to this machine" if self._url else "is not set"
            raise ConfigError(f"log.sinks=webhook: the environment variable {VARIABLE} {problem}; export the URL in it")
        self._name, self._step = settings.folder.name, 0

    @override
    def log(self, row: JsonRow) -> None:
        self._step = int(str(row["step"]))

    @override
    def close(self, end: RunEnd) -> None:
        reason = f": {truncate(end.message, _MAX_ERROR)}" if end.message else ""
        self._post(f"{end.state} at step {self._step}{reason}")

    def _post(self, text: str) -> None:
        """Posts a message, in up to three attempts. Raises ConnectionError without the URL."""
        body, failure = {"text": html.escape(f"run {self._name}: {text}", quote=False)}, ""
        with httpx2.Client(timeout=_TIMEOUT_SECONDS) as client:
            for attempt in range(_ATTEMPTS):
                threading.Event().wait(_WAIT_SECONDS * attempt)
                try:
                    with client.stream("POST", self._url, json=body) as response:  # its text is not read
                        status = response.status_code
                except Exception as error:  # noqa: BLE001  the text of any may have the URL
                    failure = type(error).__name__
                    continue
                if response.is_success:
                    return
                failure = f"status {status}"
                if status < 500 and status not in (408, 429):
                    break
        raise ConnectionError(f"the webhook did not take a message: {failure}") from None


def _is_safe(url: str) -> bool:
    """True for https, and for http to this machine, with a host."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))
