"""Times all-gathers and all-to-alls among the ranks of one machine, by bytes and by the size of the group."""

from __future__ import annotations

from launcher.calibration.kernels import Kernels
from rl_megatron.options.device import GPU
from rl_megatron.scaling.machines.calibration import Moved

_SIZES = {"cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 22), GPU: (1 << 12, 1 << 20, 1 << 24, 1 << 28)}
_TIMES = 15


def messages(kernels: Kernels, device: str) -> tuple[tuple[Moved, ...], tuple[Moved, ...]]:
    """All-to-alls and all-gathers of groups of 2, 4, ... ranks and of all, with what a rank receives of others.

    Every rank of the world calls it.
    """
    import torch
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    exchanged, gathered = [], []
    for count in sorted({2**i for i in range(1, world.bit_length()) if 2**i <= world} | {world}):
        group = dist.new_group(list(range(count)))
        for size in _SIZES[device]:
            dist.barrier()
            if rank >= count:
                continue
            sent = torch.ones(size // 4 // count * count, device=device)
            back, whole = torch.empty_like(sent), torch.empty(len(sent) * count, device=device)
            seconds = kernels.best(
                lambda a=sent, b=back, g=group: dist.all_to_all_single(b, a, group=g),  # type: ignore[misc]
                times=_TIMES,
            )
            exchanged.append(Moved(ranks=count, num_bytes=sent.nbytes * (count - 1) // count, seconds=seconds))
            seconds = kernels.best(
                lambda a=sent, b=whole, g=group: dist.all_gather_into_tensor(b, a, group=g),  # type: ignore[misc]
                times=_TIMES,
            )
            gathered.append(Moved(ranks=count, num_bytes=sent.nbytes * (count - 1), seconds=seconds))
    dist.barrier()
    return tuple(exchanged), tuple(gathered)
