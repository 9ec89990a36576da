"""Memory for a version that arrives layer by layer, in the form that the model's loader expects.

Kernels keep separate parameters in private layouts, which the loader cannot write. So each layer arrives in additional
memory, for about two layers at a time: one that arrives, and one while its checksums are computed.
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
"""A parameter's name in a module -> its name in the model."""


class LayerWindow:
    """The boxes ``held`` of ``params`` (meta tensors), in temporary memory of ``device``.

    A module's memory is allocated before its first byte arrives, and zeroed, because padding never arrives. Once the
    module is complete and its checksums are known, ``take`` gives it to the kernels, and its memory is released. That
    is at the latest when the turn after the next begins.
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
            self.boxes |= {one: one.local_slice(tensor) for one in ones}  # needs the memory
            tensor.untyped_storage().resize_(0)
        self.begin()

    def begin(self) -> None:
        """Starts a new version, with no boxes arrived."""
        self._left, self._turn, self._beside = Counter(self._expected), 0, BackgroundChecksums()
        self._open: dict[nn.Module, int] = {}  # the turn of each module that has memory
        self._whole: deque[nn.Module] = deque()
        self._sums: defaultdict[nn.Module, list[Future[Read]]] = defaultdict(list)
        self._bytes = self.most_bytes = 0  # bytes in use now, and their maximum in this version

    def coming(self, turn: int, held: Collection[ParameterBox]) -> None:
        """Allocates memory for boxes that are about to arrive. All boxes of earlier turns have arrived."""
        while self._whole and (self._open[self._whole[0]] < self._turn < turn or self._known(self._whole[0])):
            self._convert(self._whole.popleft())
        self._turn = turn
        for module in {self._module_of[one.param]: None for one in held}:
            if module not in self._open:
                self._make(module, turn)

    def whole(self, one: ParameterBox) -> None:
        """Records that a box has arrived."""
        module = self._module_of[one.param]
        self._sums[module] += self._beside.sent(one, self._tensors[one.param])
        self._left[module] -= 1
        if not self._left[module]:
            self._whole.append(module)

    def finish(self) -> ChecksumReport:
        """Gives the last layers to the kernels. Returns the checksums of all boxes that arrived."""
        while self._whole:
            self._convert(self._whole.popleft())
        return replace(self._beside.report(), window=self.most_bytes)

    def release(self) -> None:
        """Releases the remaining memory of a version that did not arrive completely."""
        self._beside.report()  # its thread reads the memory
        for module in list(self._open):
            self._free(module)

    def _known(self, module: nn.Module) -> bool:
        """True if all checksums of the module's boxes are computed."""
        return all(future.done() for future in self._sums[module])

    def _make(self, module: nn.Module, turn: int) -> None:
        for name in self._modules[module].values():
            self._tensors[name].untyped_storage().resize_(self._sizes[name])
            self._tensors[name].zero_()
            self._bytes += self._sizes[name]
        self._open[module], self.most_bytes = turn, max(self.most_bytes, self._bytes)

    def _convert(self, module: nn.Module) -> None:
        for future in self._sums[module]:
            future.result()  # must end before kernels can write there
        self._take(module, {name: self._tensors[param] for name, param in self._modules[module].items()})
        self._free(module)

    def _free(self, module: nn.Module) -> None:
        del self._open[module]
        for name in self._modules[module].values():
            self._tensors[name].untyped_storage().resize_(0)
            self._bytes -= self._sizes[name]
