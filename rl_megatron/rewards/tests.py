"""Rewards a completion whose Python passes its problem's tests. docs/data.md shows the forms of tests.

The expected output never enters the sandbox: a program gets a test's input, and its output or return value is compared
here. So no code can find the answer, whatever it reads.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from io import StringIO
from typing import Any

from rl_megatron.config.sections.reward import TestsSection
from rl_megatron.errors import RewardError, task_group
from rl_megatron.files import field_value, parse
from rl_megatron.rewards.scoring import paused_while_queued
from rl_megatron.sandbox.executors import Sandbox
from rl_megatron.types import Completion, Prompt, RewardResult

_FENCE = re.compile(r"( *)(`{3,}(?=[^`]*$)|~{3,})(.*)")  # its indent, itself, the text after it
_PYTHON = ("python", "py", "python3")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_CODE = "solution.py"
_CALLER = """import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
name, arguments = json.load(sys.stdin)
import solution
owner = solution.Solution() if hasattr(solution, "Solution") else solution
json.dump(getattr(owner, name)(*arguments), answers)
answers.close()
"""


@dataclass(frozen=True, slots=True)
class _Test:
    given: str  # standard input; for a function, JSON of its name and arguments
    wanted: Any  # standard output; for a function, its return value
    length: int  # bytes that a correct program prints
    calls: bool
    wrapped: bool = False  # APPS: the return value may be the first item of ``wanted``


class PassedTests:
    """The reward by tests. Each test is a separate program in the sandbox, before those of later groups; with score=all
    the first that fails is the last that runs."""

    def __init__(self, section: TestsSection, sandbox: Sandbox) -> None:
        self._section, self._sandbox = section, sandbox

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[RewardResult]:
        """Raises RewardError for a problem without usable tests, SandboxError if programs cannot run."""
        tests, place = _tests(prompt, self._section.field), self._sandbox.place()
        with paused_while_queued() as begun:
            async with task_group() as group:
                running = [group.create_task(self._passed(extract_code(text), tests, place, begun)) for text in texts]
        return [RewardResult(total=task.result()) for task in running]

    async def _passed(self, code: str, tests: Sequence[_Test], place: int, on_start: Callable[[], None]) -> float:
        if not code.strip():
            return 0.0
        passed = 0
        for test in tests:
            right = await self._passes(code, test, place, on_start)
            if not right and self._section.score == "all":
                return 0.0
            passed += right
        return passed / len(tests)

    async def _passes(self, code: str, test: _Test, place: int, on_start: Callable[[], None]) -> bool:
        limits = replace(self._sandbox.limits, output_bytes=self._sandbox.limits.output_bytes + test.length)
        if not test.calls:
            ran = await self._sandbox.run(code, stdin=test.given, limits=limits, place=place, on_start=on_start)
            return ran.ended == "done" and ran.exit == 0 and same_output(ran.stdout, test.wanted)
        files = {_OWN_CODE: code}
        ran = await self._sandbox.run(
            _CALLER, stdin=test.given, files=files, limits=limits, place=place, on_start=on_start
        )
        if ran.ended != "done" or ran.exit != 0:
            return False
        try:
            answer = json.loads(ran.stdout)
        except (ValueError, RecursionError):
            return False
        return bool(answer == test.wanted or (test.wrapped and answer == test.wanted[0]))


def extract_code(text: str) -> str:
    """Returns the last fenced block after any thinking that is marked as Python, or the last without a language, or
    the whole text."""
    said = text.rpartition("</think>")[2].replace("\r\n", "\n")
    blocks = {language in _PYTHON: block for language, block in _fenced(said) if language in ("", *_PYTHON)}
    return blocks.get(True, blocks.get(False, said))


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """Yields the language of each fenced block, in lower case, and its lines without their common indent. Fences are
    paired as in CommonMark: one in a block is a part of it, and ends it only if it is as long and no deeper."""
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.expandtabs(4).rstrip())
        if opened is None:
            opened, lines = fence, []
        elif fence and not fence[3] and fence[2].startswith(opened[2]) and len(fence[1]) <= len(opened[1]) + 3:
            yield "".join(opened[3].lower().split()[:1]), textwrap.dedent("".join(lines))
            opened = None
        else:
            lines.append(f"{line}\n")


def same_output(printed: str, wanted: str) -> bool:
    """True if two outputs have the same lines of words, without empty lines at the end. Numbers are compared by their
    values, as Python reads them: 1e1 and 1_0 are 10."""
    ours, theirs = (text.rstrip().split("\n") for text in (printed, wanted))
    return len(ours) == len(theirs) and all(
        len(mine := one.split()) == len(its := other.split()) and all(map(_same_word, mine, its))
        for one, other in zip(ours, theirs, strict=True)
    )


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        left, right = Decimal(one), Decimal(other)
    except InvalidOperation:
        return False
    return left.is_finite() and right.is_finite() and left == right


def _tests(prompt: Prompt, field: str) -> list[_Test]:
    """Reads a problem's tests. Raises RewardError that names the problem and the error in its tests."""
    where = f"prompt {prompt.id!r}: its field {field!r} (reward.tests.field)"
    try:
        given = field_value(prompt.meta, field)
    except KeyError:
        raise RewardError(
            f"{where} is not among the row's others, {', '.join(sorted(prompt.meta)) or 'none'}: name one of these. "
            "Texts of data.fields.prompt and data.fields.answer are not among them: have these name others"
        ) from None
    try:
        value = parse(given) if isinstance(given, str) else given
    except ValueError as error:
        raise RewardError(f"{where} is not JSON: {error}") from error
    if isinstance(value, Mapping) and isinstance(value.get("tests"), Sequence):
        function, rows = value.get("function"), list(value["tests"])
    elif isinstance(value, Mapping):  # APPS
        function, ins, outs = value.get("fn_name"), value.get("inputs"), value.get("outputs")
        if not isinstance(ins, Sequence) or not isinstance(outs, Sequence) or len(ins) != len(outs):
            raise RewardError(f"{where} needs inputs and outputs, two lists of one length")
        rows = [{"input": one, "output": other} for one, other in zip(ins, outs, strict=True)]
    else:
        function, rows = None, list(value) if isinstance(value, Sequence) else []
    if not rows or not all(isinstance(row, Mapping) and {"input", "output"} <= set(row) for row in rows):
        raise RewardError(f"{where} holds no tests: give a list of {{input, output}}, or APPS's inputs and outputs")
    if function is not None and not (isinstance(function, str) and _NAME.fullmatch(function)):
        raise RewardError(f"{where}: {function!r:.80} is no name of a function")
    apps = isinstance(value, Mapping) and "fn_name" in value
    try:
        return [_test(row["input"], row["output"], function, apps=apps) for row in rows]
    except (ValueError, TypeError) as error:
        raise RewardError(f"{where}: {error}") from error


def _test(given: Any, wanted: Any, function: str | None, *, apps: bool) -> _Test:
    if function is None:
        if not isinstance(given, str) or not isinstance(wanted, str):
            raise ValueError("input and output of a program are texts")
        return _Test(given, wanted, len(wanted.encode(errors="replace")), calls=False)
    arguments = [parse(line) for line in StringIO(given, newline=None)] if isinstance(given, str) else list(given)
    printed = json.dumps(parse(wanted) if isinstance(wanted, str) else wanted)
    answer = json.loads(printed)
    wrapped = apps and isinstance(answer, list) and bool(answer)
    return _Test(json.dumps([function, arguments]), answer, len(printed), calls=True, wrapped=wrapped)
