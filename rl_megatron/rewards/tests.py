"""Rewards a completion whose Python passes its problem's tests. docs/rewards.md shows the forms of tests.

What a test expects never enters the sandbox: a program gets a test's input, and what it prints or returns is compared
here. So no code can find the answer, whatever it reads.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rl_megatron.config.sections.reward import TestsSection
from rl_megatron.errors import RewardError
from rl_megatron.json_text import parse
from rl_megatron.sandbox.table import Sandbox
from rl_megatron.types import Completion, Prompt, Scored

_FENCED = re.compile(r"^```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^```", re.S | re.M)
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
    given: str  # standard input; of a function, JSON of its name and arguments
    wanted: Any  # standard output; of a function, what it returns
    calls: bool


class PassedTests:
    """Each test is a program of its own in the sandbox; with score=all the first that fails is the last that runs."""

    def __init__(self, section: TestsSection, sandbox: Sandbox) -> None:
        self._section, self._sandbox = section, sandbox

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        """Raises RewardError for a problem without usable tests, SandboxError where programs cannot run."""
        tests = _tests(prompt, self._section.field)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._passed(code_of(text), tests)) for text in texts]
        return [Scored(total=task.result()) for task in running]

    async def _passed(self, code: str, tests: Sequence[_Test]) -> float:
        if not code.strip():
            return 0.0
        passed = 0
        for test in tests:
            right = await self._passes(code, test)
            if not right and self._section.score == "all":
                return 0.0
            passed += right
        return passed / len(tests)

    async def _passes(self, code: str, test: _Test) -> bool:
        if not test.calls:
            ran = await self._sandbox.run(code, stdin=test.given)
            return ran.ended == "done" and ran.exit == 0 and same_output(ran.stdout, test.wanted)
        ran = await self._sandbox.run(_CALLER, stdin=test.given, files={_OWN_CODE: code})
        if ran.ended != "done" or ran.exit != 0:
            return False
        try:
            answer = json.loads(ran.stdout)
        except (ValueError, RecursionError):
            return False
        return bool(answer == test.wanted)


def code_of(text: str) -> str:
    """The last block of Python between fences, behind any thinking; without fences the whole text."""
    said = text.rpartition("</think>")[2]
    blocks = _FENCED.findall(said)
    return str(blocks[-1]) if blocks else said


def same_output(printed: str, wanted: str) -> bool:
    """Whether two outputs have the same lines of words, up to space at the ends; numbers are equal by their values."""
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
    """Raises RewardError that names the problem and what is wrong with its tests."""
    where = f"prompt {prompt.id!r}: its field {field!r} (reward.tests.field)"
    given = prompt.meta.get(field)
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
    try:
        return [_test(row["input"], row["output"], function) for row in rows]
    except (ValueError, TypeError) as error:
        raise RewardError(f"{where}: {error}") from error


def _test(given: Any, wanted: Any, function: str | None) -> _Test:
    if function is None:
        if not isinstance(given, str) or not isinstance(wanted, str):
            raise ValueError("input and output of a program are texts")
        return _Test(given, wanted, False)
    arguments = [parse(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
    answer = parse(wanted) if isinstance(wanted, str) else wanted
    return _Test(json.dumps([function, arguments]), json.loads(json.dumps(answer)), True)
