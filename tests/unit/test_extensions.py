"""What the user adds in one file outside this package, named on the command line: an algorithm, an engine that is a
server, a transport. Rewards, observers, options and model families have tests in their rooms (CONTRIBUTING.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.preflight.engine import module_of
from launcher.servers.engines import adapter_of
from rl_megatron.config.io import load_config
from rl_megatron.engines.engine import ServedEngine
from rl_megatron.engines.http import Server
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, tiny_shape
from tests.documents import blocks
from tests.unit.rollout.test_engine_servers import REQUEST, SECTION, push, running
from tests.unit.training.test_update_oracle import assert_as_plain_loops

SHAPE = tiny_shape(TinySizes())
ENGINE = """
from tests.documents import blocks
from tests.unit.rollout.test_engine_servers import Words

class Mine(Words):
    name, module = "Mine", "mine_server"

    def __init__(self, shape):
        self.shape = shape
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_algorithm(tmp_path: Path) -> None:
    """The row that docs/algorithms.md gives as an example."""
    documented, *_ = blocks(Path(__file__).parents[2] / "docs" / "algorithms.md", "yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(documented.text)
    keys = ["train.minibatches=1", "train.epochs=2", "train.learning_rate=2.0", "train.lr_decay=none"]
    config = load_config(str(path), [*keys, "learner.ep=1", "rollout.max_prompt_tokens=2"])
    row = config.algorithm
    assert (row.objective, row.correction.mode, row.correction.high) == ("importance", "truncate", 1.5)
    assert_as_plain_loops(config)


@pytest.mark.usefixtures("mine")
async def test_an_engine_that_is_a_server() -> None:
    name = load_config("tiny_cpu", ["rollout.engine=mine_engine:Mine"]).rollout.engine
    assert module_of(name) == "mine_server"
    adapter = adapter_of(name, SHAPE)
    with running(1) as (fake,):
        server = Server(fake.url, token="t", timeout_seconds=60.0)
        engine = ServedEngine(adapter, [server], SECTION, max_length=8, vocab_size=10)
        await push(engine, 3)
        (completion,) = await engine.generate(REQUEST)
        await engine.close()
    assert completion.spans == ((0, 3),)


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [("rollout.engine", "vlm", r"must be 'local', 'vllm' or 'sglang' .*or package.module:name")],
)
def test_what_is_neither_known_nor_of_ones_own_is_refused(key: str, given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", [f"{key}={given}"])


def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine='nowhere:Mine': no module 'nowhere'"):
        adapter_of("nowhere:Mine", SHAPE)
