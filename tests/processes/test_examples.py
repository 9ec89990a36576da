"""Examples for other schedulers: valid by publishers' schemas, scripts that start and stop, and a GPU for each rank."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from launcher.runs.folder import choose
from rl_megatron.config.io import load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
STAND_IN = f"""#!{sys.executable}
import os, shlex, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
print(shlex.join(sys.argv), flush=True)
if "STATUS" not in os.environ:
    signal.pause()
sys.exit(int(os.environ["STATUS"]))
"""


def started(shell: str, script: str, home: Path, **variables: str) -> subprocess.Popen[str]:
    """The script, with ``home`` for the volume of runs, and a stand-in for rl-megatron that waits for SIGTERM."""
    program = home / "learner" / "bin" / "rl-megatron"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(STAND_IN, encoding="utf-8")
    program.chmod(0o755)
    there = script.replace("/runs", str(home / "runs"))
    environment = {"HOME": str(home), "PATH": f"{program.parent}:{os.environ['PATH']}", **variables}
    return subprocess.Popen([shell, "-c", there], env=environment, stdout=subprocess.PIPE, text=True)


def ranks_of(words: Sequence[str]) -> int:
    """Ranks of the learner that ``rl-megatron train`` with these words would start, by Ray and with a fixed name."""
    program, command, option, name, *keys, last = words
    assert (Path(program).name, command, option, last) == ("rl-megatron", "train", "--config", "--resume")
    config = choose(load_config(name, keys), name, resume=True)
    assert (config.run.launcher, config.learner.device, config.run.name) == ("ray", "cuda", "first")
    return config.learner.dims.world_size


def ranks_started(shell: str, script: str, home: Path) -> int:
    """Ranks of the script's first start, which is then stopped as its machine's end would: saved, it has failed."""
    with started(shell, script, home) as run:
        assert run.stdout is not None
        words = shlex.split(run.stdout.readline())
        run.terminate()
        assert (run.wait(timeout=30), run.stdout.read()) == (1, "saved\n")
    ranks = ranks_of(words)
    for status in (0, 2):
        with started(shell, script, home, STATUS=str(status)) as run:
            assert run.wait(timeout=30) == status
    return ranks


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_kubernetes_takes_the_job_and_it_has_a_gpu_for_each_rank(version: str, tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(job, version, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["sh", "-c"]
    (script,) = container["args"]
    assert ranks_started("sh", script, tmp_path) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_skypilots_machine_has_a_gpu_for_each_rank(tmp_path: Path) -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task["num_nodes"] == 1
    assert f"H100:{ranks_started('bash', task['run'], tmp_path)}" == task["resources"]["accelerators"]
    assert "--config tiny_cpu" in task["run"]
    assert "run.dir=" + next(iter(task["volumes"])) in task["run"]
