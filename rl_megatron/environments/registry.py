"""Resolves ``environment.function``: a shipped environment by its name, or a custom class or function.

Demonstrations of an environment for a warm start are checked before the model is trained on them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from rl_megatron.config.sections.reward import EnvironmentSection, SandboxSection
from rl_megatron.environments.protocol import AgentModelClient, Environment, EnvironmentStep, HasDemonstration
from rl_megatron.environments.shipped import Calculator, Guess
from rl_megatron.errors import ConfigError, EnvironmentFailure
from rl_megatron.sandbox.executors import Sandbox
from rl_megatron.types import Prompt
from rl_megatron.user_code import describe_error, load_named

METHODS = ("start", "step", "score", "close")
ENVIRONMENTS: Mapping[str, Callable[..., Any]] = {"calculator": Calculator, "guess": Guess}


@dataclass(frozen=True, slots=True)
class EnvironmentFactory:
    """Makes an environment for each trajectory, with the options of the configuration."""

    factory: Callable[..., Environment]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Environment:
        """Returns an environment for one trajectory."""
        return self.factory(**self.options)

    @property
    def takes_sandbox(self) -> bool:
        """True if environments get a sandbox."""
        return "sandbox" in self.options

    def has_method(self, method: str) -> bool:
        """True if its environments have the method; also for a function that makes them, until one is made."""
        return not inspect.isclass(self.factory) or callable(getattr(self.factory, method, None))


@dataclass(frozen=True, slots=True)
class Agent:
    """A custom function that leads a trajectory itself, and returns its reward."""

    solve: Callable[[Prompt, AgentModelClient], Awaitable[float | EnvironmentStep]]
    takes_sandbox: bool = False


def resolve_environment(
    section: EnvironmentSection, sandbox: SandboxSection | None = None, *, key: str = "environment"
) -> EnvironmentFactory | Agent:
    """Resolves ``environment.function``: an async function is an agent, any other callable makes environments.

    A function with an argument ``sandbox`` gets a `rl_megatron.sandbox.executors.Sandbox`, which all trajectories
    share. ``key`` names the section in messages.

    Raises ConfigError that names an unknown function and the nearest known one, the error of its import, or options
    that it does not take.
    """
    name = section.function
    assert name is not None
    if name not in ENVIRONMENTS and ":" not in name:
        near = difflib.get_close_matches(name, ENVIRONMENTS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{key}.function={name!r:.200} is unknown; {hint}allowed: {', '.join(ENVIRONMENTS)}, or your own "
            "package.module:name"
        )
    function = ENVIRONMENTS.get(name) or load_named(name, f"{key}.function", "class or function", callable)
    options: dict[str, Any] = dict(section.options)
    taken = inspect.signature(function).parameters.keys() - options.keys()
    if "sandbox" in taken:
        options["sandbox"] = Sandbox(sandbox or SandboxSection())
    _check(f"{key}.function={name!r:.200}", function, options, [f"{key}.options.{one}" for one in section.options])
    if name in ENVIRONMENTS and inspect.isclass(function):
        _try(f"{key}.function={name!r}", function, options)
    if inspect.iscoroutinefunction(function):
        _check_agent(section, key)
        return Agent(partial(function, **options), "sandbox" in options)
    return EnvironmentFactory(function, options)


def _try(given: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Makes an object of a shipped environment. Raises ConfigError that names invalid and missing options."""
    try:
        factory(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{given}: {error}") from error


def _check_agent(section: EnvironmentSection, key: str) -> None:
    """Raises ConfigError for set keys that a function which leads its trajectory does not read."""
    if section.max_observation_tokens != EnvironmentSection().max_observation_tokens:
        raise ConfigError(
            f"{key}.max_observation_tokens={section.max_observation_tokens}: {key}.function="
            f"{section.function!r:.200} is a function that leads its trajectory, and has neither methods nor messages; "
            f"leave this out ({key}.seconds bounds it)"
        )


def _check(given: str, function: Callable[..., Any], options: Mapping[str, Any], named: Sequence[str]) -> None:
    """Raises ConfigError for options that ``function`` does not take, and for a class without the methods."""
    leads = inspect.iscoroutinefunction(function)
    try:
        inspect.signature(function).bind(*((None, None) if leads else ()), **options)
    except TypeError as error:
        if not leads and not inspect.isclass(function) and _leads_if_async(function, options):
            raise ConfigError(
                f"{given} takes a task and a model, so it leads trajectories, but it is a plain function; define it by "
                "`async def`"
            ) from error
        raise ConfigError(f"{given} with {', '.join(named) or 'no options'}: {error}") from error
    lacking = [method for method in METHODS if not callable(getattr(function, method, None))]
    if inspect.isclass(function) and lacking:
        raise ConfigError(
            f"{given} is a class without {', '.join(lacking)}; give it the four async "
            "methods of an environment, or name an async function (docs/environments.md)"
        )


def _leads_if_async(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError:
        return False
    return True


def demonstrate(
    factory: Callable[[], Environment], function: str | None, tasks: Sequence[Prompt], seeds: Sequence[int]
) -> list[Sequence[str]]:
    """Returns the texts of each task's ``demonstration``, all by one environment, which is made for the first.

    Raises EnvironmentFailure, which names ``function`` and the task, and its exception or the value that it returned
    in place of texts."""
    with _naming(function, tasks[0], ", for which the environment is made,"):
        environment = factory()
    return [_texts(environment, function, task, seed) for task, seed in zip(tasks, seeds, strict=True)]


def _texts(environment: Environment, function: str | None, task: Prompt, seed: int) -> Sequence[str]:
    with _naming(function, task):
        given: object = cast("HasDemonstration", environment).demonstration(task, seed)
        problem = _problem(given)
    if problem is not None:
        raise EnvironmentFailure(
            f"{_describe(function, task)} {problem}; it must return a list of texts, the model's, what it reads, the "
            "model's, and so on"
        )
    return cast("Sequence[str]", given)


@contextmanager
def _naming(function: str | None, task: Prompt, which: str = "") -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # the user's code may exit
        raise EnvironmentFailure(f"{_describe(function, task)}{which} {describe_error(error)}; fix it") from error


def _describe(function: str | None, task: Prompt) -> str:
    return f"environment {function!r}: demonstration of prompt {task.id!r} ({task.text!r:.60})"


def _problem(given: object) -> str | None:
    """Returns why a value is not a list of texts. A str is rejected: its characters would be trained on as turns."""
    if inspect.iscoroutine(given):
        given.close()
        return "is async, which it may not be"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        return f"returned {given!r:.80}"
    for place, one in enumerate(given):
        if not isinstance(one, str):
            return f"returned {one!r:.80} as text {place}"
        if not _valid(one):
            return f"returned {one!r:.80} as text {place}, which holds half of a surrogate pair"
    return None


def _valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
