"""The effects of a model's chat template on rows, found at a run's start by scripted conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_megatron.agents.conversation.messages import REASONING, ChatMessage, UnsupportedMessages, normalize_messages
from rl_megatron.agents.conversation.templates import Rewritten, Template, Tools

Habit = Literal["appends", "drops thinking at user turns", "drops thinking at every turn", "rewrites"]

_QUESTION: ChatMessage = {"role": "user", "content": "What is 1+1?"}
_SYSTEM: ChatMessage = {"role": "system", "content": "You add."}
_TOOLS: Tools = ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}},)
_SAYS: ChatMessage = {"role": "assistant", "content": "It is 2."}
_FOREIGN: ChatMessage = {"role": "assistant", "content": "Ça fait 2 – 二 🙂"}
_THINKS: ChatMessage = {**_SAYS, REASONING[0]: "One and one."}


def _calls(count: int, **others: str) -> ChatMessage:
    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": f"call_{i}", "type": "function", "function": function} for i in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls, **others}


_THINKS_AND_CALLS = _calls(1, reasoning_content="One and one.")
_SCRIPTS: Mapping[str, tuple[ChatMessage, ...]] = {
    "a tool's result": (_calls(1), _SAYS),
    "two results": (_calls(2), _SAYS),
    "several calls": (_calls(1), _calls(1), _calls(1), _SAYS),
    "thinking before calls": (_THINKS_AND_CALLS, _THINKS_AND_CALLS, _THINKS),
    "thinking before answers": (_THINKS, _THINKS, _THINKS),
    "several answers": (_SAYS, _SAYS, _SAYS),
    "an answer that was cut": (_SAYS, _SAYS),
    "letters of other languages": (_FOREIGN, _calls(1), _FOREIGN),
}
_CUT = "an answer that was cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """The effects of a template in the scripts that it accepts, which are played without tools if it shows none."""

    habit: Habit
    shows_tools: bool
    with_system: bool  # the scripts begin with a system's message, without which it shows none
    rows: float  # rows per trajectory, on average over the scripts; at least 1
    row_reasons: Mapping[str, tuple[Rewritten, ...]]  # script -> why each row after its first began
    refusals: Mapping[str, str]  # script -> the reason

    def describe(self) -> str:
        """Returns a line on its effects and costs, and one for each script that it refuses."""
        lines = [
            f"the chat template {self.habit}: {self.rows:.2f} rows a trajectory in {len(self.row_reasons)} "
            "conversations"
        ]
        rows = [
            f"{1 + len(why)} with {name} ({', '.join(sorted(set(why)))})"
            for name, why in self.row_reasons.items()
            if why
        ]
        lines[0] += f"; {'; '.join(rows)}" if rows else ""
        without = "" if self.shows_tools else "; it shows no tools, so that conversations with some are refused"
        if self.with_system:
            without = "; it shows tools beside a message of the system alone: conversations with tools begin with one"
        lines[0] += without
        return "\n".join((*lines, *(f"refused: {name}: {reason}" for name, reason in self.refusals.items())))


def probe_template(template: Template, stop_token_ids: Sequence[int]) -> TemplateReport:
    """Plays the scripts, each turn with the stop token of ``stop_token_ids`` that the template can continue after."""
    row_reasons: dict[str, tuple[Rewritten, ...]] = {}
    refused: dict[str, str] = {}
    in_calls, (asked, tools) = False, _beginning(template)
    for name, turns in _SCRIPTS.items():
        try:
            found = _play(template, asked, turns, tools, (None,) if name == _CUT else tuple(stop_token_ids))
        except UnsupportedMessages as error:
            refused[name] = str(error)
            continue
        row_reasons[name] = tuple(why for _, why in found)
        in_calls |= any("tool_calls" in turn for turn, _ in found)
    reasons = {why for of_script in row_reasons.values() for why in of_script}
    habit: Habit = "rewrites"
    if not reasons:
        habit = "appends"
    elif reasons == {"thinking"}:
        habit = "drops thinking at every turn" if in_calls else "drops thinking at user turns"
    rows = sum(1 + len(of_script) for of_script in row_reasons.values()) / max(1, len(row_reasons))
    return TemplateReport(
        habit=habit,
        shows_tools=bool(tools),
        with_system=len(asked) > 1,
        rows=rows,
        row_reasons=row_reasons,
        refusals=refused,
    )


def _beginning(template: Template) -> tuple[Sequence[ChatMessage], Tools]:
    """Returns the first messages of the scripts, and the tools that are shown there."""
    for asked in ([_QUESTION], [_SYSTEM, _QUESTION]):
        try:
            template.begin(asked, _TOOLS)
        except UnsupportedMessages:
            continue
        return asked, _TOOLS
    return [_QUESTION], ()


def _play(
    template: Template,
    first_messages: Sequence[ChatMessage],
    turns: Sequence[ChatMessage],
    tools: Tools,
    stops: Sequence[int | None],
) -> list[tuple[ChatMessage, Rewritten]]:
    """Returns the turns after which a row began, each with the reason. Raises UnsupportedMessages."""
    messages: tuple[ChatMessage, ...] = normalize_messages(first_messages)
    _, before = template.begin(messages, tools)
    rewritten: list[tuple[ChatMessage, Rewritten]] = []
    for turn in turns[:-1]:
        results: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "2"}
            for call in turn.get("tool_calls", ())
        ]
        messages = normalize_messages([*messages, turn, *(results or [{"role": "user", "content": "Again?"}])])
        tried = [template.extend(before, messages, tools, ended) for ended in stops]
        going_on = [one for one in tried if not isinstance(one, str)]
        if not going_on:
            rewritten.append((turn, next(one for one in tried if isinstance(one, str))))
        _, before = going_on[0] if going_on else template.begin(messages, tools)
    return rewritten
