"""A run's report and samples over HTTP, as an ASGI application: for who has the token, and as they are now."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import logging
import math
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rl_megatron.errors import DataError, Stopped
from rl_megatron.observability import report
from rl_megatron.observability.charts import FRAME
from rl_megatron.observability.history import STARTS
from rl_megatron.observability.samples import SampleSearch, prompt_digest, search_samples
from rl_megatron.rollout.endpoint.bodies import ReceivePart, SendPart, method_of, respond
from rl_megatron.rollout.endpoint.served import RequestRefused
from rl_megatron.training.tasks import unless_stopped

logger = logging.getLogger(__name__)

SAMPLES_AT_ONCE = 50
_PATHS = {"/": "GET", "/report": "GET", "/samples": "GET"}
MOST_CHARACTERS = 2**21  # of the samples of an answer; one that is longer comes alone
_READ = ("config.yaml", "metrics.jsonl", STARTS, "samples.jsonl", "trace.json", "plan.json", "log.txt")
"""Files of which a change makes a new page."""
_KINDS = {"text": str, "group": str, "least_reward": float, "most_reward": float}  # all others are integers
_PLAIN, _HTML, _JSON = b"text/plain; charset=utf-8", b"text/html; charset=utf-8", b"application/json"


@dataclass(slots=True)
class WatchApplication:
    """ASGI: one HTTP request a call. ``/`` holds nothing of the runs; all else wants ``token`` and loopback's name."""

    runs: Sequence[Path]
    token: str
    costs: Callable[[Path], report.CostCounter]  # of a run, on its page
    ends: asyncio.Event = field(default_factory=asyncio.Event)  # once it is set, no answer waits for a page
    _page: bytes = field(init=False)
    _headers: Mapping[bytes, bytes] = field(init=False)
    _report: tuple[str, bytes] = ("", b"")  # its tag, and the page, compressed
    _rendering: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        page, script = _shell([run.name for run in self.runs])
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._page = page.encode()
        self._headers = {
            b"content-security-policy": policy.encode(),
            b"cache-control": b"no-store",
            b"referrer-policy": b"no-referrer",
            b"x-content-type-options": b"nosniff",
            b"cross-origin-resource-policy": b"same-origin",
        }

    async def __call__(self, scope: Mapping[str, Any], receive: ReceivePart, send: SendPart) -> None:
        """Answer, or refuse with a status and its reason as plain text."""
        status, headers = 200, dict(self._headers)
        try:
            status, kind, body, more = await self._answer(scope)
            headers |= more
        except RequestRefused as error:
            status, kind, body = error.status, _PLAIN, str(error).encode()
        except Stopped:
            status, kind, body = 503, _PLAIN, b"rl-megatron watch ends"
        except DataError as error:  # a run that has no row yet, or a damaged file
            status, kind, body = 503, _PLAIN, str(error).encode(errors="replace")
        except Exception as error:
            logger.exception("a request of %s", scope["path"])
            status, kind, body = 500, _PLAIN, f"{type(error).__name__}; its traceback is in the terminal".encode()
        await respond(send, status, headers | {b"content-type": kind}, [body])

    async def _answer(self, scope: Mapping[str, Any]) -> tuple[int, bytes, bytes, Mapping[bytes, bytes]]:
        """Status, type and body, and headers of its own."""
        headers = dict(scope["headers"])
        port = scope["server"][1]
        if headers.get(b"host") not in {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}:
            raise RequestRefused(421, "ask by the address that `rl-megatron watch` printed")  # another name leads here
        path = method_of(scope, _PATHS)
        if path == "/":
            return 200, _HTML, self._page, {}
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not secrets.compare_digest(token.strip(), self.token.encode()):
            raise RequestRefused(
                401, "open the whole address that `rl-megatron watch` printed, with what is behind its #"
            )
        if path == "/samples":
            found = asyncio.to_thread(self._samples, scope["query_string"])
            return 200, _JSON, await unless_stopped(self.ends, found), {}
        async with self._rendering:
            tag, page = self._report = await unless_stopped(self.ends, asyncio.to_thread(self._newest, self._report))
        own = {b"etag": f'"{tag}"'.encode()}
        if headers.get(b"if-none-match") == own[b"etag"]:
            return 304, _HTML, b"", own
        if b"gzip" in headers.get(b"accept-encoding", b""):
            return 200, _HTML, page, own | {b"content-encoding": b"gzip"}
        return 200, _HTML, await asyncio.to_thread(gzip.decompress, page), own

    def _newest(self, last: tuple[str, bytes]) -> tuple[str, bytes]:
        """The tag and the page of now: the ``last`` one, if nothing has changed."""
        tag = self._tag()
        return last if tag == last[0] else (tag, gzip.compress(self._render(), compresslevel=1))

    def _tag(self) -> str:
        """Another one after every change of a file that the report shows."""
        found = hashlib.sha256()
        for file in (run / name for run in self.runs for name in _READ):
            if file.exists():
                stat = file.stat()
                found.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return found.hexdigest()

    def _render(self) -> bytes:
        """The report's page, of damaged parts without them."""
        with tempfile.TemporaryDirectory() as folder:
            page, costs = Path(folder) / "report.html", self.costs(self.runs[0]) if len(self.runs) == 1 else None
            return report.write_report(self.runs, page, logger.warning, costs=costs).read_bytes()

    def _samples(self, query: bytes) -> bytes:
        """The samples that a query asks for. Raises RequestRefused."""
        given = _query(query)
        run, skip = (int(given.pop(name, 0)) for name in ("run", "skip"))
        if not 0 <= run < len(self.runs):
            raise RequestRefused(400, f"run={run}: there are {len(self.runs)} runs, from 0 on")
        rows, more = search_samples(
            self.runs[run] / "samples.jsonl", SampleSearch(**given), skip=skip, limit=SAMPLES_AT_ONCE
        )
        lengths = (
            len(row.prompt) + len(row.completion) + len(row.answer) + sum(len(turn.read) for turn in row.turns)
            for row in rows
        )
        fitting = max(1, sum(length <= MOST_CHARACTERS for length in accumulate(lengths)))
        found = [asdict(row) | {"group": prompt_digest(row.prompt)} for row in rows[:fitting]]
        return json.dumps({"samples": found, "more": more or fitting < len(rows)}).encode()


def _query(query: bytes) -> dict[str, Any]:
    """Its fields by name. Raises RequestRefused for a field that is not there, twice or no finite number."""
    fields = {*SampleSearch.__dataclass_fields__, "run", "skip"}
    try:
        pairs = parse_qsl(query.decode("ascii"), strict_parsing=bool(query), max_num_fields=len(fields))
        found = {name: _KINDS.get(name, int)(value) for name, value in pairs if name in fields}
    except ValueError as error:
        raise RequestRefused(400, f"not a search for samples: {error}") from error
    if len(found) < len(pairs) or not all(math.isfinite(v) for v in found.values() if isinstance(v, float)):
        raise RequestRefused(400, f"a search gives each of {', '.join(sorted(fields))} once at most, as finite numbers")
    if not 0 <= found.get("skip", 0) < 2**31:
        raise RequestRefused(400, f"skip={found['skip']}: must be 0 or more, and less than {2**31}")
    return found


def _shell(names: Sequence[str]) -> tuple[str, str]:
    """The page that asks for everything else, and its script's text."""
    folders = [Path(__file__).parent, Path(report.__file__).parent]
    environment = Environment(loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("page.html.j2").render(runs=names, size=FRAME)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    return page, script
