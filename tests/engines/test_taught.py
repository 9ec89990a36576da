"""vLLM or SGLang as a run's teacher, by the commands of docs/sft.md: its divergence and gradient are those of
the same teacher on ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launcher.processes.guards import free_port
from launcher.servers.engines import SERVERS
from launcher.servers.versions import show_package
from rl_megatron.engines.sglang import adapter
from rl_megatron.engines.sglang.adapter import ON_CPU
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability.files import read_jsonl
from tests.engines.benches import interpreter
from tests.engines.conftest import needs

PAGE = (Path(__file__).parents[2] / "docs/sft.md").read_text()
LIMIT = 300.0  # seconds of a run
LENGTH = 64  # tokens that a server's caches are made for
KEYS = (
    *("learner.threads=1", "learner.ep=1", "warm_start.steps=0", "train.steps=2", "eval.every=0"),
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "log.sinks=[]", "reward.parts.exact_match=0"),
)
# As on GPUs, and as a run's: a scheduler that overlaps and has priorities must outlive /health, which has none.
SGLANG = (*(one for one in ON_CPU if one != "--disable-overlap-schedule"), *adapter.priority_options(()))
ON_CPUS = {
    "vllm": f"--enforce-eager --dtype float32 --max-model-len {LENGTH}",
    "sglang": f"{' '.join(SGLANG)} --dtype float32 --context-length {LENGTH} --max-total-tokens 4096",
}
MODULES = {engine: f"rl_megatron.engines.{engine}.server" for engine in SERVERS}
SETTING = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than the student, which has its tokenizer."""
    spec = TinySizes(head_dim=32, hidden_size=96, max_position_embeddings=LENGTH)
    return make_tiny_model(spec, tmp_path_factory.mktemp("teacher"), seed=3)


@pytest.fixture(scope="module")
def on_ranks(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What a run records whose teacher has ranks of its own."""
    folder = tmp_path_factory.mktemp("on_ranks")
    return record(folder, "algorithm=gkd", "roles.reference=separate", f"algorithm.kl.reference={teacher}")


def record(folder: Path, *keys: str) -> list[dict[str, float]]:
    """A run's steps."""
    ended = subprocess.run(
        [sys.executable, "-m", "launcher", "train", *KEYS, "run.name=taught", *keys],
        cwd=folder,
        env={**os.environ, **SETTING, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    run = folder / "runs" / "taught"
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["phase"] == "rl" and row["step"]]


def command(engine: str, teacher: Path, port: int) -> str:
    """The page's, with the interpreter, the folder, the address and the options of this machine."""
    if engine == "vllm":
        (given,) = re.findall(r"`(VLLM_API_KEY=[^`]*)`", PAGE)
        # Builds for CPUs have no program of that name.
        given = given.replace("/opt/vllm/bin/vllm serve", f"{interpreter(engine)} -m {MODULES[engine]}")
        given = given.replace("--tensor-parallel-size 8", "--tensor-parallel-size 1")
    else:
        (given,) = re.findall(r"`(RL_MEGATRON_ENGINE_TOKEN=[^`]*)`", PAGE)
        given = given.replace("/opt/sglang/bin/python", str(interpreter(engine)))
    assert MODULES[engine] in given
    given = given.replace("--host 10.0.0.7 --port 8100", f"--host 127.0.0.1 --port {port}")
    return f"{given.replace('/models/TEACHER', str(teacher))} {ON_CPUS[engine]}"


@contextlib.contextmanager
def serving(engine: str, teacher: Path, folder: Path) -> Iterator[str]:
    """The URL of the engine's server while the context is open; its output is in ``folder``, with its key."""
    (folder / "teacher.key").write_text("key-of-the-teacher")
    (folder / "teacher.key").chmod(0o600)
    packages, asked = folder / "packages", {"Authorization": "Bearer key-of-the-teacher"}
    packages.mkdir()
    show_package(packages)
    port, variables = free_port("127.0.0.1"), {**os.environ, **SETTING, "PYTHONPATH": str(packages)}
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT
    with (folder / "teacher.txt").open("w") as output:
        words = ("sh", "-c", f"exec env {command(engine, teacher, port)}")
        process = subprocess.Popen(
            words, cwd=folder, env=variables, stdout=output, stderr=output, start_new_session=True
        )
        try:
            health = urllib.request.Request(f"{url}/health", headers=asked)
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(health):
                    break
                said = (folder / "teacher.txt").read_text()[-3000:]
                assert process.poll() is None, said
                assert time.monotonic() < end, said
                time.sleep(0.2)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("engine", sorted(SERVERS))
def test_the_pages_command_works(engine: str, teacher: Path, on_ranks: list[dict[str, float]], tmp_path: Path) -> None:
    needs(engine)
    with serving(engine, teacher, tmp_path) as url:
        big = {"server": url, "token_file": "teacher.key", "engine": engine, "path": str(teacher)}
        config = {"defaults": ["tiny_cpu", {"algorithm": "gkd"}], "algorithm": {"kl": {"teachers": {"big": big}}}}
        (tmp_path / "taught.yaml").write_text(yaml.safe_dump(config))
        served = record(tmp_path, "--config", "taught.yaml")
    assert [row["step"] for row in served] == [row["step"] for row in on_ranks] == [1, 2]
    for mine, theirs in zip(served, on_ranks, strict=True):
        for name in ("loss/kl", "kl/reference", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name
