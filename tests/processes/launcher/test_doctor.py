"""What ``rl-megatron doctor`` finds on a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.commands import doctor
from launcher.programs.mismatch import target_of
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.errors import ConfigError

REPO = Path(__file__).resolve().parents[3]


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
    assert doctor._learner().startswith("learner: was not imported in 0.01 s; look at the disk")


@pytest.mark.parametrize("name", ["sft_tiny", "dpo_tiny", "reward_tiny"])
def test_a_job_that_samples_nothing_has_no_mismatch(name: str, tmp_path: Path) -> None:
    """Of a configuration, and of a run's folder."""
    config = load_config(name, [])
    save_resolved(config, tmp_path / "config.yaml")
    for target in (str(tmp_path / "config.yaml"), str(tmp_path)):
        with pytest.raises(ConfigError, match=f"{target}: job={config.job} samples nothing, so"):
            target_of(target, [])
