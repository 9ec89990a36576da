"""The observers of a model: this package's, and those that installed packages register as entry points."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron.entries import declared, load_entry
from rl_megatron.errors import RLMegatronError
from rl_megatron.learner.observers.experts import ExpertLoadMeter, Observer
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Metric

OBSERVERS: Mapping[str, type[Observer]] = {"experts": ExpertLoadMeter}
GROUP = "rl_megatron.observers"
"""The group of entry points: each has a name, and a class that is an Observer."""
_PREFIX = "observer/"


class Observers:
    """All observers of one model on this rank, as one observer. Every rank makes one.

    Raises ConfigError if an installed observer cannot be loaded.
    """

    def __init__(self, models: Sequence[GPTModel], shape: ModelShape, device: torch.device) -> None:
        self._own = [kind(models, shape, device) for kind in OBSERVERS.values()]
        self._installed = {name: kind(models, shape, device) for name, kind in installed_observers().items()}

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Every observer ignores the passes within."""
        with contextlib.ExitStack() as stack:
            for observer in (*self._own, *self._installed.values()):
                stack.enter_context(observer.unseen())
            yield

    def read(self) -> dict[str, Metric[float]]:
        """Metrics of all observers since the last call. Every rank calls it.

        Raises RLMegatronError if an installed observer returns a name without its prefix.
        """
        found = {name: metric for observer in self._own for name, metric in observer.read().items()}
        for called, observer in self._installed.items():
            said = observer.read()
            if strange := [name for name in said if not name.startswith(_PREFIX)]:
                raise RLMegatronError(
                    f"the observer {called!r} of an installed package returned {strange[0]!r}; its names must begin "
                    f"with {_PREFIX!r}, for example {_PREFIX}{called}"
                )
            found.update(said)
        return found


@cache
def installed_observers() -> Mapping[str, type[Observer]]:
    """Observers of other packages, by name, as a process finds them first: a search takes longer than a small model."""
    return {name: load_entry("observer", entry) for name, entry in declared("observer", GROUP).items()}
