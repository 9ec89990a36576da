"""Times what a rank's device computes and copies: products, grouped products, attention, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rl_megatron.options.device import GPU
from rl_megatron.scaling.machines.calibration import Attended, Grouped, Moved, Product

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BUDGET = 0.06  # seconds of repetitions of one operation
_MOST, _LEAST = 40, 3  # repetitions
_ROWS = {"cpu": (16, 64, 256, 1024, 4096), GPU: (64, 256, 1024, 4096, 16384)}
_SIDES = {
    "cpu": ((64, 64), (64, 192), (128, 256), (256, 256), (256, 768), (512, 512), (512, 1536)),
    GPU: ((512, 512), (1024, 1024), (2048, 2048), (2048, 6144), (4096, 4096), (8192, 8192)),
}
_MOST_PRODUCTS = {"cpu": 6e8, GPU: 1e12}  # multiplications of a product that is timed
_GROUPED = {"cpu": ((8, 16), (8, 64), (8, 256), (8, 1024)), GPU: ((16, 64), (16, 256), (16, 1024), (16, 4096))}
_EXPERT = {"cpu": (256, 128), GPU: (2048, 768)}  # hidden and width
_LENGTHS = {"cpu": (64, 128, 256), GPU: (1024, 4096)}
_ATTENDED = {"cpu": (2048, 8, 32), GPU: (16384, 16, 128)}  # tokens, heads, size of a head
_COPIED = {"cpu": (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26), GPU: (1 << 24, 1 << 27, 1 << 30)}


class Kernels:
    """Times on one device, in one dtype.

    ``processor``: seconds of this process's processor time, which other work on the machine does not lengthen much;
    else of the clock. The least of some repetitions counts.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, processor: bool) -> None:
        self._device, self._dtype, self._processor = device, dtype, processor

    def now(self) -> float:
        """Seconds, after all that the device was given."""
        if self._device.type != "cpu":
            import torch

            torch.cuda.synchronize(self._device)
            return time.perf_counter()
        return time.process_time() if self._processor else time.perf_counter()

    def best(self, operation: Callable[[], object], *, times: int | None = None) -> float:
        """The least seconds of ``times`` repetitions, or of as many as `_BUDGET` seconds have, after one that does not
        count. Ranks that wait for each other in it give ``times``."""
        operation()
        found: list[float] = []
        began = time.perf_counter()
        while len(found) < (times or _LEAST) or (
            times is None and len(found) < _MOST and time.perf_counter() - began < _BUDGET
        ):
            start = self.now()
            operation()
            found.append(self.now() - start)
        return max(min(found), 1e-9)

    def products(self) -> tuple[Product, ...]:
        """Linear layers of the learner."""
        from rl_megatron.learner.model.kernels.fused import linear

        kind, out = self._device.type, []
        for rows in _ROWS[kind]:
            for wide, deep in _SIDES[kind]:
                if rows * wide * deep <= _MOST_PRODUCTS[kind]:
                    x, weight, slope = self._made(rows, wide), self._made(deep, wide), self._made(rows, deep)
                    forward, both = self._passes(lambda x=x, w=weight: linear(x, w), (x, weight), slope)  # type: ignore[misc]
                    out.append(Product(rows=rows, wide=wide, deep=deep, forward=forward, both=both))
        return tuple(out)

    def grouped(self) -> tuple[Grouped, ...]:
        """The learner's experts, by the rows of each."""
        import torch

        from rl_megatron.learner.model.kernels.fused import expert_mlp

        kind, out = self._device.type, []
        hidden, width = _EXPERT[kind]
        for experts, rows in _GROUPED[kind]:
            x, slope = self._made(experts * rows, hidden), self._made(experts * rows, hidden)
            probs = torch.ones(experts * rows, device=self._device)
            fc1 = [self._made(2 * width, hidden) for _ in range(experts)]
            fc2 = [self._made(hidden, width) for _ in range(experts)]
            forward, both = self._passes(
                lambda x=x, p=probs, a=fc1, b=fc2, n=[rows] * experts: expert_mlp(x, p, n, a, b),  # type: ignore[misc]
                (x, *fc1, *fc2),
                slope,
            )
            out.append(Grouped(experts=experts, rows=rows, hidden=hidden, width=width, forward=forward, both=both))
        return tuple(out)

    def attention(self) -> tuple[Attended, ...]:
        """torch's attention, causal."""
        from torch.nn.functional import scaled_dot_product_attention

        kind, out = self._device.type, []
        tokens, heads, size = _ATTENDED[kind]
        for length in _LENGTHS[kind]:
            q, k, v, slope = (self._made(tokens // length, heads, length, size) for _ in range(4))
            _, both = self._passes(
                lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True),  # type: ignore[misc]
                (q, k, v),
                slope,
            )
            out.append(Attended(tokens=tokens, length=length, heads=heads, head_dim=size, both=both))
        return tuple(out)

    def memory(self) -> tuple[Moved, ...]:
        """Copies on the device."""
        import torch

        out = []
        for num_bytes in _COPIED[self._device.type]:
            source = torch.ones(num_bytes // 4, device=self._device)
            other = torch.empty_like(source)
            seconds = self.best(lambda a=source, b=other: b.copy_(a))  # type: ignore[misc]
            out.append(Moved(ranks=1, num_bytes=num_bytes, seconds=seconds))
        return tuple(out)

    def _made(self, *size: int) -> Tensor:
        import torch

        return torch.randn(size, device=self._device, dtype=self._dtype).requires_grad_()

    def _passes(self, forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], slope: Tensor) -> tuple[float, float]:
        """Seconds of the forward pass, and of both."""
        import torch

        def both() -> None:
            for leaf in leaves:
                leaf.grad = None
            forward().backward(slope.detach())

        with torch.no_grad():
            alone = self.best(forward)
        return alone, self.best(both)
