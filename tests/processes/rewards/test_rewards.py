"""Each reward against answers graded by hand, also where programs and math-verify run in processes of their own."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from rl_megatron import bounded
from rl_megatron.bounded import BoundedProcess, LimitExceeded, ProcessFailed
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.reward import EnvironmentSection, RewardSection, SandboxSection
from rl_megatron.environments.registry import resolve_environment
from rl_megatron.errors import ConfigError, RewardError, SandboxError
from rl_megatron.rewards import rules, threads
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.rewards.scoring import score as judged
from rl_megatron.rewards.tests import extract_code, same_output
from rl_megatron.sandbox import executors as here
from rl_megatron.sandbox.executors import Executor, Limits, Ran, Sandbox, SandboxProgram, _Slots, find_fence_problem
from rl_megatron.types import Prompt, RewardResult
from tests.completions import completion
from tests.unit.rewards.test_rewards import LATEX, score
from tests.unit.rewards.test_time_limit import _processes_of_math_verify, _programs, _ranks, _requests, _threads


def test_math_verify_knows_equal_expressions() -> None:
    assert score("math_verify", r"\frac{1}{2}", r"\boxed{0.5}", "so it is 1/2", "it is 2", "?") == [1, 1, 0, 0]
    assert score("math_verify", "work\n#### 1,000", "The answer is 1000.", "100") == [1, 0]
    assert score("math_verify", "x+1", "$1+x$", "$x-1$") == [1, 0]


@pytest.mark.parametrize("answer", LATEX)
def test_math_verify_reads_latex_without_dollars_as_latex(answer: str) -> None:
    assert score("math_verify", answer, rf"The answer is $\boxed{{{answer}}}$.") == [1]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"3\sqrt{13}", r"\sqrt{117}", "3"),
        ("6 - 5i", "-5i + 6", "5"),
        ("2k+2", "2(k+1)", "2"),
        ("1,2,3", "3, 2, 1", "1.2"),
        (r"1\frac{4}{5}", "1.8", "0.8"),
        ("10 or 12", "10, 12", "12"),
        ("10,000 dollars", "10000", "10"),
        ("1.5 million dollars", "1.5", "1"),
        ("1 000 000", "1000000", "0"),
        ("25%", r"25\%", "20"),
        ("£5", "5", "6"),
    ],
)
def test_math_verify_reads_the_whole_answer(answer: str, right: str, wrong: str) -> None:
    assert score("math_verify", answer, rf"$\boxed{{{right}}}$", rf"$\boxed{{{wrong}}}$", f"so {wrong}") == [1, 0, 0]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("1e-3", "0.001", "1"),
        ("0.00001", "1e-05", "1"),
        ("1.5e+16", r"1.5 \times 10^{16}", "1.5"),
        ("e-3", "e-3", "0.001"),
        (r"2e^{-3}", r"\frac{2}{e^3}", "0.002"),
        ("1,000", "1{,}000", "1"),
    ],
)
def test_math_verify_reads_powers_of_ten(answer: str, right: str, wrong: str) -> None:
    assert score("math_verify", answer, rf"$\boxed{{{right}}}$", rf"$\boxed{{{wrong}}}$") == [1, 0]


SYMBOLS = (  # an answer, completions that are right, and wrong ones
    ("2^x", ("2ˣ",), ("2x", "2ₓ", "5 x²")),
    ("12", ("12 m^2", "12 cm³.", "it is 12 m/s²"), ("12²", "12 x^2")),
    ("log₂3", ("log₂ 3", r"$\log_2 3$"), ("3",)),
    ("10^−3", ("10⁻³", "0.001"), ("0.01", "10^3")),
    ("2√3", ("so 2√3 cm", r"\boxed{2\sqrt{3}}", "√12", "x = 2 sqrt(3)"), ("2", "3", "2√5", "x = 2√30")),
    ("10", ("10", "it is 10 m²."), ("10²", "it is 10²!", "10⁻¹", "10½", "10√2", "10π", "10·2", "x¹⁰", "10∞")),
    ("3", ("3", "$3$", "∛27"), ("3×10⁸", "3⋅2", r"so it is 3\pi", "3¼", "√3", "3∕4", "3³")),
    ("3×10⁸", ("300000000", "3e8", "speed 3 · 10⁸ m/s", r"$3 \times 10^8$", "３×１０⁸"), ("3", "10⁸")),
    ("-2½", ("-5/2", "−2 1/2", r"$-2\frac{1}{2}$"), ("-2", "-3/2", "2½")),
    ("–5", ("-5", "−5", "so x = —5", "$−5$"), ("5", "x–6")),
    ("-∞", (r"\boxed{-\infty}", "−∞"), ("∞", "0")),
    ("(−∞, 3] ∪ [4, 5]", (r"$(-\infty,3]\cup[4,5]$", "the set (−∞, 3] ∪ [4, 5]."), ("[4, 5]", "$(−∞, 3]$")),
    ("x ≤ 5", (r"$x \leq 5$", "thus 5 ≥ x."), ("x ≥ 5", "x ≤ 6", "$x < 5$")),
    ("x²+x₁", ("$x_1+x^2$", "it is x² + x₁."), ("$2x+x_1$", "x³+x₁")),
    ("sin²θ", (r"$\sin^2\theta$", "it is sin²θ."), ("θ", "sin²α")),
    ("90°", ("90", r"$90^\circ$", "９０ °"), ("9",)),
    ("70\u2009000", ("70,000", r"\boxed{70\,000}"), ("70", "0")),
    (r"0.\overline{3}", ("1/3", "0.3̅"), ("0", "0.3")),
    ("ℝ", (r"$\mathbb{R}$", "ℝ"), ("R", "0")),
    ("B", ("The answer is **B**.", "(B)", "$B$"), ("The answer is A.", "It is not B.", "A or B")),
    ("1e-7", ("0.0000001", "10⁻⁷", r"\frac{1}{10^7}"), ("2e-7", "0", r"$1.01\times10^{-7}$")),
    (r"\frac{1}{2^{99}}", (r"$2^{-99}$",), (r"$\frac{1}{2^{98}}$",)),
    (r"\{10^{-20}, 1\}", (r"$\{1, 10^{-20}\}$",), (r"$\{1, 2\times10^{-20}\}$",)),
    ("6.02e23", (r"$6.02 \times 10^{23}$", "6.02×10²³"), ("6.03e23",)),
    ("1/3", ("0.333333",), ("0.333",)),
    ("9", (r"$9\%$",), ("0.09",)),
    (
        "7",
        ("answer: 7 (as 7² = 49)", "answer: 7 as 7² is 49", "The answer is $7$, since $7^2 = 49$."),
        ("answer: 49 (for 7 is its root)", r"8 (as \boxed{6})", "answer: 8 since √49 = 7"),
    ),
    ("2√3", ("The answer is 2√3 (as (2√3)² = 12).", r"so 4 (as \boxed{2\sqrt{3}} is not)"), ("12 (as (2√3)² = 12)",)),
    ("C", ("The answer is C (as 7² = 49)",), ("The answer is B (as 7² = 49), not C",)),
)


@pytest.mark.parametrize(("answer", "right", "wrong"), SYMBOLS, ids=[answer for answer, _, _ in SYMBOLS])
def test_math_verify_reads_symbols_and_tiny_numbers(
    answer: str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    assert score("math_verify", answer, *right, *wrong) == [1] * len(right) + [0] * len(wrong)


def test_math_verify_refuses_an_answer_it_cannot_read() -> None:
    with pytest.raises(RewardError, match="'train:7'"):
        score("math_verify", "", "1")


# The reward of code that passes its problem's tests: their forms, what counts as equal, what code cannot see.
WHY = asyncio.run(find_fence_problem())
fenced = pytest.mark.skipif(bool(WHY), reason=f"this machine fences nothing: {WHY}")
SANDBOX = SandboxSection()
DOUBLE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}
DONE = completion((0,))


def rewarded(tests: Any, texts: Sequence[str], sandbox: SandboxSection = SANDBOX, **keys: Any) -> list[float]:
    section = RewardSection(function="tests", tests=keys)  # type: ignore[arg-type]
    reward = resolve_reward(section, sandbox=Sandbox(sandbox))
    prompt = Prompt(id="p", text="", token_ids=(0,), answer="", meta={"tests": tests})
    return [one.total for one in asyncio.run(reward(prompt, [DONE] * len(texts), texts))]


@fenced
def test_programs_are_right_where_every_output_is() -> None:
    texts = [
        "Think.\n```python\nwrong\n```\nBetter:\n```python\nprint(2 * int(input()))\n```\nDone.",
        "print(4)",
        "print(2 * int(input())); raise SystemExit(1)",
        "",
    ]
    assert rewarded(DOUBLE, texts) == [1.0, 0.0, 0.0, 0.0]
    assert rewarded(json.dumps(DOUBLE), texts[:2], score="fraction") == [1.0, 0.5]
    listed = [{"input": "2", "output": "4"}, {"input": "5", "output": "11"}]
    assert rewarded(listed, texts[:1], score="fraction") == [0.5]


@fenced
def test_functions_are_called_alone_or_as_a_method_whatever_they_print() -> None:
    asked = {"function": "add", "tests": [{"input": "[1, 2]\n3", "output": "[1, 2, 3]"}]}
    alone = "def add(a, b):\n    print('[1, 2, 3]')\n    return a + [b]"
    method = "class Solution:\n    def add(self, a, b):\n        return (*a, b)"
    prints = "def add(a, b):\n    print('[1, 2, 3]')\n    return 0"
    assert rewarded(asked, [alone, method, prints, "x = 1", "syntax error"]) == [1.0, 1.0, 0.0, 0.0, 0.0]


@fenced
def test_a_function_of_apps_may_return_what_its_output_wraps() -> None:
    returns = [f"def f(): return {answer}" for answer in ("3", "[3]", "[3, 4]", "4")]

    def passed(output: Any) -> list[float]:
        return rewarded({"fn_name": "f", "inputs": [[]], "outputs": [output]}, returns)

    assert passed(3) == [1.0, 0.0, 0.0, 0.0]
    assert passed([3]) == [1.0, 1.0, 0.0, 0.0]
    assert passed("[[3, 4]]") == [0.0, 0.0, 1.0, 0.0]
    assert passed([]) == [0.0, 0.0, 0.0, 0.0]
    assert rewarded({"function": "f", "tests": [{"input": "", "output": "[3]"}]}, returns) == [0.0, 1.0, 0.0, 0.0]


@fenced
@pytest.mark.parametrize("within", ["\u2028", "\u2029", "\x85"])
def test_arguments_are_lines_of_json_whatever_unicode_calls_the_end_of_a_line(within: str) -> None:
    text = json.dumps(f"a{within}b", ensure_ascii=False)
    for end in ("\n", "\r\n"):
        asked = {"function": "f", "tests": [{"input": f"{text}{end}3{end}", "output": f"[{text}, 3]"}]}
        assert rewarded(asked, ["def f(x, y): return x, y", "def f(x, y): return y, x"]) == [1.0, 0.0]


@fenced
def test_output_is_limited_beyond_what_is_expected() -> None:
    printed = [f"print('é' * 40000 + ' ' * {spaces}, end='')" for spaces in (65536, 65537)]
    assert rewarded([{"input": "", "output": "é" * 40000}], printed) == [1.0, 0.0]
    returned = {"function": "f", "tests": [{"input": "", "output": json.dumps("é" * 40000)}]}
    assert rewarded(returned, ["def f(): return 'é' * 40000"]) == [1.0]


@fenced
def test_what_is_expected_never_enters_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[bytes] = []
    real = here._order

    def kept(*given: Any, **keys: Any) -> bytes:
        orders.append(real(*given, **keys))
        return orders[-1]

    monkeypatch.setattr(here, "_order", kept)
    searching = """
import gc, os, sys
seen = [repr(sys.argv), repr(dict(os.environ)), sys.stdin.read(), repr(gc.get_objects())]
for folder, _, names in os.walk("/"):
    if not folder.startswith(("/usr", "/root", "/dev", "/lib", "/home", "/opt")):
        for name in names:
            try:
                seen.append(open(os.path.join(folder, name), errors="replace").read())
            except OSError:
                pass
print("hidden" + "-answer" if any("hidden" + "-answer" in text for text in seen) else "nothing")
"""
    programs = {"inputs": ["1"], "outputs": ["hidden-answer"]}
    functions = {"function": "f", "tests": [{"input": "1", "output": '"hidden-answer"'}]}
    assert rewarded(programs, [searching]) == [0.0]
    assert rewarded(functions, [f"def f(x):\n  {searching!r}\n  return globals()"]) == [0.0]
    assert len(orders) == 2
    for order in orders:
        sent = json.loads(order)
        texts = [base64.b64decode(one).decode() for one in (sent["stdin"], *sent["files"].values())]
        assert not any("hidden-answer" in text for text in [order.decode(), *texts])


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("1 2\n", "1  2", True),
        ("1\n2", "1 2", False),
        ("1.0", "1", True),
        ("1.50", "1.5", True),
        ("0.1", "0.10000001", False),
        ("nan", "NaN", False),
        ("sNaN 1", "sNaN 1.0", True),
        ("a\n\n", "a", True),
        ("\na", "a", False),
        ("  1_0\t\n", "10", True),
        ("", "", True),
        ("1e999999999", "1", False),
        ("Yes", "yes", False),
    ],
)
def test_outputs_are_equal_word_by_word(printed: str, wanted: str, same: bool) -> None:
    assert same_output(printed, wanted) is same


def test_the_last_block_behind_the_thinking_is_the_code() -> None:
    assert extract_code("<think>\n```python\na\n```\n</think>\n```py\nb\n```\n") == "b\n"
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("```\nc\n```") == "c\n"
    assert extract_code("```python\nd\n") == "```python\nd\n", "a block that is cut off is none"


RIGHT = "if 1:\n    print(1)\n"
BLOCK = f"```python\n{RIGHT}```\n"
NESTED = 'def f():\n    """As in\n\n    ```\n    f()\n    ```\n    """\n'


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"```bash\npython solve.py\n```\nThe code:\n{BLOCK}", RIGHT),
        (f"{BLOCK}It prints\n```text\n1\n```\nand then\n```text\n2\n```\n", RIGHT),
        (f"{BLOCK}It prints\n```\n1\n```\n", RIGHT),
        (f"```\nwrong\n```\n{BLOCK}", RIGHT),
        (f"```\nwrong\n```\n```\n{RIGHT}```\n```cpp\nint x;\n```", RIGHT),
        (BLOCK.replace("python", 'Python3 title="a"'), RIGHT),
        (BLOCK.replace("\n", "\r\n"), RIGHT),
        ("1. So:\n" + textwrap.indent(BLOCK, "   "), RIGHT),
        (f"````markdown\n{BLOCK}````\n~~~py\n{RIGHT}```\n~~~~  \n", f"{RIGHT}```\n"),
        (f"```print(0)``` and\n{BLOCK}", RIGHT),
        (f"```python\n{NESTED}```", NESTED),
        ("```py\n" * 3 + "```", "```py\n```py\n"),
    ],
)
def test_fences_are_paired_and_pythons_come_first(text: str, code: str) -> None:
    assert extract_code(text) == code
    assert extract_code(f"{text}\n```python\ncut off") == code


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "holds no tests"),
        ("{", "is not JSON"),
        ([], "holds no tests"),
        ([{"input": "1"}], "holds no tests"),
        ({"inputs": ["1"], "outputs": []}, "two lists of one length"),
        ({"inputs": [1], "outputs": ["1"]}, "input and output of a program are texts"),
        ({"function": "a.b", "tests": [{"input": "1", "output": "1"}]}, "no name of a function"),
        ({"function": "f", "tests": [{"input": "{", "output": "1"}]}, "'tests'"),
    ],
)
def test_a_problem_without_usable_tests_is_named(tests: Any, said: str) -> None:
    with pytest.raises(RewardError, match=f"prompt 'p'.*{said}"):
        rewarded(tests, ["x"])


@fenced
def test_tests_may_be_a_field_of_an_object_and_what_a_row_has_is_said() -> None:
    assert rewarded({"inner": DOUBLE}, ["print(2 * int(input()))"], field="tests.inner") == [1.0]
    with pytest.raises(RewardError, match=r"'answer' \(reward\.tests\.field\) is not among the row's others, tests"):
        rewarded(DOUBLE, ["x"], field="answer")


def test_a_sandbox_that_runs_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "find_bubblewrap", lambda: "")
    with pytest.raises(SandboxError, match="there is no bwrap; install your system's bubblewrap, or pip install"):
        rewarded(DOUBLE, ["x", "y"])


async def test_groups_that_wait_for_slots_end_in_the_order_in_which_they_came() -> None:
    groups, texts, tests, ran = 4, 2, 3, list[int]()

    class Noting(Executor):
        @override
        async def execute(self, program: SandboxProgram, limits: Limits) -> Ran:
            ran.append(int(program.stdin))
            await asyncio.sleep(0)
            return Ran(ended="done", exit=0, stdout="1", stderr="", seconds=0.0)

    sandbox = Sandbox(SandboxSection())
    sandbox._executor, sandbox._slots = Noting(), _Slots(1)
    reward = resolve_reward("tests", sandbox=sandbox)
    given = [{"tests": [{"input": str(group), "output": "1"}] * tests} for group in range(groups)]
    prompts = [Prompt(id="p", text="", token_ids=(0,), answer="", meta=one) for one in given]
    await asyncio.gather(*(reward(prompt, [DONE] * texts, ["x"] * texts) for prompt in prompts))
    ends = [len(ran) - 1 - ran[::-1].index(group) for group in range(groups)]
    # Where one text alone is left, a later group runs a test while its next comes.
    assert all(end < (group + 1) * texts * tests + tests for group, end in enumerate(ends)), ran


def test_keys_of_the_sandbox_need_a_reader() -> None:
    with pytest.raises(ConfigError, match=r"sandbox.seconds=3 does nothing: only reward.function=tests and env"):
        load_config("tiny_cpu", ["sandbox.seconds=3"])
    assert load_config("tiny_cpu", ["sandbox.seconds=3", "reward.function=tests"]).sandbox.seconds == 3
    with pytest.raises(ConfigError, match=r"reward.tests.score=fraction does nothing"):
        load_config("tiny_cpu", ["reward.tests.score=fraction"])


@fenced
def test_an_environment_that_takes_a_sandbox_is_given_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sandboxed_for_test.py").write_text("async def solve(task, model, *, sandbox): return sandbox\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = resolve_environment(EnvironmentSection(function="sandboxed_for_test:solve"), SandboxSection(seconds=3))
    assert made.takes_sandbox
    sandbox = asyncio.run(made.solve(None, None))  # type: ignore[union-attr,arg-type]
    assert sandbox.limits.seconds == 3
    assert asyncio.run(sandbox.run("print(1)")).stdout == "1\n"
    assert not resolve_environment(EnvironmentSection(function="calculator")).takes_sandbox


# Texts over which math-verify computes for minutes end their own process, and cost nobody else a score.
WORKER = "rl_megatron.rewards.math_verify_worker"
POWER = r"The answer is $\boxed{9^{9^{9}}}$."
LOOP = "So we get\n\\[ x = \\boxed{42}\n" * 200  # brackets that stay open, as where a text is cut
STARTER = """
import asyncio, sys
from rl_megatron.bounded import BoundedProcess
from rl_megatron.rewards import rules
from rl_megatron.types import Prompt
start = BoundedProcess.start
def noted(self):
    process = start(self)
    print(process.pid, flush=True)
    return process
BoundedProcess.start = noted
asyncio.run(rules.math_verify(Prompt(id="a", text="", token_ids=(1,), answer="8"), [None], [sys.argv[1]]))
"""


def scored(answer: str, *texts: str) -> tuple[RewardResult, ...]:
    prompt, completions = Prompt(id="train:7", text="", token_ids=(1,), answer=answer), [completion((1,))] * len(texts)
    return asyncio.run(judged(rules.math_verify, prompt, completions, texts, limit=60.0))


@pytest.mark.parametrize("text", [POWER, LOOP])
def test_a_completion_that_runs_out_of_time_counts_0_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "LIMIT_SECONDS", 0.5)
    assert [one.total for one in scored("8", "$8$", text, "$7+1$", "$9$")] == [1, 0, 1, 0]


def test_a_pattern_that_backtracks_without_end_costs_its_completion_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "LIMIT_SECONDS", 0.3)
    reward, texts = rules.FormatReward("(a+)+b"), ("aab", "a" * 99, "aab")
    prompt = Prompt(id="train:7", text="", token_ids=(1,), answer="")
    found = asyncio.run(reward(prompt, [completion((1,))] * 3, texts))
    assert [one.total for one in found] == [1, 0, 1]


def test_an_answer_that_runs_out_of_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "LIMIT_SECONDS", 0.5)
    (one,) = scored(LOOP, "$42$")
    assert math.isnan(one.total)
    assert "'train:7'" in str(one.error)


def test_a_process_that_was_killed_is_replaced() -> None:
    worker = BoundedProcess(WORKER)
    for text, total in (("$8$", 1.0), ("$9$", 0.0)):
        assert worker.ask(3.0, "8", text) == {"total": total, "answer": text.strip("$")}
        assert worker.process is not None
        worker.process.kill()
        worker.process.wait()


def test_a_process_that_was_stopped_is_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a call that no pipe holds."""
    monkeypatch.setattr(bounded, "WAIT_SECONDS", 0.5)
    processes = []

    class Stopped(BoundedProcess):
        def start(self) -> subprocess.Popen[bytes]:
            processes.append(process := super().start())
            process.send_signal(signal.SIGSTOP)
            return process

    for text in ("$8$", "8" * (1 << 20)):
        with pytest.raises(ProcessFailed, match=r"stood still for 0\.5 s, twice"):
            Stopped(WORKER).ask(3.0, "8", text)
    assert [one.returncode for one in processes] == [-signal.SIGKILL] * 4


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rule", ["format", "math_verify"])
def test_a_fault_of_the_machine_is_no_wrong_answer(rule: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(BoundedProcess):
        fails = False

        def ask(self, seconds: float, *arguments: object) -> Any:
            self.fails = arguments[-1] is not None  # math_verify asks about the answer alone before
            monkeypatch.setattr(bounded, "WAIT_SECONDS", 0.5 if self.fails else 60.0)
            if self.fails and self.process is not None:
                self.process.send_signal(by)
            return super().ask(seconds, *arguments)

        def start(self) -> subprocess.Popen[bytes]:
            process = super().start()
            if self.fails:
                process.send_signal(by)
            return process

    monkeypatch.setattr(rules, "BoundedProcess", Faulty)
    monkeypatch.setattr(rules, "_mine", rules._Mine())
    reward = rules.FormatReward(".*8.*") if rule == "format" else rules.math_verify
    prompt = Prompt(id="train:7", text="", token_ids=(1,), answer="8")
    (one,) = asyncio.run(judged(reward, prompt, [completion((1,))], ["$8$"], limit=120.0))
    assert math.isnan(one.total)
    assert ("was killed twice by another" if by == signal.SIGKILL else "stood still for 0.5 s") in str(one.error)


def test_a_call_that_crashes_its_process_twice_is_to_blame() -> None:
    worker = BoundedProcess(WORKER)
    worker.command = (sys.executable, "-c", "import os; os.abort()")
    with pytest.raises(LimitExceeded, match="it crashed its process twice"):
        worker.ask(3.0, "8", "$8$")


def test_a_process_gets_no_variables_of_this_one_but_those_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    calls = {
        WORKER: ("8", "$8$"),
        "rl_megatron.rewards.format_worker": ("a", "a"),
        "rl_megatron.chat_templates": ("", ()),
    }
    for module, arguments in calls.items():
        worker = BoundedProcess(module)
        worker.ask(30.0, *arguments)  # the file is empty until the kernel has laid out the new program
        assert worker.process is not None
        with worker.process as process, open(f"/proc/{process.pid}/environ") as given:
            found = dict(one.split("=", 1) for one in given.read().split("\0")[:-1])
        del found["PYTHONPATH"]
        assert found == {"LANG": "C.UTF-8", "TZ": "Asia/Tokyo", "LD_LIBRARY_PATH": "/opt/lib"}


def test_a_process_that_fails_says_why() -> None:
    worker = BoundedProcess(WORKER)
    worker.command = (sys.executable, "-c", "raise SystemExit('no room here')")
    with pytest.raises(ProcessFailed, match="ended with status 1: no room here"):
        worker.ask(3.0, "8", "$8$")


def test_processes_end_with_the_one_that_started_them() -> None:
    command = [sys.executable, "-c", STARTER, POWER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as starter:
        assert starter.stdout is not None
        watched = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
        assert select.select([watched], [], [], 30.0)[0]
        os.close(watched)


# A reward's time limit counts its own call, not what groups before it take of what they share.
@pytest.mark.parametrize(
    "taken", [_threads, _processes_of_math_verify, _requests, _ranks, pytest.param(_programs, marks=fenced)]
)
def test_waits_for_what_groups_share_are_not_counted(
    taken: Callable[[], Coroutine[None, None, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_COMPUTES", 0.0)  # as if each thread computed
    asyncio.run(taken())
