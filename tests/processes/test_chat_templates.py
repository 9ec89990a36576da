"""Chat templates are a model's own: one that takes too much ends with an error, in whatever thread it renders."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rl_megatron import bounded, chat_templates
from rl_megatron.agents.conversation.messages import UnsupportedMessages
from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.bounded import BoundedProcess
from rl_megatron.chat_templates import template_text
from rl_megatron.config.sections.data import FileData
from rl_megatron.data.problems.rendering import Record, rendered_rows
from rl_megatron.errors import ConfigError, DataError, SandboxError
from rl_megatron.models.tiny import byte_tokenizer
from tests.unit.rollout.conversation.families import FAMILIES
from tests.unit.rollout.endpoint.test_endpoint import ASK, TOKENIZER, Saying, episode

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"  # 1e10 turns, hours
SAID = r"it took more than 0\.3 s of processor time; the model's chat template may loop without end"
MEMORY = "it took more than 2048 MB of memory"
ASKED = [{"role": "user", "content": "1+1?"}]
DATA = FileData(type="files", train=Path("a"), eval=Path("b"), chat_template=True)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.3)


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDLESS, SAID),
        ("{{ (9 ** (9 ** 9)) | string | length }}", SAID),  # Jinja computes it as it compiles
        ("{% set n = messages | length + 8 %}{{ (n ** (n ** n)) | string | length }}", SAID),
        ("{{ ('%' ~ 3000000000 ~ 'd') % 1 }}", MEMORY),
        ("{{ ('%' ~ 3000000000 ~ 'd') | format(messages | length) }}", MEMORY),
        ("{{ '{:3000000000d}'.format(messages | length) }}", MEMORY),
        ("{{ messages[0].content.center(3000000000) }}", MEMORY),
        ("{{ messages[0].content * 3000000000 }}", MEMORY),
        ("{{ messages | tojson(indent=3000000000) }}", MEMORY),
        ("{{ range(10 ** 9) }}", "OverflowError: Range too big"),
        ("{% macro a(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}", "RecursionError: maximum recursion depth exceeded"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "RecursionError: maximum recursion depth exceeded"),
        ("{{ " + "1" * 5000 + " }}", "ValueError: Exceeds the limit"),
        ("{{ messages[0].content * 400000 }}", r"ValueError: its text has \d+ characters, more than 1048576"),
        ("{{ messages.no.one }}", "UndefinedError: 'list object' has no attribute 'no'"),
    ],
)
def test_a_conversation_and_a_row_are_refused_by_a_template_that_takes_too_much(template: str, said: str) -> None:
    tokenizer = tokenizer_with(template)
    with pytest.raises((UnsupportedMessages, ConfigError), match=said):
        ChatTemplate(tokenizer).begin(ASKED, ())
    bad = [Record(texts=("1+1?", "2"), others={})] * 2
    try:
        (error, _) = rendered_rows(bad, Path("a.jsonl"), 3, DATA, tokenizer)
    except DataError as raised:
        error = raised
    assert re.match(rf"a\.jsonl:3: the tokenizer's chat template fails at it: {said}", str(error))


def test_rows_of_one_call_are_those_of_calls_of_one() -> None:
    template = "{% if 'b' in messages[0].content %}{{ raise_exception('no b') }}{% endif %}{{ messages[0].content }}"
    rows = [Record(texts=(text, "2"), others={}) for text in ("a", "b", "c", "\ud800d")]
    found = [*rendered_rows(rows, Path("a.jsonl"), 1, DATA, tokenizer_with(template))]
    assert [one if isinstance(one, DataError) else one.text for one in found][::2] == ["a", "c"]
    assert "a.jsonl:2: the tokenizer's chat template fails at it: TemplateError: no b" in str(found[1])


def test_a_row_is_named_that_alone_takes_too_much() -> None:
    template = "{% if messages[0].content == 'b' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    rows = [Record(texts=(text, "2"), others={}) for text in ("a", "b", "c")]
    with pytest.raises(DataError, match=rf"^a\.jsonl:2: the tokenizer's chat template fails at it: {SAID}"):
        list(rendered_rows(rows, Path("a.jsonl"), 1, DATA, tokenizer_with(template)))


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (signal.SIGKILL, "was killed twice by another, with SIGKILL, as one is where memory is short"),
        (signal.SIGSTOP, r"stood still for 0\.5 s, twice; something had stopped it"),
    ],
)
def test_a_process_that_the_machine_ends_is_no_fault_of_the_template(
    by: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a row, which on_refused=drop would leave out, nor in a model's turn."""

    class Faulty(BoundedProcess):
        def start(self) -> subprocess.Popen[bytes]:
            (process := super().start()).send_signal(by)
            return process

    tokenizer = tokenizer_with("{{ messages[0].content }}")
    template, bad = ChatTemplate(tokenizer), [Record(texts=("1+1?", "2"), others={})]
    monkeypatch.setattr(bounded, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(chat_templates, "_process", Faulty("rl_megatron.chat_templates"))
    match = (
        rf"^a chat template could not be rendered, and is not to blame: its process {said}; give the job more memory"
    )
    with pytest.raises(SandboxError, match=match):
        list(rendered_rows(bad, Path("a.jsonl"), 3, DATA, tokenizer))
    with pytest.raises(SandboxError, match=match):
        template.begin(ASKED, ())


def test_a_signal_is_heeded_while_a_template_renders() -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Stop):
            template_text("{% set n = 9 %}{{ (n ** (n ** n)) | string | length }}", {})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert template_text("{{ a }}", {"a": "next"}) == "next"  # and not what the call before would have answered


async def test_a_turn_whose_template_waits_keeps_no_event_loop_waiting() -> None:
    template_text("", {})
    stopped = chat_templates._process.process
    assert stopped is not None
    conversation = episode(Saying("One."))
    for more in ([], [{"role": "assistant", "content": "One."}, *ASK]):
        stopped.send_signal(signal.SIGSTOP)
        turn = asyncio.create_task(conversation.reply([*ASK, *more], ()))
        asyncio.get_running_loop().call_soon(stopped.send_signal, signal.SIGCONT)  # after the turn has begun
        assert (await turn).text == "One."
    assert chat_templates._process.process is stopped  # no other took its place


async def test_a_turn_that_is_given_up_while_its_template_waits_leaves_its_conversation_as_it_was() -> None:
    begun, go = threading.Event(), threading.Event()

    class Waits(ChatTemplate):
        def begin(self, messages: Any, tools: Any) -> Any:
            begun.set()
            assert go.wait(20), "the event loop waits for the template"
            return super().begin(messages, tools)

    engine = Saying("One.")
    conversation = episode(engine, template=Waits(TOKENIZER, options=FAMILIES["qwen3"].options))
    given_up = asyncio.create_task(conversation.reply([{"role": "user", "content": "2?"}], ()))
    assert await asyncio.to_thread(begun.wait, 20)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    turn = asyncio.create_task(conversation.reply(ASK, ()))
    asyncio.get_running_loop().call_soon(go.set)
    assert (await turn).text == "One."
    (asked,) = engine.asked
    assert TOKENIZER.decode(asked.token_ids).count("1 + 22?") == 1
    assert [len(row.turns) for row in conversation.chains()] == [1]


def test_threads_have_their_own_texts() -> None:
    found = dict[int, str]()

    def render(number: int) -> None:
        found[number] = "".join(template_text("{{ a }}", {"a": number}) for _ in range(20))

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) * 20 for number in range(4)}


def test_a_forked_process_has_its_own() -> None:
    assert template_text("{{ a }}", {"a": 1}) == "1"
    own = chat_templates._process.process

    def render() -> None:
        assert template_text("{{ a }}", {"a": 2}) == "2"
        assert chat_templates._process.process is not own

    child = multiprocessing.get_context("fork").Process(target=render)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert template_text("{{ a }}", {"a": 3}) == "3"
    assert chat_templates._process.process is own


def test_the_process_ends_with_the_one_that_uses_it() -> None:
    started, ended = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=_render_and_wait, args=(ended,))
    child.start()
    watched = os.pidfd_open(int(os.read(started, 20)))
    child.kill()
    child.join()
    assert select.select([watched], [], [], 30.0)[0]
    for one in (watched, started, ended):
        os.close(one)


def _render_and_wait(pipe: int) -> None:
    template_text("", {})
    process = chat_templates._process.process
    assert process is not None
    os.write(pipe, str(process.pid).encode())
    time.sleep(60)
