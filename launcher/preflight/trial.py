"""Tries custom losses, or one trajectory of a custom environment, as ``python -m launcher.preflight.trial``. A separate
process does so, because both import torch, and the user's code may not end.

It reads a configuration as JSON from stdin, and prints a list of (kind, text) pairs as JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from launcher.preflight.own_code import PLACEHOLDER_COMPLETION, first_prompt
from launcher.preflight.subject import PreflightContext
from rl_megatron.agents.playing import EnvironmentCallError, EpisodeRunner
from rl_megatron.agents.threads import CallTimeout, UserCodeFailed
from rl_megatron.algorithms.own import check_custom_advantages, check_custom_objective, check_custom_pair_loss
from rl_megatron.config.run import RunConfig
from rl_megatron.environments.protocol import LimitReached, OpenAIMessage, Reply
from rl_megatron.environments.registry import Agent, resolve_environment
from rl_megatron.errors import RLMegatronError
from rl_megatron.types import Prompt
from rl_megatron.user_code import add_import_folder, describe_error

T = TypeVar("T")
_TURNS = 3
_STEP_SECONDS = 5.0  # the limit of a call, if environment.step_seconds is more


def main() -> None:
    """Tries the losses, or the environment of the section that is the argument, and prints what it found."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout has the findings alone
    add_import_folder(Path.cwd())
    config, found = RunConfig.model_validate_json(sys.stdin.read()), list[tuple[str, str]]()
    warnings = logging.Handler(logging.WARNING)
    warnings.emit = lambda record: found.append(("note", record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("rl_megatron").addHandler(warnings)
    try:
        if sys.argv[1] == "losses":
            check_custom_objective(config.algorithm, cp=config.learner.dims.cp)
            check_custom_advantages(config.algorithm, config.rollout)
            for section in (config.dpo, config.algorithm.preference):
                check_custom_pair_loss(section)
        else:
            found.append(asyncio.run(_play(config, sys.argv[1])))
    except RLMegatronError as error:
        found.append(("problem", str(error)))
    json.dump(found, out)
    out.flush()
    os._exit(0)  # threads of the user's code may not end


async def _play(config: RunConfig, key: str) -> tuple[str, str]:
    """Runs one trajectory; its first reply is the answer of the problem."""
    section = config.environments[key]
    made = resolve_environment(section, config.sandbox, key=key)
    if isinstance(made, Agent):
        return "unchecked", f"the agent {section.function!r}"
    task = first_prompt(PreflightContext(config, False)) or Prompt(
        id="made-up", text="1+1=", token_ids=(0,), answer="2"
    )
    runner = EpisodeRunner(
        episode=cast(Any, _PlaceholderEpisode(task.answer)),
        task=task,
        seed=config.seed,
        section=section.model_copy(update={"step_seconds": min(section.step_seconds, _STEP_SECONDS)}),
        truncate=lambda message: message,
        on_last_turn=lambda: None,
        thread=cast(Any, _SameLoop()),
        endpoint=cast(Any, None),
    )
    tried = f"environment {section.function!r}, tried with {task.text!r:.60}, its answer and made-up replies"
    try:
        end = await runner.run(made)
    except EnvironmentCallError as error:
        kind = "unchecked" if error.late else "raised" if isinstance(error.__cause__, UserCodeFailed) else "problem"
        return kind, f"{tried}: {error}"
    finally:
        closing = await runner.close()
    return ("problem", f"{tried}: {closing}") if closing else ("fact", f"{tried}: reward {end.reward:g}")


class _PlaceholderEpisode:
    """An episode without a model."""

    stop = None

    def __init__(self, answer: str) -> None:
        self._answer, self.replies = answer, list[Reply]()

    async def reply(self, messages: Sequence[OpenAIMessage], tools: Sequence[object]) -> Reply:
        """Returns the answer, then made-up replies. Raises LimitReached after the last."""
        if len(self.replies) == _TURNS:
            raise LimitReached("turns")
        text = PLACEHOLDER_COMPLETION if self.replies else self._answer
        reply = Reply(text=text, message={"role": "assistant", "content": text}, finish_reason="stop")
        self.replies.append(reply)
        return reply


class _SameLoop:
    """Calls the environment in this event loop. The process that started this one limits calls that block."""

    async def call(self, function: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Returns the result. Raises CallTimeout, or UserCodeFailed with its error as the cause."""
        try:
            return await asyncio.wait_for(function(), seconds)
        except TimeoutError as error:
            raise CallTimeout from error
        except Exception as error:
            raise UserCodeFailed(describe_error(error)) from error


if __name__ == "__main__":
    main()
