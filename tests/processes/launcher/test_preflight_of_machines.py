"""What a preflight sees of this machine: its GPUs and memory, and the packages of an interpreter."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from launcher.preflight import devices, engine
from launcher.preflight.checks import preflight
from launcher.preflight.subject import Subject
from launcher.servers import interpreter
from launcher.servers.interpreter import has_module
from rl_megatron.config.io import load_config
from tests.unit.launcher.sites import answering, environment


@pytest.mark.parametrize(
    ("listed", "visible", "count"),
    [(8, None, 8), (8, "0,1", 2), (8, "", 0), (8, "-1", 0), (2, "1,5,0", 1), (0, None, 0), (None, None, 0)],
)
def test_gpus_are_counted_as_cuda_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int | None, visible: str | None, count: int
) -> None:
    if listed is not None:
        driver = tmp_path / "nvidia-smi"
        driver.write_text(
            "#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-x)'\n" for i in range(listed))
        )
        driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.count_visible_gpus(visible) == count


def gpus_here(folder: Path, monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """Have a driver list one GPU."""
    driver = folder / "nvidia-smi"
    answers = f"case $1 in -L) echo 'GPU 0: B200 (UUID: GPU-x)';; *) echo {capability};; esac"
    driver.write_text(f"#!/bin/sh\n{answers}\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "torch_is_for_cpus", lambda: False)


@pytest.mark.parametrize(
    ("engine", "capability", "option", "told"),
    [
        ("sglang", "10.0", "", True),
        ("sglang", "12.0", "", True),
        ("sglang", "9.0", "", False),
        ("sglang", "10.0", "--fp8-gemm-backend triton", False),
        ("vllm", "10.0", "", False),
    ],
)
def test_float8_on_gpus_of_which_an_engine_packs_the_scales_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, capability: str, option: str, told: bool
) -> None:
    gpus_here(tmp_path, monkeypatch, capability)
    keys = ["learner.ep=1", "learner.device=cuda", "learner.dtype=bfloat16", "rollout.server.quantization=fp8"]
    config = load_config("tiny_cpu", [f"rollout={engine}", *keys, f"rollout.server.options={option!r}"])
    found = [one.text for one in devices.check(Subject(config, for_job=False)) if one.kind == "problem"]
    assert [text.endswith("or rollout=vllm") and "sglang#9855" in text for text in found] == [True] * told


@pytest.mark.parametrize(
    ("recipe", "capability", "said"),
    [
        ("mxfp8", "9.0", "capability 10 or more, and those here have 9; set tensorwise or blockwise, or leave it out"),
        ("tensorwise", "8.0", "capability 8.9 or more, and those here have 8; leave it out"),
        ("mxfp8", "10.3", ""),
        ("blockwise", "9.0", ""),
        ("mxfp8", "", ""),
    ],
)
def test_a_recipe_of_float8_that_gpus_have_no_kernels_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, capability: str, said: str
) -> None:
    """The capabilities are those of A100 (8.0), H100 (9.0) and B300 (10.3) in NVIDIA's list."""
    gpus_here(tmp_path, monkeypatch, capability)
    keys = ["learner.ep=1", "learner.device=cuda", "learner.dtype=bfloat16", f"learner.fp8={recipe}"]
    found = devices.check(Subject(load_config("tiny_cpu", keys), for_job=False))
    problems = [one.text for one in found if one.kind == "problem"]
    assert problems == ([f"learner.fp8={recipe} needs GPUs of compute {said}"] if said else [])


def test_more_ranks_than_a_machine_has_memory_for_are_told_before_one_starts() -> None:
    said = preflight(load_config("tiny_cpu", ["learner.dp=1000000000"]), for_job=False).texts("problem")
    assert "1000000000 learner ranks (tp*cp*dp*pp) are 1000000000 processes on this machine of " in said[0]
    assert not preflight(load_config("tiny_cpu", ["learner.dp=8"]), for_job=False).texts("problem")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("/opt/efa/lib:$LD_LIBRARY_PATH", True),
        ("${HOME}/lib", True),
        ("$(cat /site/path)", True),
        ("~/lib", True),
        ("/opt/lib:~me/lib", True),
        ("/opt/lib", False),
        ("cost $5, or 7~8", False),
    ],
)
def test_a_variable_of_a_job_that_looks_as_if_bash_read_it_is_told_by_name(value: str, told: bool) -> None:
    """Not by its value, which may be a secret."""
    found = preflight(load_config("tiny_cpu", [f"slurm.environment.LD_LIBRARY_PATH={value!r}"]), for_job=True)
    notes = [note for note in found.notes() if "slurm.environment" in note]
    assert [("slurm.setup=export LD_LIBRARY_PATH=" in note, value in note) for note in notes] == [(True, False)] * told


@pytest.mark.parametrize(("time", "told"), [("4", True), ("5:00", True), ("6", False), ("0", False)])
def test_a_job_that_is_asked_to_save_as_soon_as_it_starts_is_told(time: str, told: bool) -> None:
    """0 is no limit."""
    notes = preflight(load_config("tiny_cpu", [f"slurm.time={time}"]), for_job=True).notes()
    said = f"note: slurm.time={time} is no longer than slurm.signal_seconds=300"
    assert [note.startswith(said) for note in notes if "signal_seconds" in note] == [True] * told


def test_a_learner_on_gpus_where_none_can_be_used_is_told_so() -> None:
    problems = preflight(load_config("tiny_cpu", ["learner.device=cuda"])).texts("problem")
    assert len(problems) == 1
    assert problems[0].startswith("learner.device=cuda, but ")
    assert "learner.device=cpu" in problems[0]


def test_an_engine_is_found_by_its_files(tmp_path: Path) -> None:
    """Whose interpreter, here an empty file, need not answer."""
    python = environment(tmp_path / "a", "vllm")
    assert has_module("vllm", python) is True
    assert has_module("sglang", python) is None
    (tmp_path / "a/lib/python3.11/site-packages/sglang-0.5.dist-info").mkdir()
    assert has_module("sglang", python) is True
    assert has_module("vllm", Path("/nowhere/bin/python")) is None


def test_an_interpreter_whose_packages_are_elsewhere_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a system's, or by PYTHONPATH or a .pth file. One that does not answer is not waited for."""
    python = answering(environment(tmp_path / "a", "vllm"))
    packages = Path(tmp_path, "a/lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "editable.pth").write_text(f"{tmp_path / 'editable'}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "set"))
    assert has_module("json", python) is True
    for folder, package in (("editable", "one_engine"), ("set", "other_engine")):
        assert has_module(package, python) is False
        (tmp_path / folder / package).mkdir(parents=True)
        assert has_module(package, python) is True
    python.unlink()
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(interpreter, "ANSWER_SECONDS", 0.2)
    assert has_module("json", python) is None


def test_an_engine_whose_module_is_in_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packaged_engine.py").write_text("class Mine:\n    module = 'my_servers.http'\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def problems(*keys: str) -> list[str]:
        config = load_config("tiny_cpu", ["rollout.engine=packaged_engine:Mine", *keys])
        return [one.text for one in engine.check(Subject(config, for_job=False)) if one.kind == "problem"]

    assert problems(f"rollout.python={environment(tmp_path / 'a', 'my_servers')}") == []
    (said,) = problems()
    assert f"{sys.executable}: my_servers is not installed there; " in said


@pytest.mark.parametrize(
    ("base", "keys", "requests", "trajectories"),
    [
        ("tiny_cpu", ["train.max_staleness=1"], 64, 0),  # a request of each completion that is drawn
        ("tiny_cpu", ["train.max_staleness=1", "rollout.server.concurrency=3"], 24, 0),
        ("tiny_cpu", ["train.max_staleness=1", "rollout.max_in_flight=40"], 40, 0),
        ("tiny_cpu", [], 4, 0),  # of each group
        ("calculator", ["environment.concurrency=16"], 16, 16),  # of each trajectory's turn
        ("calculator", ["environment.concurrency=40"], 32, 32),  # no more than are drawn
        ("calculator", ["environment.concurrency=1024"], 0, 1024),  # of an evaluation
    ],
)
def test_requests_and_trajectories_beyond_the_limit_of_open_files_are_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, base: str, keys: list[str], requests: int, trajectories: int
) -> None:
    sizes = ["learner.ep=1", "rollout.group_size=8", "rollout.prompts_per_step=4"]
    config = load_config(base, ["rollout=vllm", "rollout.server.addresses=http://a:1", *sizes, *keys])
    needed = 1 + requests + 3 * trajectories + 256  # with the stream of one rank

    def said(limit: int, *, for_job: bool = False) -> list[str]:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
        return [one.text for one in devices.check(Subject(config, for_job)) if one.kind == "problem"]

    assert said(needed) == said(needed - 1, for_job=True) == []
    (problem,) = said(needed - 1)
    assert (f"{requests} requests at servers" in problem) == (requests > 0)
    assert f"about {needed} files, but the limit here is {needed - 1}" in problem
