"""Environments of openenv-core, served by its own application; run in an interpreter that has it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from starlette.applications import Starlette
from starlette.routing import Mount


class Number(Action):
    guess: int
    sure: bool = False


class Word(Action):
    said: str


class Hint(Observation):
    hint: str = ""
    left: int = 0


class Guess(Environment[Number, Hint, State]):
    """Guess seed modulo 10; a guess of 9 raises."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._number = State(episode_id=str(uuid4())), 0

    def reset(self, seed: int | None = None, least: int = 0, **given: Any) -> Hint:
        self._number, self._left = least + (seed or 0) % 10, 3
        self._state = State(episode_id=str(uuid4()))
        return Hint(hint=f"{least}-{least + 9}, {seed}?", left=3)

    def step(self, action: Number, **given: Any) -> Hint:
        if action.guess == 9:
            raise ArithmeticError("far too much")
        self._left -= 1
        self._state.step_count += 1
        if action.guess == self._number:
            return Hint(hint="yes", reward=2.0 if action.sure else 1.0, done=True)
        higher = "more" if action.guess < self._number else "less"
        return Hint(hint=higher, left=self._left, reward=-0.25, done=self._left == 0)

    @property
    def state(self) -> State:
        return self._state


class Echoed(Observation):
    text: str


class Echo(Environment[Word, Echoed, State]):
    """Says each word again, and ends without a reward at "end"."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **given: Any) -> Echoed:
        return Echoed(text="say")

    def step(self, action: Word, **given: Any) -> Echoed:
        ended = action.said == "end"
        reward = None if ended else float(len(action.said))
        return Echoed(text=f"<{action.said}>", reward=reward, done=ended or action.said == "stop")

    @property
    def state(self) -> State:
        return State()


app = Starlette(
    routes=[
        Mount("/guess", create_app(Guess, Number, Hint, max_concurrent_envs=64)),
        Mount("/echo", create_app(Echo, Word, Echoed, max_concurrent_envs=1)),
    ]
)
