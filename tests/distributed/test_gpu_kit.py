"""The kit for one GPU (tests/gpu) on pretended ones, but for what the command line starts: 50 seconds."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from launcher.hosts.local import LocalLauncher
from launcher.wire import Call, Muster
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.placement.names import LEARNER
from rl_megatron.types import ParallelDims
from tests.distributed.ranks import ragged_samples
from tests.forks import FORKS
from tests.gpu.differences import largest, worst
from tests.rows import policy_loss

REPO = Path(__file__).parents[2]
FILES = ("first/test_03_float32.py", "first/test_04_bfloat16.py", "first/test_05_resume.py", "first/test_06_engine.py")


def pytest_main(arguments: Sequence[str], figures: Path, said: Path) -> None:
    """In a fork: ``python -m pytest``, which need not import torch again. What it prints is in ``said``."""
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["FIGURES"] = str(figures)
    os.chdir(REPO)
    code = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(code)  # without a wait for the ranks' parent, which ends with this process


def asked(*arguments: str, folder: Path) -> tuple[int | None, str]:
    """The exit status of such a run, whose figures.md is in ``folder``, and what it printed."""
    process = FORKS.Process(target=pytest_main, args=(arguments, folder / "figures.md", folder / "said.txt"))
    process.start()
    process.join(3600)
    process.kill()
    return process.exitcode, (folder / "said.txt").read_text()


@pytest.mark.slow
def test_its_first_half_passes_and_prints_a_table(tmp_path: Path) -> None:
    """So a day with a GPU does not begin with a mistake in the kit, and reference.json has this code's numbers."""
    files = [f"tests/gpu/{name}" for name in FILES]
    code, printed = asked("-m", "gpu", "-p", "tests.gpu.pretended", *files, folder=tmp_path)
    kept = tmp_path / "figures.md"
    assert code == 0, printed[-8000:]
    assert "skipped" not in printed
    lines = ("Measured on a pretended GPU, ", "| float32, policy, beside the CPU | ", "| resumed, bfloat16 | equal")
    for line in lines:
        assert line in printed
    assert f"figures are in {kept} as soon as" in printed
    assert kept.read_text() in printed
    assert kept.read_text().count("\n| ") >= 5


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_infinitely_far(broken: float) -> None:
    assert worst([[1.0, 1.0 + 2e-7], [broken]], [[1.0, 1.0], [1.0]]) == math.inf
    assert largest([1e-7, broken]) == math.inf
    assert largest([1e-7, -3e-7]) == 3e-7


def test_without_a_gpu_it_is_skipped_with_the_way_out(tmp_path: Path) -> None:
    _, printed = asked("tests/gpu/first/test_05_resume.py", folder=tmp_path)
    assert "1 skipped" in printed
    assert "no GPU is seen; `make test-gpu` runs this on a machine that has one" in printed


# Ranks of ``learner.device=cpu`` on a machine that has a GPU, and half of TransformerEngine.
BESIDE_A_GPU = """
import os, sys
if "launcher.worker.node" in sys.orig_argv:
    import torch
    torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""  # of a machine with one
"""


async def test_a_local_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 seconds. megatron wants weights on the GPU that torch sees, and takes what it can import."""
    package = tmp_path / "site" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the core wheel alone: no transformer_engine_torch')")
    (package.parent / "sitecustomize.py").write_text(BESIDE_A_GPU)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = load_config("tiny_cpu", ["learner.threads=1", "learner.ep=1", "learner.dp=1"])
    model = make_tiny_model(TinySizes(num_layers=1), tmp_path / "cache", seed=3)
    samples = ragged_samples(4, torch.Generator().manual_seed(5))
    samples = dataclasses.replace(samples, advantages=torch.ones(len(samples.input_ids)))
    batch = Packer(dims=ParallelDims(), max_tokens=4096).pack(samples)
    async with LocalLauncher(model, tmp_path).start(config) as roles:
        await roles.policy.backward(batch, policy_loss(objective="importance"))
        assert (await roles.policy.step(1e-3)).grad_norm > 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # ours is as it was


IMPORTS = """
import os, sys
from launcher.worker import node
node.import_all = lambda *_: sys.exit(f"{'torch' in sys.modules} {os.environ['CUDA_VISIBLE_DEVICES']}")
node.main()
"""


@pytest.mark.parametrize(("device", "sees"), [("cpu", ""), ("cuda", "0")])
def test_a_nodes_ranks_see_no_gpu_before_it_imports_torch(device: str, sees: str) -> None:
    call = Call(host="127.0.0.1", port=1, token="", seconds=0, threads=1, device=device)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        input=Muster(call=call, nodes=("here",), ranks_per_node={LEARNER: 1}, folder="/nowhere").line().decode(),
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        text=True,
    )
    assert done.stderr == f"False {sees}\n"


def test_a_rank_that_sees_a_gpu_none_the_less_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_megatron.learner import world

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="sees a GPU"):
        world.init_process_groups(LearnerSection(), rank=0, rendezvous="file:///nowhere", seed=1)
