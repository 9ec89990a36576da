"""A message whose role a family's template passes over is refused, and a developer's is the system's."""

from __future__ import annotations

import pytest

from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.messages import ChatMessage, MessagesRefused
from tests.unit.rollout.conversation.families import tokenizer_of

ASKED = {"role": "user", "content": "hi"}
SAID = [ASKED, {"role": "assistant", "content": "ok"}]


def of(role: str, content: str = "RESULT 42") -> ChatMessage:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("family", "roles"),
    [
        ("qwen3", ("function", "observation", "ipython")),
        ("glm", ("function", "ipython")),
        ("deepseek", ("function", "observation", "ipython")),
        ("gptoss", ("function", "observation", "ipython")),
    ],
)
def test_a_message_that_a_template_passes_over_is_refused_by_its_place(family: str, roles: tuple[str, ...]) -> None:
    template = ChatTemplate(tokenizer_of(family))
    for role in roles:
        with pytest.raises(MessagesRefused, match=rf"passes over message 3, of the role '{role}', which would be lost"):
            template.begin([*SAID, of(role)], ())
        template.render([*SAID, of(role, "")], ())  # nothing is lost
    assert "RESULT 42" in template.render([*SAID, of("user")], ())


def test_a_template_that_shows_every_role_refuses_none() -> None:
    for role in ("function", "ipython", "developer"):
        assert "RESULT 42" in ChatTemplate(tokenizer_of("llama3")).render([*SAID, of(role)], ())


@pytest.mark.parametrize("family", ["qwen3", "glm", "deepseek"])
def test_a_developer_is_the_system_where_that_is_shown_alone(family: str) -> None:
    template = ChatTemplate(tokenizer_of(family))
    by = [template.render([of(role), *SAID, ASKED], ()) for role in ("developer", "system", "developer")]
    assert by[0] == by[1] == by[2]
    assert "RESULT 42" in by[0]
