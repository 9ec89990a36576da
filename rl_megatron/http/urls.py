"""URLs that the configuration gives: whether they can be used, and whether they hold a secret."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import SplitResult, parse_qsl, urlsplit

from rl_megatron.errors import ConfigError

_UNWRITTEN = re.compile(r"[^!-~]")
_SECRET = re.compile(r"(^|[_.-])(key|apikey|auth|credentials?|passw(or)?d|secret|sig|signature|token)$", re.IGNORECASE)


def split_url(url: str, *, key: str, example: str) -> SplitResult:
    """Its parts. Raises ConfigError, with the configuration's ``key``, for an invalid port or character."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for an invalid port
    except ValueError as error:
        raise ConfigError(f"{key}={url!r:.200}: {error}; write it as {example}") from error
    if _UNWRITTEN.search(url):
        raise ConfigError(f"{key}={url!r:.200}: it holds white space or non-ASCII characters; write these as %XX")
    return parts


def is_plain_address(text: str) -> bool:
    """Whether it is http(s)://host:port, without user, path or query."""
    try:
        url = urlsplit(text)
        fits = url.scheme in {"http", "https"} and url.hostname and url.port is not None and url.path in {"", "/"}
        return bool(fits) and not (url.query or url.fragment or "@" in url.netloc or _UNWRITTEN.search(text))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def secret_in(url: str) -> str:
    """What of an address is a secret by its name, as ``user name and password`` or ``token=``; empty if nothing is.

    The configuration is in a file that others may read, and addresses are in errors and logs.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # refused elsewhere
        return ""
    if "@" in parts.netloc:
        return "user name and password"
    names = [name for text in (parts.query, parts.fragment) for name, _ in parse_qsl(text, keep_blank_values=True)]
    return next((f"{name:.80}=" for name in names if _SECRET.search(name)), "")
