"""A webhook, such as Slack's: messages about verdicts that become bad, and the end of a run."""

from __future__ import annotations

import html
import threading
from typing import Final
from urllib.parse import urlsplit

import httpx2
from typing_extensions import override

from rl_megatron.errors import ConfigError, truncate
from rl_megatron.http.urls import is_loopback
from rl_megatron.observability.files import JsonRow, rows_from
from rl_megatron.observability.sinks.sink import MetricSink, RunEnd, SinkSettings
from rl_megatron.observability.verdicts import READS, Verdict, read_run

VARIABLE: Final = "RL_MEGATRON_WEBHOOK"
"""The environment variable with the URL, which is a secret: it is not in config.yaml, in logs or in errors."""
_ATTEMPTS, _WAIT_SECONDS, _TIMEOUT_SECONDS = 3, 1.0, 8.0
_MAX_ERROR = 600  # characters
_HELD = 5  # readings in a row for which a verdict has changed


class WebhookSink(MetricSink):
    """Posts ``{"text": ...}`` when a verdict of the report is bad, or no longer, and when the run finishes, stops or
    fails. Proxies of the environment are used, and no redirect is followed."""

    def __init__(self, settings: SinkSettings) -> None:
        if settings.argument:
            raise ConfigError(f"log.sinks=webhook:…: give the URL in the environment variable {VARIABLE} alone")
        self._url = settings.environment.get(VARIABLE, "")
        if not _is_safe(self._url):
            problem = "is no https:// URL, or http:// to this machine" if self._url else "is not set"
            raise ConfigError(f"log.sinks=webhook: the environment variable {VARIABLE} {problem}; export the URL in it")
        self._settings, self._name, self._step = settings, settings.folder.name, 0
        self._rows: list[JsonRow] = []  # metrics that verdicts read
        self._bad: set[str] = set()  # topics, as in the last messages
        self._held: dict[str, int] = {}  # topic -> readings since its verdict differs from that

    @override
    def log(self, row: JsonRow) -> None:
        if self._step == 0 and not self._settings.is_fresh:
            path = self._settings.folder / "metrics.jsonl"
            self._rows = [_short(one) for one in rows_from(path) if int(str(one["step"])) < int(str(row["step"]))]
            self._bad = {verdict.topic for verdict in self._verdicts() if verdict.state == "bad"}
        self._step = int(str(row["step"]))
        if self._rows and all(self._rows[-1].get(name) == row[name] for name in ("phase", "step")):
            self._rows[-1] = _short(row)
            return
        self._rows.append(_short(row))
        if len(self._rows) % (1 + len(self._rows) // 100):  # a reading takes time in proportion to the rows
            return
        for verdict in self._verdicts():
            is_bad, topic = verdict.state == "bad", verdict.topic
            self._held[topic] = self._held.get(topic, 0) + 1 if is_bad != (topic in self._bad) else 0
            if self._held[topic] == _HELD:
                self._bad ^= {topic}
                self._held[topic] = 0
                self._post(f"step {self._step}: {'' if is_bad else f'{topic} is no longer bad. '}{verdict.sentence}")

    def _verdicts(self) -> list[Verdict]:
        settings = self._settings
        return read_run(self._rows, needs_differences=settings.needs_differences, dtype=settings.dtype)

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


def _short(row: JsonRow) -> JsonRow:
    return {name: row[name] for name in ("phase", *READS) if name in row}


def _is_safe(url: str) -> bool:
    """True for https, and for http to this machine, with a host."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))
