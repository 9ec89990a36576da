"""The process of one rank: learner shard, rollout engine replica and weight transport, driven over a pipe.

A worker serves one call at a time, in the order sent. It dies with its parent, whatever ends that.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_megatron.config import RunConfig
from rl_megatron.errors import RLMegatronError
from rl_megatron.types import Completion, GenerationRequest, Loss, Samples, StepResult, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor

    from rl_megatron.models.shape import ModelShape

_PR_SET_PDEATHSIG = 1
_SENDING = threading.Lock()  # one message at a time into the pipe


def main(connection: Connection, rank: int, rendezvous: str) -> None:
    """Entry of a spawned worker: import, wait for ``(config, model folder, run folder)``, then serve calls."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux: no orphan outlives a killed controller
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != os.getppid():  # killed before that call
        return
    warnings.filterwarnings("ignore", message=r"(Transformer Engine|Apex).* not installed")  # doctor tells
    threading.Thread(target=_say_alive, args=(connection,), name="alive", daemon=True).start()
    try:
        import rl_megatron.learner.megatron  # noqa: F401  heavy: done while the controller still prepares

        config, model_folder, run_folder = pickle.loads(connection.recv_bytes())
        from rl_megatron.observability.log import run_log

        with run_log(run_folder, role="rank", rank=rank):
            worker = Worker(config, model_folder, rank, rendezvous)
            _reply(connection, "ok", None)
            _serve(connection, worker)
    except EOFError:  # the controller closed the pipe
        return
    except RLMegatronError as error:
        _reply(connection, "refused", error)
    except Exception:  # noqa: BLE001  a process boundary: the controller shows the traceback with the rank
        _reply(connection, "raised", traceback.format_exc())


def _serve(connection: Connection, worker: Worker) -> None:
    while True:
        name, arguments = pickle.loads(connection.recv_bytes())
        if name not in Worker.CALLS:
            raise RLMegatronError(f"worker has no call {name!r}; it has {', '.join(Worker.CALLS)}")
        _reply(connection, "ok", getattr(worker, name)(*arguments))
        if name == "close":
            return


def _reply(connection: Connection, status: str, value: Any) -> None:
    data = pickle.dumps((status, value), protocol=pickle.HIGHEST_PROTOCOL)
    with _SENDING:
        connection.send_bytes(data)


def _say_alive(connection: Connection) -> None:
    """Each second, so that the controller can tell a long step from a process that was stopped."""
    with contextlib.suppress(OSError):  # the controller is gone, and this process with it
        while True:
            _reply(connection, "alive", None)
            time.sleep(1.0)


class Worker:
    """What one rank can be asked. All but ``generate`` and ``export`` are collective: every rank is asked together."""

    CALLS = ("generate", "push", "export", "compute_logprobs", "train_step", "save", "load", "close")

    def __init__(self, config: RunConfig, model_folder: Path, rank: int, rendezvous: str) -> None:
        from rl_megatron.learner.megatron import MegatronLearner
        from rl_megatron.learner.model import DTYPES
        from rl_megatron.models.shape import ModelShape
        from rl_megatron.rollout.local import LocalEngine

        shape = ModelShape.from_folder(model_folder)
        self._learner = MegatronLearner(
            shape,
            config.learner,
            rank=rank,
            rendezvous=rendezvous,
            temperature=config.rollout.temperature,
            seed=config.seed,
        )
        self._engine = LocalEngine(
            shape,
            slots=config.rollout.slots,
            dtype=DTYPES[config.learner.dtype],
            device=self._learner.device,
            max_length=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
        )
        self._model_folder = model_folder
        self._connect(config, shape, rank)

    def _connect(self, config: RunConfig, shape: ModelShape, rank: int) -> None:
        """Fill the learner from the checkpoint and plan the way from every learner rank to every engine replica."""
        from rl_megatron.types import ParallelDims
        from rl_megatron.weights.layout import Layout
        from rl_megatron.weights.plan import plan
        from rl_megatron.weights.safetensors_io import Checkpoint, read_boxes
        from rl_megatron.weights.tables import qwen3_moe
        from rl_megatron.weights.transports.process_group import ProcessGroupTransport

        learner = Layout(
            table=qwen3_moe.MEGATRON_QWEN3_MOE,
            shape=shape,
            dims=config.learner.dims,
            vocab_multiple=config.learner.vocab_multiple,
        )
        hf = Layout(table=qwen3_moe.HF_QWEN3_MOE, shape=shape)
        replicas = replace(hf, dims=ParallelDims(dp=config.learner.dims.world_size))
        tensors = dict(self._learner.tensors)
        read_boxes(Checkpoint(self._model_folder), hf, learner, rank, tensors)
        self._learner.adopt()
        self._transport = ProcessGroupTransport(plan(learner, replicas), src=tensors, dst=self._engine.tensors)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of each request, by this rank's engine replica."""
        return self._engine.generate(requests)

    def push(self, version: int) -> WeightUpdate:
        """Move the learner's weights into this rank's engine and serve them as ``version``."""
        update = self._transport.move(version)
        self._engine.serve(version)
        return update

    def export(self, folder: Path) -> None:
        """Write what this rank's engine holds as a Hugging Face folder."""
        from rl_megatron.weights.safetensors_io import write_folder

        write_folder(self._engine.tensors, self._model_folder, folder)

    def compute_logprobs(self, micro_batches: Sequence[Samples]) -> list[Tensor] | None:
        """See MegatronLearner.compute_logprobs."""
        return self._learner.compute_logprobs(micro_batches)

    def train_step(
        self, micro_batches: Sequence[Samples], loss: Loss, learning_rate: float, num_tokens: int, num_sequences: int
    ) -> StepResult | None:
        """See MegatronLearner.train_step."""
        return self._learner.train_step(
            micro_batches, loss, learning_rate, num_tokens=num_tokens, num_sequences=num_sequences
        )

    def save(self, folder: Path) -> None:
        """See MegatronLearner.save."""
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        """See MegatronLearner.load."""
        self._learner.load(folder)

    def close(self) -> None:
        """Leave the process groups, after every rank arrived."""
        self._learner.close()
