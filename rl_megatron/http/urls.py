"""URLs that the configuration gives: whether they can be used, and whether they hold a secret."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import SplitResult, parse_qsl, urlsplit

from rl_megatron.errors import ConfigError

_UNWRITTEN = re.compile(r"[^!-~]")
_SECRET = re.compile(r"(^|[_.-])(key|apikey|auth|credentials?|passw(or)?d|secret|sig|signature|token)$", re.IGNORECASE)


def split_url(url: str, *, key: str, example: str) -> SplitResult:
    """Returns the URL's parts. Raises ConfigError that names ``key`` for an invalid port or character."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for an invalid port
    except ValueError as error:
        raise ConfigError(f"{key}={url!r:.200}: {error}; write it as {example}") from error
    if _UNWRITTEN.search(url):
        raise ConfigError(f"{key}={url!r:.200}: it holds white space or non-ASCII characters; write these as %XX")
    return parts


def is_plain_address(text: str) -> bool:
    """True if ``text`` is http(s)://host:port, without user, path or query."""
    try:
        url = urlsplit(text)
        fits = url.scheme in {"http", "https"} and url.hostname and url.port is not None and url.path in {"", "/"}
        return bool(fits) and not (url.query or url.fragment or "@" in url.netloc or _UNWRITTEN.search(text))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """True if the name of a host alone shows that it is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_secret(url: str) -> str:
    """Returns the part of an address that is a secret by its name (``user name and password``, ``token=``), or "".

    Others may read the configuration's file, and errors and logs contain addresses.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # another check refuses it
        return ""
    if "@" in parts.netloc:
        return "user name and password"
    names = [name for text in (parts.query, parts.fragment) for name, _ in parse_qsl(text, keep_blank_values=True)]
    return next((f"{name:.80}=" for name in names if _SECRET.search(name)), "")
