"""Problems of reasoning-gym, each with one turn that the package's own ``score_answer`` scores."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rl_megatron.environments.protocol import EnvironmentStep, Observation, Reply, Transcript
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.types import Prompt

FIELD = "reasoning_gym"  # of a row: which problem it is
_NO_ANSWER = "(several are right)"
EXECUTING = frozenset(  # their scorers pass the reply to eval, or to sympy's parser, which does
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)


class ReasoningGym:
    """The problem of a row that write_tasks.py wrote. Its answer stands in the reply between <``tag``> and
    </``tag``>, the last of them, or is the whole reply where ``tag`` is empty."""

    def __init__(self, tag: str = "answer") -> None:
        _package()
        self._tag, self._task = tag, Prompt(id="", text="", token_ids=(), answer="")

    async def start(self, task: Prompt, seed: int) -> Observation:
        """The problem, as the row has it. Raises DataError if the package makes another here."""
        made = _made(task)[1]
        if made["question"] not in task.text:
            raise DataError(
                f"reasoning-gym {_package().__version__} makes another problem of {task.meta[FIELD]!r:.300} than the "
                "row has; write the tasks again, or install the version that wrote them"
            )
        self._task = task
        return Observation(content=task.messages or task.text)

    async def step(self, reply: Reply) -> EnvironmentStep:
        """The package's score, from 0 to 1; of an answer on which it raises, 0."""
        dataset, entry = _made(self._task)
        answer = reply.text.strip()
        if self._tag:
            answer = _package().utils.extract_answer(reply.text, tag_name=self._tag)
        try:
            reward, failed = float(dataset.score_answer(answer, entry)), 0.0
        except Exception:  # noqa: BLE001  of many authors, and over a text of the model's
            reward, failed = 0.0, 1.0
        return EnvironmentStep(reward=reward, metrics={"answered": float(bool(answer)), "failed_scores": failed})

    async def score(self, transcript: Transcript) -> float:
        """Of a reply that was cut: 0."""
        return 0.0

    async def close(self) -> None:
        """There is nothing to release."""

    def demonstration(self, task: Prompt, seed: int) -> Sequence[str]:
        """The answer of the row, which the package may not be the only one to score 1."""
        return (f"<{self._tag}>{task.answer}</{self._tag}>" if self._tag else task.answer,)


def tasks(
    *, name: str, size: int = 1000, held_out: int = 100, seed: int = 0, **config: Any
) -> tuple[Iterator[Mapping[str, Any]], Iterator[Mapping[str, Any]]]:
    """Rows to train on, of the seeds from ``seed`` on, and held-out ones, of the seeds after those.

    ``config`` are the keys of the package's own configuration of ``name``. Raises ConfigError with what it refuses.
    """
    return _rows(name, seed, size, config), _rows(name, seed + size, held_out, config)


def _rows(name: str, seed: int, size: int, config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    dataset = _dataset(name, seed, size, json.dumps(config, sort_keys=True))
    for index in range(size):
        entry = dataset[index]
        which = {"name": name, "seed": seed, "size": size, "config": config, "index": index}
        yield {"question": entry["question"], "answer": entry["answer"] or _NO_ANSWER, FIELD: which}


def _made(task: Prompt) -> tuple[Any, Mapping[str, Any]]:
    """The data set that a row is of, and its problem as the package makes it."""
    which = task.meta.get(FIELD)
    if not isinstance(which, Mapping):
        raise DataError(f"prompt {task.id!r} has no field {FIELD!r}; write tasks with write_tasks.py")
    config = json.dumps(which["config"], sort_keys=True)
    dataset = _dataset(which["name"], which["seed"], which["size"], config)
    return dataset, dataset[which["index"]]


@lru_cache(maxsize=64)
def _dataset(name: str, seed: int, size: int, config: str) -> Any:
    if name in EXECUTING:
        raise ConfigError(
            f"reasoning-gym's scorer of name={name!r} executes replies as Python, in the run's own process; "
            "take another data set"
        )
    try:
        return _package().create_dataset(name, seed=seed, size=size, **json.loads(config))
    except Exception as error:  # its configurations assert
        raise ConfigError(
            f"reasoning-gym refuses name={name!r:.100} with size={size}, seed={seed} and {config:.300}: "
            f"{type(error).__name__}: {error!s:.300}"
        ) from error


def _package() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ConfigError("reasoning_gym: the package is not installed; pip install reasoning-gym") from error
