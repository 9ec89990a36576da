"""Chat templates are a model's own: one that loops ends with an error, in whatever thread it renders."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from jinja2 import TemplateRuntimeError
from transformers import PreTrainedTokenizerBase

from rl_megatron import chat_templates
from rl_megatron.chat_templates import bounded_rendering
from rl_megatron.config.sections.data import FileData
from rl_megatron.data.problems.rendering import Record, rendered
from rl_megatron.errors import DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.messages import MessagesRefused

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"  # 1e10 turns, hours
GREAT = "{% for i in range(10**12) %}{% endfor %}"  # which Jinja's sandbox refuses
SAID = r"did not end within 0\.2 s of processor time; the model's chat template may loop without end"
ASKED = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.2)
    monkeypatch.setattr(chat_templates, "_BETWEEN_LOOKS", 0.05)


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(("template", "said"), [(ENDLESS, SAID), (GREAT, "Range too big")])
def test_a_conversation_and_a_row_are_refused_by_a_template_that_would_not_end(template: str, said: str) -> None:
    tokenizer = tokenizer_with(template)
    with pytest.raises(MessagesRefused, match=said):
        ChatTemplate(tokenizer).begin(ASKED, ())
    data = FileData(type="files", train=Path("a"), eval=Path("b"), chat_template=True)
    with pytest.raises(DataError, match=rf"a\.jsonl:3: the tokenizer's chat template fails at it: .*{said}"):
        rendered(Record(texts=("1+1?", "2"), others={}), Path("a.jsonl"), 3, data, tokenizer)


def test_each_thread_has_its_own_limit_and_nothing_is_raised_behind_it() -> None:
    ended = list[str]()

    def render() -> None:
        try:
            with bounded_rendering():
                tokenizer_with(ENDLESS).apply_chat_template(ASKED, tokenize=False)
        except TemplateRuntimeError as error:
            ended.append(str(error))
        sum(range(10**6))  # a second, late exception would be raised here

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    with bounded_rendering():
        assert byte_tokenizer().apply_chat_template(ASKED, tokenize=False)
    for thread in threads:
        thread.join()
    assert len(ended) == 2


def test_an_end_that_meets_the_limit_is_late_and_leaves_nothing_to_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch raises just before the thread says that it has ended."""
    end = chat_templates._watch.end

    def meets(thread: int) -> None:
        with chat_templates._watch._lock:
            del chat_templates._watch._until[thread]
            chat_templates._raise_late(thread)
        end(thread)

    monkeypatch.setattr(chat_templates._watch, "end", meets)
    with pytest.raises(TemplateRuntimeError, match=SAID), bounded_rendering():
        pass
    with pytest.raises(TemplateRuntimeError, match=SAID), bounded_rendering():
        raise KeyError
    sum(range(10**6))


def test_a_limit_that_a_template_swallows_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch has raised, and nothing is left to be raised where the rendering ends."""
    with pytest.raises(TemplateRuntimeError, match=SAID), bounded_rendering(), chat_templates._watch._lock:
        chat_templates._watch._until.clear()


def test_calls_run_under_a_profiler_after_a_rendering() -> None:
    """Where a thread is left to look for an exception, CPython 3.11 does so for ever at its next call under one."""
    program = """
import sys
from rl_megatron.chat_templates import bounded_rendering
with bounded_rendering():
    pass
sys.setprofile(lambda frame, event, _: None)
print((lambda: 3)())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3\n"
