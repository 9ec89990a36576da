"""Has a server of the user's run programs: JSON over HTTP. docs/sandbox.md shows request and answer."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from typing_extensions import override

from rl_megatron.config.sections.reward import SandboxSection
from rl_megatron.errors import SandboxError
from rl_megatron.http.client import TryAgain, beginning_of, check_status, post_json, retried
from rl_megatron.http.token_file import StatusAndBody, TokenFile
from rl_megatron.sandbox.protocol import Executor, Limits, ProgramEnd, Ran, SandboxProgram

_SLACK_SECONDS = 30.0  # of an answer, beyond the program's limit
_RETRIES, _WAIT_SECONDS = 6, 0.5  # the wait before the first retry doubles each time, 31.5 seconds in all


class RemoteExecutor(Executor):
    """POSTs each program. It retries without a connection, and on status 408, 429 and 5xx: a program may run twice. So
    it does on status 401 and 403, with the token that the file then holds.

    Raises ConfigError for a ``sandbox.token_file`` that others can read, or that holds no token.
    """

    def __init__(self, section: SandboxSection) -> None:
        assert section.url is not None
        file, self._url = section.token_file, section.url
        self._token = None if file is None else TokenFile(file=file, key="sandbox.token_file", private=True)

    @override
    async def execute(self, program: SandboxProgram, limits: Limits) -> Ran:
        body = json.dumps(
            {
                "argv": None if program.argv is None else list(program.argv),
                "stdin": base64.b64encode(program.stdin).decode(),
                "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
                "limits": asdict(limits),
            }
        ).encode()
        try:
            answer = await retried(
                lambda: self._attempt(body, limits), retries=_RETRIES, wait=_WAIT_SECONDS, about=self._url
            )
            return _ran(answer, limits)
        except (TryAgain, ValueError) as error:
            raise SandboxError(f"{self._url}: {error}") from error

    async def _attempt(self, body: bytes, limits: Limits) -> bytes:
        seconds, most = limits.seconds + _SLACK_SECONDS, 12 * limits.output_bytes + (1 << 16)

        async def ask(token: str) -> StatusAndBody:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return await post_json(self._url, body, headers, most=most, seconds=seconds, limit=f"{seconds:g} s")

        status, answer = await (self._token.answer(ask) if self._token else ask(""))
        if len(answer) > most:
            raise ValueError(f"the answer is longer than {most} bytes")
        if self._token and (advice := self._token.refused(status)):
            raise TryAgain(f"status {status}: {beginning_of(answer)}{advice}")
        check_status(status, answer)
        return answer


def _ran(answer: bytes, limits: Limits) -> Ran:
    """Raises ValueError that says what is wrong with an answer."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON: {beginning_of(answer)}") from error
    if not isinstance(value, Mapping):
        raise ValueError("the answer is no JSON object")
    ended: Any = value.get("ended")
    status, seconds = value.get("exit"), value.get("seconds")
    texts = [value.get(key) for key in ("stdout", "stderr")]
    whole = isinstance(status, int) and not isinstance(status, bool)
    if ended not in get_args(ProgramEnd):
        raise ValueError(f"ended is {ended!r:.80}; it must be one of {', '.join(get_args(ProgramEnd))}")
    if whole != (ended == "done"):
        raise ValueError(f"exit is {status!r:.80} with ended={ended}; it must be the status if done, else null")
    if not all(isinstance(text, str) and len(text) <= limits.output_bytes for text in texts):
        raise ValueError(f"stdout and stderr must be texts of at most {limits.output_bytes} characters")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise ValueError(f"seconds is {seconds!r:.80}; it must be a number")
    return Ran(ended=ended, exit=status, stdout=str(texts[0]), stderr=str(texts[1]), seconds=float(seconds))
