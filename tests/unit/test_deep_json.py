"""JSON and YAML that are nested too deeply are refused like any torn file or answer; json has RecursionError for them.

tests/unit/weights, data and rewards do the same for files of models and of problems, and for servers of rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_megatron.errors import EngineError, RewardError, RLMegatronError
from rl_megatron.models.json_files import tensor_names
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.timeline import kernels
from rl_megatron.observability.timeline.trace import read_trace
from rl_megatron.rewards.tests import _tests
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Prompt
from tests.unit.launcher.commands import status_of

DEEP = "[" * 100_000
READERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda run: read_jsonl(run / "metrics.jsonl"),
    "trace.json": lambda run: list(read_trace(run)),
    "profile/step_000001/ranks.json": lambda run: list(kernels.read_kernels(run)),
    "model.safetensors": tensor_names,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "train"}\n')
    return tmp_path


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_nested_too_deeply_is_named(name: str, run: Path) -> None:
    file = run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    header = len(DEEP).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    file.write_bytes(header + DEEP.encode() + b"\n")
    with pytest.raises(RLMegatronError) as told:
        READERS[name](run)
    assert str(file.parent) in str(told.value)
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize(
    ("command", "name", "content"),
    [
        ("inspect", "checkpoints/step_000001/trainer.json", DEEP),
        ("inspect", "config.json", DEEP),
        ("inspect", "config.json", '{"text_config": 7}'),
        ("report", "config.yaml", DEEP),
        ("report", "config.yaml", "a: !!int b"),
        ("report", "config.yaml", "a: !!bool b"),
    ],
)
def test_a_command_says_which_file_it_is(
    command: str, name: str, content: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(content)
    assert status_of(command, str(run)) == 1
    said = capsys.readouterr().err
    assert str(run / name) in said
    assert len(said) < 2000


def test_an_answer_that_is_nested_too_deeply_is_the_servers() -> None:
    server = Server("http://127.0.0.1:9", token=None, timeout_seconds=1.0)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/models: the answer is not JSON"):
        server._json("/models", DEEP)


@pytest.mark.parametrize("tests", [DEEP, {"function": "f", "tests": [{"input": DEEP, "output": "1"}]}])
def test_tests_that_are_nested_too_deeply_are_the_problems(tests: object) -> None:
    with pytest.raises(RewardError, match="prompt 'p': its field 'tests'") as told:
        _tests(Prompt(id="p", text="", token_ids=(1,), answer="", meta={"tests": tests}), "tests")
    assert len(str(told.value)) < 1000
