"""Environments with other libraries than the learner's: read without torch's import, and refused by both numbers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.preflight.checks import preflight
from launcher.servers import interpreter
from launcher.servers.pool import ServedEngines
from launcher.servers.versions import compare_environments, libraries_of, why_no_group
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rollout.servers.vllm.adapter import VLLMAdapter
from rl_megatron.weights.checks.libraries import Libraries, nccl_version
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.parsing import model_shape
from tests.unit.launcher.commands import status_of

OLD, NEW = 22907, 23007  # as ncclGetVersion says 2.29.7 and 2.30.7
GPU = ("rollout=vllm", "learner.device=cuda")
UNSET = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}


def library(path: Path, code: int) -> Path:
    """A library of NCCL that has one function."""
    source = f"int ncclGetVersion(int *code) {{ *code = {code}; return 0; }}"
    return compiled(path, source, "-Wl,-soname,libnccl.so.2")


def compiled(path: Path, source: str, *options: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, which makes libraries for this test")
    path.parent.mkdir(parents=True)
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", *options, "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    """The folders of two versions of NCCL."""
    folder = tmp_path_factory.mktemp("nccl")
    return {code: library(folder / str(code) / "libnccl.so.2", code).parent for code in (OLD, NEW)}


def python(folder: Path, torch: str, nccl: Path | None = None, fields: int = 8) -> Path:
    """An interpreter whose environment has a torch of these files, and no other module of engines."""
    packages = folder / "packages"
    (packages / "torch" / "lib").mkdir(parents=True)
    (packages / "torch" / "multiprocessing").mkdir()
    (packages / "vllm").mkdir()
    for module in ("torch", "vllm"):
        (packages / module / "__init__.py").write_text("raise ImportError('it would take seconds')")
    cuda = "None" if nccl is None else "'13.0'"
    (packages / "torch" / "version.py").write_text(f"__version__ = '{torch}'\ncuda: Optional[str] = {cuda}\n")
    names = ", ".join(f"field_{number}" for number in range(fields))
    (packages / "torch" / "multiprocessing" / "reductions.py").write_text(
        f"def reduce(storage):\n    ({names}) = storage._share_cuda_()\n"
    )
    if nccl is not None:
        (packages / "torch" / "lib" / "libtorch_cuda.so").touch()
        (packages / "nvidia" / "nccl").mkdir(parents=True)
        (packages / "nvidia" / "nccl" / "lib").symlink_to(nccl)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={packages}:$PYTHONPATH exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def having(torch: str = "2.13.0+cu130", nccl: str | None = "2.29.7", handle: int = 8, **settings: str) -> Libraries:
    return Libraries(torch=torch, cuda="13.0", nccl=nccl, own_nccl=None, handle=handle, settings=settings)


OTHER = having("2.13.1+cu130", "2.30.7")
TORCH = "install the same torch in both environments, or set weights.transport=file"

TRANSPORTS = {
    "process_group": ("weights.transport=direct",),
    "cuda_ipc": ("weights.transport=direct", "rollout.server.memory_fraction=0.1", "rollout.server.tp=2"),
    "file": ("weights.transport=file",),
    "auto": (),
}


@pytest.mark.parametrize(
    ("engine", "transport", "more", "said"),
    [
        (OTHER, "process_group", (), f"NCCL differs: 2.29.7 (learner) and 2.30.7 (engine); {TORCH}"),
        (
            OTHER,
            "process_group",
            ("run.launcher=slurm", "slurm.engines.nodes=1"),
            f"NCCL differs: 2.29.7 (learner) and 2.30.7 (engine); {TORCH}",
        ),
        (having("2.14.1+cu130"), "process_group", (), f"torch differs: 2.13 (learner) and 2.14 (engine); {TORCH}"),
        (
            having(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="2"),
            "process_group",
            (),
            "NCCL_CUMEM_ENABLE differs: -2 (learner) and 0 (engine); set NCCL_CUMEM_ENABLE to the same value in both "
            "environments, or set weights.transport=file",
        ),
        (
            having(handle=9),
            "cuda_ipc",
            (),
            "the number of fields of torch's handles of GPU memory differs: 8 (learner) and 9 (engine); install the "
            "same torch in both environments, or set weights.transport=file",
        ),
        (having("2.13.9+cu129", handle=9), "process_group", (), ""),  # torch counts by its release
        (having(nccl=None), "process_group", (), ""),  # unknown; ranks say it when they meet
        (OTHER, "cuda_ipc", (), ""),
        (OTHER, "file", (), ""),
        (OTHER, "auto", (), ""),
        # Over gloo, torch 2.13.0 and 2.14.1 were one group.
        (having("2.14.1", "2.30.7", 9), "process_group", ("learner.device=cpu",), ""),
    ],
)
def test_ranks_that_cannot_be_one_group_are_refused_by_both_numbers_and_others_are_not(
    engine: Libraries, transport: str, more: tuple[str, ...], said: str
) -> None:
    config = load_config("tiny_cpu", [*GPU, *TRANSPORTS[transport], *more])
    assert transport in (config.transport.name, "auto")
    problem = why_no_group(config, {"learner": having(), "engine": engine})
    assert problem == (said and f"weights.transport=direct by {transport}: {said}")


def test_an_engine_gets_the_settings_of_nccl_that_the_learner_has(tmp_path: Path, nccl: Mapping[int, Path]) -> None:
    """SGLang would set NCCL_CUMEM_ENABLE=0 itself if nothing were given."""
    both = python(tmp_path / "a", "2.13.0", nccl[OLD])
    config = load_config("tiny_cpu", [*GPU, "weights.transport=direct"])
    for given, shown in (({}, r"-  +-2"), ({"NCCL_CUMEM_ENABLE": "0"}, r"0  +0")):
        found = compare_environments(config, {**UNSET, **given}, learner=both, engine=both)
        assert found.problem == ""
        assert re.search(rf"^NCCL_CUMEM_ENABLE +{shown}$", found.table, re.MULTILINE)


def test_the_nccl_that_torch_is_linked_with_is_asked_where_none_is_beside_it(
    tmp_path: Path, nccl: Mapping[int, Path]
) -> None:
    """As in a container whose NCCL is the system's: its own path in the library, over LD_LIBRARY_PATH."""
    engine = python(tmp_path, "2.13.0", nccl[OLD], fields=9)
    (tmp_path / "packages" / "nvidia" / "nccl" / "lib").unlink()
    cuda = tmp_path / "packages" / "torch" / "lib" / "libtorch_cuda.so"
    cuda.unlink()
    linked = (f"-L{nccl[NEW]}", "-Wl,--no-as-needed", "-l:libnccl.so.2", f"-Wl,-rpath,{nccl[NEW]}")
    compiled(tmp_path / "new" / cuda.name, "", *linked, "-Wl,--disable-new-dtags").rename(cuda)
    found = libraries_of(engine, {**UNSET, "LD_LIBRARY_PATH": str(nccl[OLD])})
    assert (found.torch, found.cuda, found.nccl, found.handle) == ("2.13.0", "13.0", "2.30.7", 9)
    assert nccl_version(cuda) == "2.30.7"  # as a rank asks, whose torch has loaded it
    own = libraries_of(engine, {**UNSET, "VLLM_NCCL_SO_PATH": str(nccl[OLD] / "libnccl.so.2")})
    assert (own.nccl, own.own_nccl) == ("2.30.7", "2.29.7")
    assert nccl_version(library(tmp_path / "2.8" / "libnccl.so.2", 2804)) == "2.8.4"


def test_an_interpreter_that_says_nothing_is_named(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\necho no libraries >&2; exit 3\n")
    silent.chmod(0o755)
    for path, said in ((silent, "status 3: no libraries"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(EngineError, match=f"{path}: the versions of its libraries cannot be read: {said}"):
            libraries_of(path, UNSET)


def test_they_are_compared_before_a_run_and_again_before_servers_start(
    tmp_path: Path, nccl: Mapping[int, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = python(tmp_path / "engine", "2.14.1+cu130", nccl[NEW])
    monkeypatch.setattr(sys, "executable", str(python(tmp_path / "learner", "2.13.0+cu130", nccl[OLD])))
    monkeypatch.chdir(tmp_path)
    config = load_config("tiny_cpu", [*GPU, f"rollout.python={engine}", "weights.transport=direct"])
    (said,) = (text for text in preflight(config).texts("problem") if "NCCL" in text)
    assert re.search(r"2\.29\.7 \(learner .*2\.30\.7 \(engine .*; torch differs: 2\.13 .* 2\.14 .*; install the", said)
    shape = read_shape(folder := make_tiny_model(TinySizes(), tmp_path / "cache", seed=0))
    with pytest.raises(ConfigError, match=re.escape(said)):
        asyncio.run(ServedEngines(config, VLLMAdapter(shape), folder, tmp_path, shape)._prepare(tmp_path / "packages"))
    status_of("train", "--check", "rollout=vllm", f"rollout.python={engine}")
    assert re.search(r"^NCCL +2\.29\.7 +2\.30\.7$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr("launcher.commands.doctor._learner", lambda: "")
    status_of("doctor", "--python", str(engine))
    found = capsys.readouterr().out
    assert re.search(r"^torch +2\.13\.0\+cu130 +2\.14\.1\+cu130$", found, re.MULTILINE)
    assert "weights by process_group between GPUs are refused: NCCL differs: 2.29.7 (" in found


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("rollout.server.addresses=http://a:1",), "the servers at http://a:1"),
        (("slurm.container=/images/rl.sqsh", "run.launcher=slurm"), "the container /images/rl.sqsh"),
        (
            ("slurm.engines.container=/images/v.sqsh", "rollout.python=/opt/python", "run.launcher=slurm"),
            "the container /images/v.sqsh",
        ),
    ],
)
def test_what_only_ranks_can_compare_is_said_to_be_unchecked(more: tuple[str, ...], said: str) -> None:
    for transport, count in (("direct", 1), ("file", 0)):
        config = load_config("tiny_cpu", [*GPU, *more, f"weights.transport={transport}"])
        lines = [text for text in preflight(config).texts("unchecked") if text.startswith("torch and NCCL")]
        assert len(lines) == count
        assert all(said in line and "ranks compare when they meet" in line for line in lines)


def test_an_interpreter_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without the engine is named."""
    adapter = VLLMAdapter(model_shape("qwen3-30b-a3b"))
    monkeypatch.setattr(interpreter, "ANSWER_SECONDS", 0.2)
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    with pytest.raises(ConfigError, match=r"has not said in 0\.2 s whether vLLM is installed"):
        asyncio.run(interpreter.check_interpreter(silent, adapter))
    with pytest.raises(ConfigError, match=r"nowhere: it does not start, or has not said"):
        asyncio.run(interpreter.check_interpreter(tmp_path / "nowhere", adapter))
    monkeypatch.setattr(interpreter, "ANSWER_SECONDS", 60.0)
    silent.write_text("#!/bin/sh\necho False\n")
    with pytest.raises(ConfigError, match="vLLM is not installed there"):
        asyncio.run(interpreter.check_interpreter(silent, adapter))


def test_a_stop_does_not_wait_for_an_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter still runs once the event loop is closed, and is ended here."""
    monkeypatch.setattr(interpreter, "ANSWER_SECONDS", 10.0)
    os.mkfifo(begun := tmp_path / "begun")
    silent = tmp_path / "python"
    silent.write_text(f"#!/bin/sh\necho $$ >{begun}\nexec sleep 600\n")
    silent.chmod(0o755)
    pid = list[int]()

    async def stopped() -> None:
        checking = asyncio.ensure_future(
            interpreter.check_interpreter(silent, VLLMAdapter(model_shape("qwen3-30b-a3b")))
        )
        pid.append(int(await asyncio.to_thread(begun.read_text)))
        checking.cancel()
        await asyncio.wait([checking])
        assert checking.cancelled()

    asyncio.run(stopped())
    os.kill(pid[0], signal.SIGKILL)  # nobody has waited for its end, or given it up
