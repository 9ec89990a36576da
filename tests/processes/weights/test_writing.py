"""Conversions that are killed, go on, and are shared; shared memory that a killed run left, and of other users."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_megatron.errors import CheckpointError, ConfigError, SyncError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert, streaming
from rl_megatron.weights.checkpoints.streaming import Files, Share
from rl_megatron.weights.routes import mirror
from rl_megatron.weights.routes.last_hop import _HELLO, Rings
from rl_megatron.weights.routes.mirror import lock_folder, remove_abandoned, wait_until_unlocked
from tests.unit.weights.conversions import tree
from tools.convert import verify
from tools.convert.commands import part_of_step
from tools.convert.conversion import read_share, run

ROOT = Path(__file__).parents[3]
SPEC = TinySizes(hidden_size=16, expert_width=8, num_layers=1, num_experts=2, head_dim=8, num_heads=2)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(SPEC, tmp_path_factory.mktemp("models"), seed=4)


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    convert.hf_to_megatron(hf, hf.parent / "megatron", shard_bytes=6_000)
    return hf.parent / "megatron"


def said_by(kind: str, hf: Path, megatron: Path, folder: Path) -> str:
    command = [sys.executable, "-m", "tests.unit.weights.conversions", kind, *map(str, (hf, megatron, folder))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_conversion_killed_at_many_steps_goes_on_to_the_same_bytes(hf: Path, megatron: Path, tmp_path: Path) -> None:
    """SIGKILL before a sync, removal or block: the folder is absent or whole, and its files are kept."""
    steps = re.fullmatch(r"(?:whole after (\d+) steps or fewer\n){2}", said := said_by("kills", hf, megatron, tmp_path))
    assert steps, said
    assert int(steps[1]) > 50


def test_parts_side_by_side_write_what_one_process_writes(hf: Path, megatron: Path, tmp_path: Path) -> None:
    assert said_by("parts", hf, megatron, tmp_path) == ""


def test_a_part_knows_the_files_of_another(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other part begins, and writes, between this one's look for the book and what it does next."""
    is_file, others = Path.is_file, []

    def then_another_part(path: Path) -> bool:
        found = is_file(path)
        if path.parent.name == ".conversion" and not others:
            others.append(path)
            assert convert.hf_to_megatron(hf, tmp_path / "out", shard_bytes=6_000, share=Share(index=1, count=2)) == [0]
        return found

    monkeypatch.setattr(Path, "is_file", then_another_part)
    assert convert.hf_to_megatron(hf, tmp_path / "out", shard_bytes=6_000, share=Share(index=0, count=2)) == []
    assert others


@pytest.mark.parametrize("late", ["a file is written", "the folder is removed"])
def test_a_part_whose_folder_begins_again_ends_well(
    late: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both begin the hidden folder again behind its rename. One writes there while the other removes it, or removes it
    before this one reads its book."""
    out, partial, done = tmp_path / "out", tmp_path / ".out.partial", list[str]()
    exists, rmdir, write = os.path.lexists, os.rmdir, streaming.write_atomically

    def then_others_complete_it(path: Path) -> bool:
        found = exists(path)
        if path == out and not done:
            done.append("parts")
            for index in (1, 0):
                convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=Share(index=index, count=2))
        return found

    def another_writes(path: Any, *given: Any, **named: Any) -> None:
        if len(done) == 1 and exists(partial) and exists(out):
            done.append("late")
            (partial / "late").touch()
        rmdir(path, *given, **named)

    def and_another_removes_it(path: Path, data: bytes) -> None:
        write(path, data)
        if exists(out) and path.is_relative_to(partial):
            done.append("late")
            shutil.rmtree(partial)

    monkeypatch.setattr(os.path, "lexists", then_others_complete_it)
    if late == "a file is written":
        monkeypatch.setattr(os, "rmdir", another_writes)
    else:
        monkeypatch.setattr(streaming, "write_atomically", and_another_removes_it)
    assert convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=Share(index=0, count=2)) == []
    assert done == ["parts", "late"]


def test_a_part_ends_well_with_a_renamed_folder(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files were there, and then its book is not."""
    out, is_file, done = tmp_path / "out", Path.is_file, list[Path]()
    assert convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=Share(index=1, count=2)) == [0]

    def then_another_completes_it(path: Path) -> bool:
        if path.parent.name == ".conversion" and not done:
            done.append(path)
            assert convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=Share(index=0, count=2)) == []
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", then_another_completes_it)
    assert convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=Share(index=0, count=2)) == []
    assert done


def test_a_part_ends_well_if_its_folder_is_renamed(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, changed, done = tmp_path / "out", Files.changed, list[Files]()
    assert convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=Share(index=1, count=2)) == [0]

    def then_another_completes_it(files: Files) -> list[str]:
        done.append(files)
        if len(done) == 2:  # this part's files are written
            assert convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=Share(index=0, count=2)) == []
        return changed(files)

    monkeypatch.setattr(Files, "changed", then_another_completes_it)
    assert convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=Share(index=0, count=2)) == []
    assert len(done) > 2


def test_a_conversion_is_continued_only_with_its_own_source_and_options(hf: Path, tmp_path: Path) -> None:
    out, first = tmp_path / "out", Share(index=0, count=2)
    assert convert.hf_to_megatron(hf, out, shard_bytes=6_000, share=first) == [1]
    before = tree(tmp_path / ".out.partial")
    other = make_tiny_model(SPEC, tmp_path / "models", seed=5)
    for source, options, message in (
        (other, {}, "a conversion with another source; continue it with its own source and options, remove it, or"),
        (hf, {"dtype": DType.BF16}, "a conversion with another files, dtype; "),
        (hf, {"shard_bytes": 7_000}, "a conversion with another shard_bytes; "),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert.hf_to_megatron(source, out, **{"shard_bytes": 6_000, **options})
    assert tree(tmp_path / ".out.partial") == before
    assert convert.hf_to_megatron(hf, out, shard_bytes=6_000) == []
    with pytest.raises(CheckpointError, match="out exists; remove it"):
        convert.hf_to_megatron(other, out, shard_bytes=6_000, share=first)
    (tmp_path / ".foreign.partial").mkdir()
    (tmp_path / ".foreign.partial" / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="was left by another version or program; remove it"):
        convert.hf_to_megatron(hf, tmp_path / "foreign")


@pytest.mark.parametrize("share", [Share(), Share(index=0, count=2)])
def test_a_link_to_no_folder_is_no_output(hf: Path, tmp_path: Path, share: Share) -> None:
    out = tmp_path / "out"
    out.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="out is a link to a folder that is not there; remove it or give"):
        convert.hf_to_megatron(hf, out, share=share)
    assert list(tmp_path.iterdir()) == [out]


def test_an_output_that_another_program_makes_meanwhile_is_named(hf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=rf"\.out\.partial, renamed to {out}: "):
        convert.hf_to_megatron(hf, out, on_progress=lambda *_: out.touch())


@pytest.mark.parametrize("share", [Share(), Share(index=0, count=2)])
def test_a_source_that_changes_while_it_is_read_is_not_published(hf: Path, tmp_path: Path, share: Share) -> None:
    """As a file of full size that is still being filled; a file that is no tensor's may change."""
    source, out = Path(shutil.copytree(hf, tmp_path / "source")), tmp_path / "out"
    (file,) = source.glob("*.safetensors")
    (source / "log").touch()
    os.utime(file, (0, 0))

    def fill(*_: int) -> None:
        (source / "log").write_text("no file that is read")
        with file.open("r+b") as opened:
            opened.seek(-8, os.SEEK_END)
            opened.write(bytes(8))

    told = rf"source changed while it was read: {file}: {file.stat().st_size} bytes of 1970-01-01 00:00:00.000"
    with pytest.raises(CheckpointError, match=told):
        convert.hf_to_megatron(source, out, shard_bytes=6_000, on_progress=fill, share=share)
    assert not out.exists()
    if share.count > 1:  # others may write there still
        with pytest.raises(CheckpointError, match="a conversion with another source; "):
            convert.hf_to_megatron(source, out, shard_bytes=6_000, share=share)
        shutil.rmtree(tmp_path / ".out.partial")
    assert convert.hf_to_megatron(source, out, shard_bytes=6_000) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("change", [lambda path: path.write_text("{}"), Path.unlink], ids=["rewrite", "unlink"])
def test_a_source_whose_small_files_change_while_it_is_read_is_not_published(
    hf: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    source, out = Path(shutil.copytree(hf, tmp_path / "source")), tmp_path / "out"
    os.utime(source / name, (0, 0))

    def fill(*_: int) -> None:
        if (source / name).exists():
            change(source / name)

    with pytest.raises(CheckpointError, match=rf"source changed while it was read: {source / name}: \d+ bytes of 1970"):
        convert.hf_to_megatron(source, out, on_progress=fill)
    assert not out.exists()


def test_a_checkpoint_that_is_removed_while_it_is_read_is_converted(megatron: Path, hf: Path, tmp_path: Path) -> None:
    """As by a run that keeps its newest ones alone."""
    source = Path(shutil.copytree(megatron, tmp_path / "source"))

    def remove(*_: int) -> None:
        shutil.rmtree(source, ignore_errors=True)

    assert convert.megatron_to_hf(source, tmp_path / "out", config=hf, shard_bytes=6_000, on_progress=remove) == []
    assert convert.megatron_to_hf(megatron, tmp_path / "kept", config=hf, shard_bytes=6_000) == []
    files = [
        sorted((path.name, path.read_bytes()) for path in (tmp_path / each).glob("*.safetensors"))
        for each in ("out", "kept")
    ]
    assert files[0] == files[1] != []


@pytest.mark.parametrize(
    ("dtype", "share"), [(None, Share()), (DType.F32, Share(index=1, count=2)), (DType.F8_E4M3, Share())]
)
def test_progress_ends_at_its_first_total(megatron: Path, tmp_path: Path, dtype: DType | None, share: Share) -> None:
    told = list[tuple[int, int]]()

    def tell(count: int, total: int) -> None:
        told.append((count, total))

    convert.megatron_to_hf(megatron, tmp_path / "out", dtype=dtype, shard_bytes=6_000, on_progress=tell, share=share)
    assert {total for _, total in told} == {sum(count for count, _ in told)}


def test_the_progress_of_verify_counts_the_checksums(megatron: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, forgotten, forget = list[tuple[int, int]](), list[int](), Files.forget

    def tell(count: int, total: int) -> None:
        told.append((count, total))

    def noted(files: Files) -> None:
        forgotten.append(sum(count for count, _ in told))
        forget(files)

    monkeypatch.setattr(verify, "FORGET_BYTES", 10_000)
    monkeypatch.setattr(Files, "forget", noted)
    assert not list(verify.verify(megatron, on_progress=tell))
    stored = sum(path.stat().st_size for path in megatron.glob("*.distcp"))
    assert {total for _, total in told} == {sum(count for count, _ in told)}
    assert told[0][1] > stored > forgotten[0]


def test_a_kept_file_of_another_digest_is_written_again(hf: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(hf, tmp_path / "whole", shard_bytes=6_000)
    convert.hf_to_megatron(hf, tmp_path / "out", shard_bytes=6_000, share=Share(index=0, count=2))
    kept = tmp_path / ".out.partial" / "__0_0.distcp"
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    convert.hf_to_megatron(hf, tmp_path / "out", shard_bytes=6_000)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    book = json.loads((tmp_path / "out" / ".conversion.json").read_text())
    assert book["digests"].keys() == {path.name for path in (tmp_path / "out").glob("*.distcp")}


def test_the_part_is_an_option_or_the_task_of_a_step() -> None:
    assert part_of_step({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "2", "SLURM_NTASKS": "8"}) == "3/8"
    assert part_of_step({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert part_of_step({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None  # a batch script outside of srun
    shell = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40000"}
    with pytest.raises(ConfigError, match=r"in a step of srun --pty: .*; give --part 1/1 to write all here"):
        part_of_step(shell)
    assert part_of_step(shell | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert (read_share("3/8"), read_share(None)) == (Share(index=2, count=8), Share())
    for given in ("0/2", "3/2", "2", "a/b", "-1/2"):
        with pytest.raises(ConfigError, match=rf"part '{given}' must be K/N with 1 <= K <= N, as 2/8"):
            read_share(given)


def test_the_command_says_what_the_other_parts_have_to_write(hf: Path, tmp_path: Path) -> None:
    def said(part: str) -> str:
        command = [sys.executable, "-m", "launcher", "convert", str(hf), str(tmp_path / "out")]
        done = subprocess.run(
            [*command, "--shard-gb", "6e-6", "--part", part], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert said("2/3").startswith("part 2 of 3 is written; not yet: 1, 3. The part that ends last completes")
    assert said("3/3").startswith("part 3 of 3 is written; not yet: 1. ")
    assert f"{tmp_path / 'out'}: megatron torch_dist" in said("1/3")


def test_of_many_parts_to_write_the_command_names_twenty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_tiny_model(replace(SPEC, num_layers=4), tmp_path / "models", seed=4)
    run(source, tmp_path / "out", shard_gb=1e-9, part="768/768")
    told = re.search(r"not yet: ((?:\d+, ){19}\d+) and (\d+) more\. The part", capsys.readouterr().out)
    assert told
    assert told[1].split(", ") == [str(part) for part in range(1, 21)]


# What a killed run left in a node's memory goes with the next run there; what a living one has stays.
HOLD = "import sys\nfrom pathlib import Path\nfrom rl_megatron.weights.routes.mirror import lock_folder\n" + (
    "with lock_folder(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    names = ("rl_megatron-dead", "rl_megatron-alive", "rl_megatron-mine", "rl_megatron-no_lock", "other-dead")
    dead, alive, mine, no_lock, other = (tmp_path / name for name in names)
    for folder in (dead, alive, mine, no_lock, other):
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
    held = {folder: hold(folder) for folder in (dead, alive, other)}
    try:
        with lock_folder(mine):
            remove_abandoned(mine)
            assert all(folder.exists() for folder in (dead, alive, mine, no_lock, other))
            for folder in (dead, other):
                held[folder].send_signal(signal.SIGKILL)
                held[folder].wait()
            remove_abandoned(mine)
            assert [f.exists() for f in (dead, alive, mine, no_lock, other)] == [False, True, True, True, True]
        with lock_folder(mine):  # the same run again
            remove_abandoned(dead)
            assert mine.exists()
    finally:
        for process in held.values():
            process.communicate()


def test_a_folder_that_another_run_uses_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one in another container that shares /dev/shm, and has its run's folder under the same path."""
    wait_until_unlocked(tmp_path)
    held = hold(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(mirror, "_ENDING_SECONDS", 0.0)
        with pytest.raises(
            SyncError, match=rf"{tmp_path} has weights of a run that still runs.* run\.name, run\.dir or"
        ):
            wait_until_unlocked(tmp_path)
    held.send_signal(signal.SIGKILL)  # an earlier start that ends meanwhile
    wait_until_unlocked(tmp_path)
    held.communicate()


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a folder's lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


# Processes of other users, and processes that end, while ranks connect their rings.
_STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
streams = []
for name in sys.argv[2:]:
    for _ in range(int(sys.argv[1])):
        streams.append(socket.socket(socket.AF_UNIX))
        streams[-1].setblocking(False)
        try:
            streams[-1].connect(bytes.fromhex(name))
        except BlockingIOError:  # the queue is full
            break
print(len(streams))
"""


def connected(rank: int, peers: Any) -> list[tuple[int, bool]]:
    """The links of a rank that sends to the other and receives from it."""
    ends: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    rings = Rings(ends, {(0, 1): 4096, (1, 0): 4096}, lambda *_: [], peers=peers, timeout_seconds=60)
    try:
        return [(link.peer, link.leaving) for link in rings.links]
    finally:
        rings.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("each", [1, 1000])
def test_another_users_connections_are_turned_away(each: int) -> None:
    """One before each rank's, and as many as fill the ranks' queues."""
    places: dict[int, str] = {}
    seen: list[int] = []

    def strangers_come() -> None:
        command = [sys.executable, "-I", "-S", "-c", _STRANGER, str(each), *places.values()]
        seen.append(int(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout))

    everybody = threading.Barrier(2, strangers_come, timeout=60)

    def run(rank: int) -> list[tuple[int, bool]]:
        def gather(mine: str) -> list[str]:
            places[rank] = mine
            everybody.wait()
            return [places[0], places[1]]

        return connected(rank, SimpleNamespace(size=2, gather=gather))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[(1, True), (1, False)], [(0, True), (0, False)]]
    assert seen == [2] if each == 1 else 4 < seen[0] < 20


@pytest.mark.parametrize("said", [b"", _HELLO.pack(1, 4096, 10) + b"123"], ids=["nothing", "a part"])
def test_a_rank_that_ends_as_it_connects_is_an_error(said: bytes) -> None:
    there = socket.socket(socket.AF_UNIX)

    def gather(mine: str) -> list[str]:
        with socket.socket(socket.AF_UNIX) as sender:
            sender.connect(bytes.fromhex(mine))
            sender.sendall(said)
        there.bind(f"\0{mine}")
        there.listen()
        return [mine, there.getsockname().hex()]

    with there, pytest.raises(SyncError, match=r"rank 0 waited for rank 1 to offer .*its connection is closed"):
        connected(0, SimpleNamespace(size=2, gather=gather))
