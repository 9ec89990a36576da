"""Finds custom code: environments and rewards, which it calls like a run does, and modules that ranks import. It only
reads the text of these modules, because their packages may take seconds, or need a GPU."""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from launcher.preflight.subject import Finding, PreflightContext, fact, note, problem, run_check, unchecked
from rl_megatron.config.reads import READS
from rl_megatron.config.resume import flat
from rl_megatron.config.sections.algorithm import PAIR_LOSS_NAMES
from rl_megatron.config.sections.data import data_sources, source_name
from rl_megatron.config.sections.eval import RunData
from rl_megatron.config.sections.reward import RANKS, EnvironmentSection, RewardSection, reward_key
from rl_megatron.data.problems.prompts import first_problem
from rl_megatron.environments.registry import Agent, EnvironmentFactory, demonstrate, resolve_environment
from rl_megatron.errors import EnvironmentFailure, RLMegatronError, download_hint
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.rewards.scoring import distinct_errors, score
from rl_megatron.sandbox.executors import Sandbox, find_fence_problem
from rl_megatron.types import Completion, Prompt, RewardResult, Span

T = TypeVar("T")

SECONDS = 3.0  # the limit for its answer, if reward.timeout_seconds is more
PLACEHOLDER_COMPLETION = "a made-up completion"


def check(subject: PreflightContext) -> Iterator[Finding]:
    """Finds the environments; unless training has one, calls the reward function of each source and set once.

    Does not call servers, which may not be up yet, or models, which are large; the other parts of a sum it does.
    """
    config = subject.config
    if not config.kind.samples:
        return
    for key, environment in config.environments.items():
        if subject.other_python is not None and ":" in (environment.function or ""):
            yield unchecked(f"{key}, in {subject.other_python}")
        else:
            yield from run_check("reward", _environment(subject, key, environment))
    if config.environment.function is not None:
        return
    seen = list[RewardSection]()
    for key in data_sources(config.data):
        if f"{key}.environment" in config.environments:
            continue
        section = config.source_rewards.get(source_name(key), config.reward)
        if section not in seen:  # sources that share a reward: the first one's problem
            seen.append(section)
            yield from run_check("reward", _of(subject, section, source_name(key)))
    for name, one in config.eval.sets.items():
        if one.reward is not None and one.reward not in seen:
            seen.append(one.reward)
            yield from run_check("reward", _of(subject, one.reward, f"eval.sets.{name}"))


def _sandbox(subject: PreflightContext) -> Iterator[Finding]:
    """Tries the fences of this machine, if programs will run on it."""
    section = subject.config.sandbox
    if section.type != "subprocess" or subject.for_job:
        yield unchecked(f"the sandbox ({section.type}), where programs will run")
    elif why := asyncio.run(find_fence_problem()):
        kind = note if section.allow_unfenced else problem
        yield kind(why)
    else:
        yield fact("the sandbox fences programs by bubblewrap")


def _environment(subject: PreflightContext, key: str, section: EnvironmentSection) -> Iterator[Finding]:
    """Finds the environment of the section ``key``, and calls none of its methods but a warm start's."""
    warm_start = section is subject.config.environment and subject.config.warm_start.steps > 0
    made = resolve_environment(section, subject.config.sandbox, key=key)
    if made.takes_sandbox:
        yield from _sandbox(subject)
    if warm_start and not (isinstance(made, EnvironmentFactory) and made.has_method("demonstration")):
        yield problem(
            f"warm_start.steps with environment.function={section.function}: it has no method demonstration, so there "
            "is nothing to learn from; add one (docs/environments.md), or set warm_start.steps=0"
        )
    elif warm_start and isinstance(made, EnvironmentFactory):
        yield from _demonstrated(subject, section, made)
    kind = "leads trajectories" if isinstance(made, Agent) else "makes environments"
    yield fact(f"environment {section.function!r} {kind}")
    if (
        ":" in str(section.function)
        and isinstance(made, EnvironmentFactory)
        and not made.takes_sandbox
        and subject.tries
    ):
        for found in _tried(subject, key, f"a trajectory of environment {section.function!r}"):
            yield note(found.text) if found.kind == "problem" and section.on_error != "fail" else found


def _demonstrated(
    subject: PreflightContext, section: EnvironmentSection, factory: EnvironmentFactory
) -> Iterator[Finding]:
    """Looks at the demonstration of the first problem."""
    prompt = first_prompt(subject)
    if prompt is None:  # the check of the data reports it
        return

    def exercise_reward() -> str:
        try:
            demonstrate(factory, section.function, [prompt], [subject.config.seed])
        except EnvironmentFailure as error:
            return str(error)
        return ""

    said = _within(SECONDS, exercise_reward)
    if said is None:
        yield unchecked(f"the demonstration of environment {section.function!r}, which took more than {SECONDS:g} s")
    elif said:
        yield problem(f"warm_start.steps, before the run: {said}")


def _of(subject: PreflightContext, section: RewardSection, source: str) -> Iterator[Finding]:
    """Finds every part of the reward but models, and calls the sum of those that can answer here about a problem of
    ``source``."""
    key = "reward" if section is subject.config.reward else reward_key(source)
    names = dict.fromkeys(section.functions.values())
    local = [name for name in names if name.startswith("hf:")]
    for name in local:
        folder = Path(name.removeprefix("hf:")).expanduser()
        if not (folder / "config.json").is_file():
            hub = download_hint(folder)
            yield problem(f"reward {name!r}: it has no config.json; give the folder of a sequence classifier{hub}")
    models = local + [name for name in names if name.startswith(RANKS)]
    servers = [name for name in names if name.startswith(("http://", "https://"))]
    own = [name for name in names if ":" in name and name not in (*models, *servers)]
    absent = own if subject.other_python is not None else []
    if models:
        yield unchecked(f"the reward model {', '.join(models)}")
    if servers:
        yield unchecked(f"the reward server {', '.join(servers)}")
    if absent:
        yield unchecked(f"the reward {', '.join(absent)}, in {subject.other_python}")
    if "tests" in names:
        yield from _sandbox(subject)
    sandbox = Sandbox(subject.config.sandbox)
    if found := _without(section, (*models, *absent)):
        resolve_reward(found, key, sandbox)
    elsewhere = [*(["tests"] if subject.for_job else []), *(own if subject.off_cluster else [])]
    if subject.off_cluster and own:
        yield unchecked(f"the reward {', '.join(own)} with a row of the data")
    if called := _without(section, (*models, *absent, *servers, *elsewhere)):
        made_up = Prompt(id="made-up", text="1+1=", token_ids=(0, 1), answer="2", source=source)
        yield from _call(resolve_reward(called, key, sandbox), called, first_prompt(subject, source) or made_up)


def _without(section: RewardSection, functions: Collection[str]) -> RewardSection | None:
    """Returns the section without the parts of these functions; None if nothing remains."""
    parts = {name: part for name, part in section.parts.items() if section.functions[name] not in functions}
    return section.model_copy(update={"parts": parts}) if set(section.functions.values()) - set(functions) else None


def _call(function: RewardFunction, section: RewardSection, prompt: Prompt) -> Iterator[Finding]:
    name = ", ".join(section.functions.values())
    scored = _ask(function, prompt, min(section.timeout_seconds, SECONDS))
    if scored is None and section.timeout_seconds > SECONDS:
        yield unchecked(f"the reward {name!r}, which did not answer within {SECONDS:g} s")
        return
    wrong = (
        distinct_errors(scored) if scored else [f"no answer within reward.timeout_seconds={section.timeout_seconds:g}"]
    )
    said = f"reward {name!r}, called before the run with {prompt.text!r:.60}: {'; '.join(wrong)}"
    if wrong and section.on_error == "fail":
        yield problem(f"{said}; fix it, or set reward.on_error to drop or to a number")
    elif wrong:
        yield note(f"{said}; reward.on_error={section.on_error}")
    elif scored is not None:
        answer, other = (one.total for one in scored)
        said = f"reward {name!r} gives {answer:g} for the answer itself, {other:g} for {PLACEHOLDER_COMPLETION!r}"
        yield fact(said) if answer != other or ":" not in name else note(f"{said}: does it read the answer?")


def _ask(function: RewardFunction, prompt: Prompt, limit: float) -> tuple[RewardResult, ...] | None:
    """Its scores; None if it does not answer in time, even if it blocks its event loop."""
    texts = (prompt.answer, PLACEHOLDER_COMPLETION)
    completions = [
        Completion(
            token_ids=np.zeros(n, np.int32),
            logprobs=np.full(n, -1.0, np.float32),
            finish_reason="stop",
            spans=(Span(0, 0),),
        )
        for n in (len(text.encode()) + 1 for text in texts)
    ]
    return _within(limit, lambda: asyncio.run(score(function, prompt, completions, texts, limit=2 * limit)))


def _within(limit: float, work: Callable[[], T]) -> T | None:
    """Returns the result of ``work``, run in its own thread; None if it takes longer. ``work`` must not raise."""
    answers = list[T]()
    thread = threading.Thread(target=lambda: answers.append(work()), name="preflight", daemon=True)
    thread.start()
    thread.join(limit)
    return answers[0] if answers else None


def first_prompt(subject: PreflightContext, source: str = "") -> Prompt | None:
    """Returns the first problem of a source or a set, else of the first source. None where it cannot be read, as the
    check of the data says."""
    if subject.off_cluster:
        return None
    config, own = subject.config, subject.config.eval.sets.get(source.removeprefix("eval.sets."))
    sources = {source_name(key): (key, one) for key, one in data_sources(config.data).items()}
    key, data = sources.get(source) or next(iter(sources.values()))
    if own is not None and source not in sources and not isinstance(own.data, RunData):
        key, data = f"{source}.data", own.data
    try:
        return replace(first_problem(data, key), source=source)
    except RLMegatronError:
        return None


_BIND_UNSEEN = frozenset(
    {"__dict__", "__getattr__", "exec", "f_globals", "globals", "locals", "modules", "setattr", "vars"}
)
"""Names of a module's text by which it may have others that are not written in it."""


_TRIAL_SECONDS = 60.0
_FUNCTIONS = ("function", "objective", "advantage_mean", "loss", "layers")  # the last parts of their keys
_NAMED = re.compile(rf"(?!hf:|{RANKS})[^\W\d][\w.]*(?<!\.):[^\W\d]\w*")


def _tried(subject: PreflightContext, what: str, name: str) -> Iterator[Finding]:
    """Yields findings of `launcher.preflight.trial` of ``what``, in a process of its own."""
    command = [sys.executable, "-P", "-m", "launcher.preflight.trial", what]
    given, env = subject.config.model_dump_json(), subject.environment
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_TRIAL_SECONDS, env=env)
    except subprocess.TimeoutExpired:
        yield unchecked(f"{name}, which took more than {_TRIAL_SECONDS:g} s")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        yield unchecked(f"{name}: its process ended with status {done.returncode} and printed {last:.200}")
        return
    for kind, text in json.loads(done.stdout):
        if kind == "raised":  # a server that it needs may start with the job
            kind = "note" if subject.for_job else "problem"
        yield Finding(kind, text)


def check_modules(subject: PreflightContext) -> Iterator[Finding]:
    """Yields a problem if ranks could not find a module or its object, as far as that shows without an import."""
    config = subject.config
    named = {"learner.layers": config.learner.own_layers}
    for section in (config.dpo, config.algorithm.preference):
        named[f"{section.key}.loss"] = _own(section.loss, PAIR_LOSS_NAMES)
    for key in ("objective", "advantage_mean"):
        named[f"algorithm.{key}"] = _own(getattr(config.algorithm, key), READS[key])
    own_keys = {key: own for key, own in named.items() if own is not None}
    problems = [f"{key}={own}: {said}" for key, own in own_keys.items() if (said := _missing(subject, own))]
    yield from map(problem, problems)
    losses = [f"{key}={own}" for key, own in own_keys.items() if key != "learner.layers"]
    if losses and not problems and subject.tries and subject.other_python is None and importlib.util.find_spec("torch"):
        yield from _tried(subject, "losses", ", ".join(losses))
        own_keys = {key: own for key, own in own_keys.items() if key == "learner.layers"}
    yield from (unchecked(f"{key}={own}, which ranks import") for key, own in own_keys.items() if not problems)


def find_missing_code(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each custom function that is missing, of values of a configuration that break rules: a rule
    about missing code does not help. Imports no code."""
    if dict(flat(values)).get("slurm.python") is None:
        named = [(key, str(value)) for key, value in flat(values) if key.rpartition(".")[2] in _FUNCTIONS]
        found = [(f"{key}={name}", _not_there(name)) for key, name in named if _NAMED.fullmatch(name)]
        yield from (f"{given}: {said}" for given, said in found if said)


def _own(name: str, known: Collection[str]) -> str | None:
    return None if name in known else name


def _missing(subject: PreflightContext, own: str) -> str:
    return "" if subject.other_python is not None else _not_there(own)


def _not_there(own: str) -> str:
    """Returns which part of ``package.module:name`` ranks would not find, and what to do; or empty. ``__main__`` is
    another module in ranks."""
    module, _, name = own.partition(":")
    spec: ModuleSpec | None = None
    for end in (place for place, sign in enumerate(f"{module}.") if sign == "."):
        part = module[:end]
        parent, spec = spec, _below(spec, part) if spec else _top(part)
        if spec is None and parent and (part in sys.modules or _has_unseen(parent)):
            return ""
        if spec is None:
            return f"no module {part!r}; install it or put its folder on PYTHONPATH"
    assert spec is not None
    names = _names(Path(spec.origin)) if spec.origin and spec.origin.endswith(".py") else None
    if names is None or name in names:
        return ""
    near = difflib.get_close_matches(name, names, 1)
    return f"{name!r} of {module} is not there" + (f"; did you mean {near[0]!r}?" if near else "")


def _top(package: str) -> ModuleSpec | None:
    return None if package == "__main__" else importlib.util.find_spec(package)


def _below(parent: ModuleSpec, part: str) -> ModuleSpec | None:
    """Finds a module by its last name: with dots, a folder without __init__.py is found below an imported one."""
    return PathFinder.find_spec(part.rpartition(".")[2], [*(parent.submodule_search_locations or ())])


def _has_unseen(parent: ModuleSpec) -> bool:
    """True if a module may have submodules that are not files in its folders."""
    if not all(Path(folder).is_dir() for folder in parent.submodule_search_locations or ()):
        return True
    if parent.origin is None:
        return False
    try:
        text = Path(parent.origin).read_bytes()
    except OSError:
        return True
    return not parent.origin.endswith(".py") or b"__path__" in text or b"sys.modules" in text


def _names(file: Path) -> set[str] | None:
    """Returns the names that a module's text binds anywhere; None if it may bind more, or cannot be read or parsed."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return None
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    aliases = [one for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names]
    names |= {one.asname or one.name.partition(".")[0] for one in aliases}
    names |= {str(node.name) for node in nodes if isinstance(node, ast.MatchAs | ast.MatchStar)}
    names |= {str(node.rest) for node in nodes if isinstance(node, ast.MatchMapping)}
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return None if "*" in names or _BIND_UNSEEN & (names | read) else names
