"""Examples for other schedulers: valid by the publishers' schemas, keys that load, and as many GPUs as ranks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from rl_megatron.config.io import load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def ranks_of(words: Sequence[str]) -> int:
    """Ranks of the learner that ``rl-megatron train`` with these words would start, by Ray and with a fixed name."""
    program, command, option, name, *keys, last = words
    assert (Path(program).name, command, option, last) == ("rl-megatron", "train", "--config", "--resume")
    config = load_config(name, keys)
    assert (config.run.launcher, config.learner.device, config.run.name) == ("ray", "cuda", "first")
    return config.learner.dims.world_size


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_kubernetes_takes_the_job_and_it_has_a_gpu_for_each_rank(version: str) -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(job, version, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert ranks_of(container["command"] + container["args"]) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_skypilots_machine_has_a_gpu_for_each_rank() -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task["num_nodes"] == 1
    assert f"H100:{ranks_of(shlex.split(task['run']))}" == task["resources"]["accelerators"]
    assert "--config tiny_cpu" in task["run"]
    assert "run.dir=" + next(iter(task["volumes"])) in task["run"]
