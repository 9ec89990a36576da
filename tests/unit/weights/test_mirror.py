"""The file between learner and engine servers: safetensors that others can read; errors name its faults."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.errors import SyncError
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.reports import sealed_by
from rl_megatron.weights.servers.mirror import Mirror, read, seal, seal_of

SHAPES = {"a.weight": (3, 4), "b.bias": (5,)}


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    config = tmp_path / "config.json"
    config.write_text("{}")
    path = tmp_path / "weights" / "model.safetensors"
    Mirror.make(path, SHAPES, torch.bfloat16, config)
    made = Mirror(path, SHAPES, torch.bfloat16)
    for name, tensor in made.tensors.items():
        tensor.copy_(torch.randn(SHAPES[name]))
    return made


def test_what_is_served_is_read_and_is_a_hugging_face_folder(mirror: Mirror) -> None:
    mirror.serve(3)
    for tensors in (read(mirror.path, 3), load_file(mirror.path)):
        assert tensors.keys() == SHAPES.keys()
        assert all(torch.equal(tensors[name], mirror.tensors[name]) for name in SHAPES)
    assert mirror.path.with_name("config.json").read_text() == "{}"


@pytest.mark.parametrize("how", ["open to all", "another's", "a link"])
def test_a_folder_that_a_stranger_made_is_refused_and_nothing_is_written_through_it(tmp_path: Path, how: str) -> None:
    """With links in it to files of the run's user, as somebody would make it who foretold its name."""
    if how == "another's" and os.geteuid():
        pytest.skip("only root can make a folder that is another's")
    config, victim, folder = tmp_path / "config.json", tmp_path / "victim", tmp_path / "weights"
    config.write_text("{}")
    victim.write_text("mine")
    real = folder.with_name("real") if how == "a link" else folder
    real.mkdir(mode=0o700)
    for name in ("config.json", "model.safetensors"):
        (real / name).symlink_to(victim)
    if how == "a link":
        folder.symlink_to(real)
    elif how == "another's":
        os.chown(folder, 65534, 65534)
    else:
        folder.chmod(0o777)
    with pytest.raises(SyncError, match=r"no folder of user \d+ alone .* weights\.folder"):
        Mirror.make(folder / "model.safetensors", SHAPES, torch.bfloat16, config)
    assert victim.read_text() == "mine"


def test_the_folder_is_nobody_elses_and_one_of_an_earlier_start_is_taken(mirror: Mirror, tmp_path: Path) -> None:
    assert stat.S_IMODE(mirror.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(mirror.path.stat().st_mode) == 0o600
    mirror.serve(3)
    Mirror.make(mirror.path, SHAPES, torch.bfloat16, tmp_path / "config.json")
    assert Mirror(mirror.path, SHAPES, torch.bfloat16).num_bytes == mirror.num_bytes
    with pytest.raises(SyncError, match="holds version None, not 3"):  # which the earlier start had served
        read(mirror.path, 3)


def test_memory_is_taken_before_the_first_tensor_is_written_or_refused(tmp_path: Path) -> None:
    """Not where the file is made, as weights that are sent straight may never fill it."""
    config, memory = tmp_path / "config.json", Path("/dev/shm")
    config.write_text("{}")
    whole = shutil.disk_usage(memory).total
    with TemporaryDirectory(dir=memory) as folder:
        path = Path(folder) / "w" / "model.safetensors"
        for elements, fits in ((2**19, True), (whole, False)):
            Mirror.make(path, {"a": (elements,)}, torch.bfloat16, config)
            mirror = Mirror(path, {"a": (elements,)}, torch.bfloat16)
            assert 512 * path.stat().st_blocks < 2**20
            if fits:
                mirror.withdraw()
                assert 512 * path.stat().st_blocks >= path.stat().st_size > 2**20
                continue
            needed = path.stat().st_size
            with pytest.raises(
                SyncError, match=rf"{path}: .* need {needed} bytes .*, and \d+ are free\..*weights\.folder"
            ):
                mirror.withdraw()


def test_a_file_that_somebody_removed_is_told_with_what_to_do(mirror: Mirror) -> None:
    """What systemd-logind does to a user's files in /dev/shm at the end of the last session."""
    mirror.withdraw()
    mirror.serve(1)
    shutil.rmtree(mirror.path.parent)
    for act in (mirror.withdraw, lambda: mirror.serve(2)):
        with pytest.raises(SyncError, match=rf"{mirror.path} is gone.* RemoveIPC=no .*weights\.folder"):
            act()


def test_a_version_that_is_not_there_is_refused(mirror: Mirror) -> None:
    mirror.serve(3)
    with pytest.raises(SyncError, match="holds version 3, not 4"):
        read(mirror.path, 4)
    mirror.withdraw()
    with pytest.raises(SyncError, match="holds version None, not 3"):
        read(mirror.path, 3)


def test_a_version_that_is_not_sealed_is_told_from_one_that_is(mirror: Mirror) -> None:
    mirror.serve(3)
    with pytest.raises(SyncError, match="version 3 is not sealed"):
        seal_of(mirror.path, 3)
    with pytest.raises(SyncError, match="holds version 3, not 4"):
        seal(mirror.path, 4, {})
    assert seal(mirror.path, 3, {"a.weight": 5}) == seal_of(mirror.path, 3)
    assert seal_of(mirror.path, 3).checksums == {"a.weight": 5}
    mirror.serve(4)
    with pytest.raises(SyncError, match="version 4 is not sealed"):
        seal_of(mirror.path, 4)


def test_a_flipped_bit_is_in_the_sums(mirror: Mirror) -> None:
    before = sealed_by([mirror.sums()], SHAPES)
    assert before == {name: checksum(tensor, SHAPES[name]) for name, tensor in mirror.tensors.items()}
    mirror.tensors["b.bias"].view(torch.uint8)[1] ^= 1
    after = sealed_by([mirror.sums()], SHAPES)
    assert [name for name in SHAPES if before[name] != after[name]] == ["b.bias"]
