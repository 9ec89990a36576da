"""Records the kernels and operators of a rank's own process, by torch's profiler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rl_megatron.durable import make_inside, naming
from rl_megatron.errors import RLMegatronError
from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.kernels import Recorded

if TYPE_CHECKING:
    from torch.profiler import profile


class Recording:
    """One recording at a time. All its calls come from the thread that computes."""

    def __init__(self) -> None:
        self._profiler: profile | None = None

    def begin(self) -> None:
        """Record from now on. Raises RLMegatronError if a recording is under way."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        if self._profiler is not None:
            raise RLMegatronError("this rank records kernels already")
        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._profiler.start()

    def end(self, file: Path) -> Recorded | str:
        """Write what was recorded since `begin` into ``file``, compressed. Returns why it cannot be written, if so.

        Raises RLMegatronError if nothing was begun.
        """
        import torch

        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise RLMegatronError("this rank records no kernels")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # of kernels that were launched the ends are recorded, too
        profiler.stop()
        try:
            with naming(file):
                make_inside(file.parent)
                file.touch(mode=0o600)
                profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:  # torch's for a disk that is full
            return f"{file}: {error}"
        return Recorded(file=file, monotonic=spans.now(), wall=time.time_ns())
