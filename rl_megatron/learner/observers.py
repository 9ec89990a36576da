"""Observers watch a rank's model and return metrics: this package's, which measure how evenly routers balance the load
over experts, and those that installed packages register as entry points.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from typing_extensions import override

from rl_megatron.entries import declared, load_entry
from rl_megatron.errors import RLMegatronError
from rl_megatron.learner.packed import PackedAttentionParams, local_tokens
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Metric


class Observer(Protocol):
    """Watches one model of a rank. Every rank makes one and calls its methods at the same points."""

    def __init__(self, models: Sequence[GPTModel], shape: ModelShape, device: torch.device) -> None:
        """``models`` are this rank's pipeline chunks; the observer may hook them."""
        ...

    def unseen(self) -> AbstractContextManager[None]:
        """Ignores the passes within, which are not part of a step: they score, or search for a bad micro-batch."""
        ...

    def read(self) -> Mapping[str, Metric[float]]:
        """Returns all ranks' metrics since the last call. Names from an installed package begin with ``observer/``."""
        ...


class ExpertLoadMeter(Observer):
    """Hooks every router of this rank, and counts tokens [num_layers, num_experts] float32 since the last read.

    Padding does not count, and a layer counts in the forward pass of its model alone: a backward pass that computes it
    again is outside of that.
    """

    def __init__(self, models: Sequence[GPTModel], shape: ModelShape, device: torch.device) -> None:
        size, self._layers = (shape.num_layers, shape.num_experts), list(shape.moe_layers)
        self._counts = torch.zeros(size, device=device)
        self._real: Tensor | None = None  # [t] bool, tokens that this rank routes in the forward pass that runs
        for model in models:
            model.register_forward_pre_hook(self._begin, with_kwargs=True)
            model.register_forward_hook(self._end, always_call=True)
            for layer in model.decoder.layers:
                if layer.is_moe_layer:
                    router = layer.mlp.router
                    router.register_forward_hook(self._hook(layer.layer_number - 1))

    def _begin(self, _model: Any, _args: Any, given: Mapping[str, Any]) -> None:
        packed: PackedAttentionParams = given["packed_seq_params"]
        self._real = packed.is_real[local_tokens(len(packed.is_real))]

    def _end(self, *_: Any) -> None:
        self._real = None

    def _hook(self, layer: int) -> Any:
        def count(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            if self._real is not None:
                self._counts[layer] += (output[1].detach() & self._real[:, None]).sum(0)

        return count

    @override
    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        kept = self._counts.clone()
        try:
            yield
        finally:
            self._counts.copy_(kept)

    @override
    def read(self) -> dict[str, Metric[float]]:
        """``moe/load_imbalance``: the most tokens of an expert over the mean, in the worst layer (1 is even);
        ``moe/dead_experts``: share of experts without tokens.

        Resets the counts. Empty for a model without experts.
        """
        if not self._counts.numel():
            return {}
        dist.all_reduce(self._counts)
        worst = (self._counts.amax(1) / self._counts.mean(1).clamp(min=1)).max()
        dead = (self._counts[self._layers] == 0).float().mean()
        names = ("moe/load_imbalance", "moe/dead_experts")
        values = torch.stack([worst, dead]).tolist()
        self._counts.zero_()
        return {name: Metric(value=value) for name, value in zip(names, values, strict=True)}


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
        """Makes every observer ignore the passes within."""
        with contextlib.ExitStack() as stack:
            for observer in (*self._own, *self._installed.values()):
                stack.enter_context(observer.unseen())
            yield

    def read(self) -> dict[str, Metric[float]]:
        """Returns metrics of all observers since the last call. Every rank calls it.

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
