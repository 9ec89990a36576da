"""TensorBoard's files in a run's folder."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from typing_extensions import override

from rl_megatron.files import add_path_to_errors
from rl_megatron.observability.files import JsonRow
from rl_megatron.observability.sinks.sink import MetricSink, RunEnd, SinkSettings, need_no_argument, tagged_numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink(MetricSink):
    """Writes ``tensorboard/<phase>`` in the run's folder. A phase has its own folder, because a purge of later points
    after a resume compares only steps."""

    def __init__(self, settings: SinkSettings) -> None:
        need_no_argument("tensorboard", settings)
        self._folder = settings.folder / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}  # phase -> its writer

    @override
    def log(self, row: JsonRow) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        (tags, x), phase = tagged_numbers(row), str(row["phase"])
        with add_path_to_errors(self._folder / phase):
            if phase not in self._writers:
                self._folder.mkdir(exist_ok=True)  # TensorBoard would create the run's folder, too
                self._writers[phase] = SummaryWriter(str(self._folder / phase), purge_step=x)
            for tag, value in tags.items():
                self._writers[phase].add_scalar(tag, value, x)
            self._writers[phase].flush()

    @override
    def close(self, end: RunEnd) -> None:
        with ExitStack() as all_of_them, add_path_to_errors(self._folder):
            for writer in self._writers.values():
                all_of_them.callback(writer.close)
