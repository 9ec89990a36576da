"""Dry runs of several ranks, each in a process of its own, which is this module: its answer is a line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.processes.environment import exit_with_parent, inherited
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import RLMegatronError

REPO = Path(__file__).resolve().parents[2]
_SECONDS = 3600.0
_SHOWN = 1500  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a learner's rank holds, in bytes, and what it sends in one step, counted without its memory."""

    rank: int
    stage: int
    parameters: int
    gradients: int
    optimizer: int
    passes: int  # most bytes beside these three during the forward and backward passes and the step
    collectives: Mapping[str, tuple[int, int]]  # calls and bytes of each kind


def dry_runs(config: RunConfig, model: str, ranks: Sequence[int]) -> list[DryRun]:
    """Build each of ``ranks`` at its real size without its memory, and make a step of `counted_micro_batches`.

    ``model`` is a known model's name or a folder.

    The processes run side by side; each takes about a gigabyte, and a core for minutes. Raises RLMegatronError with the
    reason if one fails.
    """
    with contextlib.ExitStack() as stack:
        with inherited(threads=1, device="cpu"):
            processes = [stack.enter_context(_asked(config, model, rank)) for rank in ranks]
        return [_answer(rank, process) for rank, process in zip(ranks, processes, strict=True)]


def counted_micro_batches(learner: LearnerSection) -> int:
    """As many as bring each stage to the most that it ever has in flight: the pipeline's stages, or with virtual stages
    twice that, as the first stage runs ahead by 2 (pp - 1) + (vpp - 1) pp chunks (arXiv:2104.04473) of m vpp."""
    return learner.pp * (2 if learner.vpp > 1 else 1)


@contextlib.contextmanager
def _asked(config: RunConfig, model: str, rank: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.recipes.dry_run", str(os.getpid())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=REPO) as process:
        try:
            assert process.stdin is not None
            with process.stdin as stream:
                json.dump({"config": config.model_dump(mode="json"), "model": model, "rank": rank}, stream)
            process.stdin = None  # or communicate() would flush it
            yield process
        finally:
            process.kill()


def _answer(rank: int, process: subprocess.Popen[str]) -> DryRun:
    try:
        said, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RLMegatronError(f"the dry run of rank {rank} took more than {_SECONDS:g} s") from error
    if process.returncode:
        raise RLMegatronError(
            f"the dry run of rank {rank} ended with status {process.returncode}:\n{errors.strip()[-_SHOWN:]}"
        )
    return DryRun(**json.loads(said.splitlines()[-1]))


def main() -> None:
    """Read what is asked from standard input, make the dry run and print it."""
    exit_with_parent(int(sys.argv[1]))
    from rl_megatron.weights.layouts.learner import job_shape
    from tests.recipes.fake_step import dry_run
    from tools.convert.layouts import model_shape

    asked = json.load(sys.stdin)
    config = RunConfig.model_validate(asked["config"])
    found = dry_run(
        job_shape(config, model_shape(asked["model"], config.learner.model)),
        config.learner,
        asked["rank"],
        sequence=config.longest_sequence,
        micro_batches=counted_micro_batches(config.learner),
    )
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
