"""What takes an interpreter of its own: files and folders that a kill interrupts, imports, options, hash seeds."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import certifi

from rl_megatron.digests import mismatches
from rl_megatron.training import checkpoints
from tests.forks import FORKS
from tests.unit.models.test_reference_model import make_at_once, weights
from tests.unit.options.test_installed import FILE, SAYS, package, run
from tests.unit.test_config_io import REPO
from tests.unit.test_durable import FULL, folder_with
from tests.unit.training.test_checkpoints import killed_at, write_steps


def test_the_configuration_imports_no_torch() -> None:
    code = (
        "import json, sys, rl_megatron.config.run, rl_megatron.config.io as c; c.load_config('tiny_cpu', []); "
        "print(json.dumps([m for m in ('torch', 'megatron', 'transformers', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


# Files are replaced, and folders published and removed, completely or not at all, even if a kill interrupts.
def test_what_the_system_refuses_to_a_library_in_rust_names_the_file(tmp_path: Path) -> None:
    """As to safetensors and tokenizers, whose errors are none of Python's; by a limit in place of a full disk."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path / "x"], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "OSError: [Errno 27] File too large: 'x'"


def test_a_folder_whose_removal_is_killed_is_no_longer_there_in_part(tmp_path: Path) -> None:
    folder_with(tmp_path / "x", *(f"d{i}/f" for i in range(5)))
    code = (
        "import os, shutil, signal, sys; from pathlib import Path; from rl_megatron import files as durable;"
        "shutil.rmtree = lambda p: (os.remove(p / 'd0/f'), os.kill(os.getpid(), signal.SIGKILL));"
        "durable.remove_folder(Path(sys.argv[1]))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=False)
    assert run.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [".removing-x"]
    shutil.rmtree(tmp_path / ".removing-x")


# Whose certificates the HTTP client trusts: by the environment, or the system's where that names what is not there.
CODE = "from rl_megatron.http import client; client.new_client(); print(len(client._trusted().get_ca_certs()))"


def ended(**named: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    given = {name: str(value) for name, value in named.items()}
    return subprocess.run([sys.executable, "-c", CODE], env=environment | given, capture_output=True, text=True)


def test_certificates_are_of_the_file_that_the_environment_names_or_the_systems(tmp_path: Path) -> None:
    mark = "-----END CERTIFICATE-----\n"
    (tmp_path / "one.pem").write_text(Path(certifi.where()).read_text().partition(mark)[0] + mark)
    assert ended(SSL_CERT_FILE=tmp_path / "one.pem").stdout == "1\n"
    usual, missing = ended(), ended(SSL_CERT_FILE=tmp_path / "nowhere.pem")
    assert missing.stdout == usual.stdout
    assert "SSL_CERT_FILE or SSL_CERT_DIR cannot be read" in missing.stderr


# The tiny model is a true Hugging Face folder, made once, whole.
def test_processes_that_make_it_at_once_get_the_same_whole_folder(tmp_path: Path) -> None:
    (cache := tmp_path / "cache").mkdir()
    start = FORKS.Barrier(2)
    processes = [FORKS.Process(target=make_at_once, args=(start, cache, tmp_path / str(n))) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, 0]
    said = {(tmp_path / str(n)).read_text() for n in range(2)}
    assert [str(path) for path in cache.iterdir()] == list(said)
    assert weights(Path(said.pop()))


# Durability of the run's JSON lines: torn tails, resumes, faults that name the line.
def test_an_appended_row_survives_kill_9_without_close(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from rl_megatron.observability.files import JsonlFile;"
        "f = JsonlFile(Path(sys.argv[1])); f.append([{'step': 7}]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == b'{"step": 7}\n'


# A feature from another package: one file and its entry point, without any change here.
def test_it_is_listed_refuses_and_has_its_keys_keywords_and_bytes(tmp_path: Path) -> None:
    done = run(package(tmp_path, FILE), SAYS)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["listed"] == "residual"
    expected = ["| `learner.residual_copies` | integer ≥ 0 | `0` | Copies in float32 of what runs past the layers. |"]
    assert said["documented"] == expected
    assert said["row"] == "copies in float32 of what runs past the layers"
    assert said["last key"] == "residual_copies"
    assert said["fixed"] == 3  # on a resume
    assert said["refused"] == "learner.residual_copies=3 with learner.pp=2; set learner.pp=1"
    assert "did you mean 'learner.residual_copies'?" in said["misspelled"]
    assert said["keyword"] == {"fp32_residual_connection": True}
    assert said["bytes"] == 3 * 4 * 48 * 32768 * 2048 / 4  # copies, bytes, layers, tokens, hidden size over tp
    assert "Largest: residual; lower learner.residual_copies; rl-megatron scale" in said["advice"]


def test_one_that_cannot_be_loaded_is_told_with_its_package(tmp_path: Path) -> None:
    done = run(
        package(tmp_path, "raise OSError('no license')"),
        "import sys; from launcher.entry import main; sys.argv.append('plan'); main()",
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: the feature 'residual' that residual-feature brings (residual_feature:FEATURE) cannot be loaded: "
        "OSError('no license'); fix or uninstall it\n"
    )


# Plans over random models and meshes, executed with numpy and compared with shards cut by separately written rules.
def test_a_plan_does_not_depend_on_hash_seeds() -> None:
    code = (
        "from rl_megatron.models.named import NAMED; from rl_megatron.types import ParallelDims as D\n"
        "from rl_megatron.weights.layouts.layout import Layout; from rl_megatron.weights.plans.plan import plan\n"
        "from rl_megatron.weights.layouts.tables.grouped_query import ENGINE_QWEN3_MOE, MEGATRON_QWEN3_MOE\n"
        "import hashlib, sys\n"
        "m = NAMED['qwen3-30b-a3b']\n"
        "learner = Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=D(tp=2, pp=4, ep=4, dp=4))\n"
        "engine = Layout(table=ENGINE_QWEN3_MOE, shape=m, dims=D(tp=8, ep=8, dp=4))\n"
        "print(hashlib.sha256(repr(plan(learner, engine)).encode()).hexdigest(), 'torch' in sys.modules)"
    )
    said = set()
    for seed in ("1", "2", "3"):
        own = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        said |= {subprocess.check_output([sys.executable, "-c", code], env=own, text=True)}
    assert len(said) == 1
    assert said.pop().endswith("False\n")


# A checkpoint that is written while training goes on: its moment, kills during it, and which ones are kept.
def test_killed_at_any_moment_of_a_save_a_whole_checkpoint_stands(tmp_path: Path) -> None:
    """The files that a process opens, makes, renames and removes are counted, and it is killed at each of them."""
    found, moment = list[str](), 0
    asyncio.run(write_steps(tmp_path, {3: None}, keep=1))
    while killed_at(tmp_path, moment := moment + 1):
        latest = checkpoints.latest(tmp_path)
        assert latest is not None
        checkpoint = checkpoints.read(latest)
        assert not mismatches(latest, checkpoint.files, read=True)
        found.append(f"{checkpoint.state.step}")
        if latest.name == "step_000004":  # begin again from the one before
            shutil.rmtree(tmp_path)
            asyncio.run(write_steps(tmp_path, {3: None}, keep=1))
    assert moment > 15
    assert set(found) == {"3", "4"}
    assert found == sorted(found)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]  # what kills left is gone
