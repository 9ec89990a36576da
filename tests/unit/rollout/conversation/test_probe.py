"""What the probe says of the families' templates, and of one that shows the number of messages."""

from __future__ import annotations

import copy

import pytest

from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.probe import TemplateReport, probe_template
from tests.unit.rollout.conversation.families import FAMILIES, tokenizer_of


def probed(name: str) -> TemplateReport:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in {family.stop, family.stop_of_calls}]
    return probe_template(ChatTemplate(tokenizer, options=family.options), stops)


@pytest.mark.parametrize(
    ("name", "habit", "rows"),
    [
        ("qwen3", "drops thinking at user turns", 10 / 8),  # of eight conversations one has three rows
        ("glm", "drops thinking at user turns", 10 / 8),
        ("chatml", "drops thinking at every turn", 12 / 8),  # it has no place for reasoning
        ("deepseek", "drops thinking at every turn", 12 / 8),
        ("gptoss", "rewrites", 13 / 8),  # and ends answers with <|end|>, where <|return|> is sampled
    ],
)
def test_it_names_what_families_do_and_what_it_costs(name: str, habit: str, rows: float) -> None:
    found = probed(name)
    assert (found.habit, found.rows, found.refused) == (habit, rows, {})
    assert found.shows_tools == (name != "deepseek")
    assert ("it shows no tools" in found.describe()) == (name == "deepseek")


def test_a_template_that_shows_the_number_of_messages_makes_every_turn_a_row() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{ messages | length }}" + str(tokenizer.chat_template)
    found = probe_template(ChatTemplate(tokenizer), [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert found.habit == "rewrites"
    assert found.rows == 22 / 8  # as many as turns
    assert (
        "the chat template rewrites: 2.75 rows a trajectory in 8 conversations; 2 with a tool's result (context)"
        in (found.describe())
    )


def test_what_it_refuses_is_said() -> None:
    found = probed("llama3")
    assert list(found.refused) == ["two results"]
    assert "refused: two results: the model's chat template refuses these messages: " in found.describe()
    assert "single tool-calls at once" in found.describe()


def test_the_tiny_models_template_appends_all_but_thinking() -> None:
    tokenizer = byte_tokenizer()
    found = probe_template(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    assert {name for name, why in found.begun.items() if why} == {"thinking before calls", "thinking before answers"}
