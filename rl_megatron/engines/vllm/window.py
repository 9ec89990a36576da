"""Memory for a version that arrives layer by layer, as the model's loader expects its parameters.

Kernels keep parameters of their own, in layouts of their own, which the loader cannot write. So each layer arrives
beside them, and memory is there for about two layers at a time: for one that arrives, and for one whose checksums are
computed.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor, nn

from rl_megatron.weights.checks.places import ParameterBox
from rl_megatron.weights.checks.reports import BackgroundChecksums, ChecksumReport, Read

Names = Mapping[str, str]
"""By its name in a module, the parameter's name in the model."""


class LayerWindow:
    """The boxes ``held`` of ``params``, which are meta tensors, in memory of ``device`` that comes and goes.

    A module's memory is made before its first byte arrives, and zeroed, as padding never arrives. Once the module is
    whole and its checksums are known, ``take`` gives it to the kernels, and its memory is released: at the latest when
    the turn after the next begins.
    """

    def __init__(
        self,
        held: Sequence[ParameterBox],
        params: Mapping[str, Tensor],
        modules: Mapping[nn.Module, Names],
        device: torch.device,
        take: Callable[[nn.Module, Mapping[str, Tensor]], None],
    ) -> None:
        self._modules, self._take = modules, take
        self._module_of = {param: module for module, names in modules.items() for param in names.values()}
        self._expected = Counter(self._module_of[one.param] for one in held)
        self._tensors: dict[str, Tensor] = {}
        self._sizes: dict[str, int] = {}
        self.boxes: dict[ParameterBox, Tensor] = {}
        there: defaultdict[str, list[ParameterBox]] = defaultdict(list)
        for one in held:
            there[one.param].append(one)
        for name, ones in there.items():
            tensor = self._tensors[name] = torch.empty_like(params[name], device=device)
            self._sizes[name] = tensor.untyped_storage().nbytes()
            self.boxes |= {one: one.of(tensor) for one in ones}  # needs the memory
            tensor.untyped_storage().resize_(0)
        self.begin()

    def begin(self) -> None:
        """Start a new version: nothing of it has arrived."""
        self._left, self._turn, self._beside = Counter(self._expected), 0, BackgroundChecksums()
        self._open: dict[nn.Module, int] = {}  # the turn of each module that has memory
        self._whole: deque[nn.Module] = deque()
        self._sums: defaultdict[nn.Module, list[Future[Read]]] = defaultdict(list)
        self._bytes = self.most_bytes = 0  # memory that is taken now, and the most since this version began

    def coming(self, turn: int, held: Collection[ParameterBox]) -> None:
        """Make memory for boxes that are about to arrive. All that arrives in earlier turns has arrived."""
        while self._whole and (self._open[self._whole[0]] < self._turn < turn or self._known(self._whole[0])):
            self._convert(self._whole.popleft())
        self._turn = turn
        for module in {self._module_of[one.param]: None for one in held}:
            if module not in self._open:
                self._make(module, turn)

    def whole(self, one: ParameterBox) -> None:
        """Note that a box has arrived."""
        module = self._module_of[one.param]
        self._sums[module] += self._beside.sent(one, self._tensors[one.param])
        self._left[module] -= 1
        if not self._left[module]:
            self._whole.append(module)

    def finish(self) -> ChecksumReport:
        """Give the last layers to the kernels. Returns the checksums of all that arrived."""
        while self._whole:
            self._convert(self._whole.popleft())
        return replace(self._beside.report(), window=self.most_bytes)

    def release(self) -> None:
        """Release the memory that is left of a version that did not arrive whole."""
        self._beside.report()  # its thread reads the memory
        for module in list(self._open):
            self._free(module)

    def _known(self, module: nn.Module) -> bool:
        """Whether all checksums of the module's boxes are computed."""
        return all(future.done() for future in self._sums[module])

    def _make(self, module: nn.Module, turn: int) -> None:
        for name in self._modules[module].values():
            self._tensors[name].untyped_storage().resize_(self._sizes[name])
            self._tensors[name].zero_()
            self._bytes += self._sizes[name]
        self._open[module], self.most_bytes = turn, max(self.most_bytes, self._bytes)

    def _convert(self, module: nn.Module) -> None:
        for future in self._sums[module]:
            future.result()  # before kernels can write there
        self._take(module, {name: self._tensors[param] for name, param in self._modules[module].items()})
        self._free(module)

    def _free(self, module: nn.Module) -> None:
        del self._open[module]
        for name in self._modules[module].values():
            self._tensors[name].untyped_storage().resize_(0)
            self._bytes -= self._sizes[name]
