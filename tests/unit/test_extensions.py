"""What the user adds in one file outside this package, named on the command line: an algorithm, an engine that is a
server, a transport; or installed as a package: a command, a check. Rewards, observers, options and model families have
tests in their rooms (CONTRIBUTING.md)."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from launcher.__main__ import app
from launcher.preflight.checks import checks, preflight
from launcher.preflight.engine import find_server_module
from launcher.servers.engines import load_adapter
from rl_megatron.config.io import load_config
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import Server
from rl_megatron.entries import PLANNER, declared, load_entry, load_own
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, tiny_shape
from tests.documents import blocks
from tests.unit.rollout.test_engine_servers import REQUEST, SECTION, push, running
from tests.unit.training.test_update_oracle import assert_as_plain_loops

REPO = Path(__file__).resolve().parents[2]
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
    page = Path(__file__).parents[2] / "docs" / "algorithms.md"
    (documented,) = [block for block in blocks(page, "yaml") if block.text.startswith("# mine.yaml:")]
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
    assert find_server_module(name) == "mine_server"
    adapter = load_adapter(name, SHAPE)
    with running(1) as (fake,):
        server = Server(fake.url, token="t", timeout_seconds=60.0)
        engine = ServerEngine(adapter, [server], SECTION, max_length=8, vocab_size=10)
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
        load_adapter("nowhere:Mine", SHAPE)


# Commands and checks of installed packages, by their entry points.
ADDED = """
import typer
from launcher.preflight.subject import note

app = typer.Typer()

@app.callback(invoke_without_command=True)
def added():
    \"\"\"Do what was added.\"\"\"
    print("it ran")

def below():
    print("it ran below")

def check(subject):
    yield note(f"looked at {subject.config.run.name}")
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, points: str) -> None:
    """As pip leaves a package of one file that has these entry points."""
    (folder / f"{module}.py").write_text(ADDED)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, [*words])


def test_a_command_a_command_below_one_and_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = "[rl_megatron.commands]\nadded = mine_a:app\nadded.below = mine_a:below\nbroken = mine_no:it\n"
    install(tmp_path, monkeypatch, "mine_a", f"{commands}[rl_megatron.checks]\nmine = mine_a:check\n")
    shown = run("--help").output
    assert re.search(r"added +Do what was added\.", shown)
    assert "added.below" not in shown
    assert re.search(r"broken +cannot be loaded: no module mine_no", shown)
    assert "mine_a" not in sys.modules  # the help imports nothing
    assert run("added").output == "it ran\n"
    assert run("added", "below").output.endswith("it ran below\n")
    with pytest.raises(ConfigError, match=r"the command 'broken' that mine_a brings \(mine_no:it\) cannot be loaded"):
        raise run("broken").exception or AssertionError
    found = preflight(load_config("tiny_cpu", ["run.name=x"]))
    assert "looked at x" in found.texts("note")
    assert found.names[-6:] == ("memory", "mine", "pushes", "engine", "versions", "reward")


def test_names_that_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "[rl_megatron.commands]\ntrain = mine_b:app\n[rl_megatron.checks]\nsizes = mine_b:check\n"
    install(tmp_path, monkeypatch, "mine_b", points)
    with pytest.raises(ConfigError, match=r"'train' that mine_b brings \(mine_b:app\) has the name of another command"):
        raise run("--help").exception or AssertionError
    with pytest.raises(ConfigError, match=r"'sizes' that mine_b brings \(mine_b:check\) has the name of another"):
        checks()
    install(tmp_path, monkeypatch, "mine_c", "[rl_megatron.checks]\nmemory = mine_c:check\n")
    with pytest.raises(ConfigError, match=r"'memory' that .* has the name of another check; rename it"):
        declared("check", "rl_megatron.checks")


def test_what_is_installed_of_this_package_may_be_older_than_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_megatron.entries.entry_points", lambda group: ())
    for use in (checks, lambda: load_own(PLANNER, "rank")):
        with pytest.raises(ConfigError, match=r"older than this code; .* in a checkout by pip install -e \."):
            use()
    with pytest.raises(ConfigError, match=r"no entry points in rl_megatron\.commands: .*pip install -e \."):
        raise run("plan").exception or AssertionError


def test_this_package_declares_what_is_there() -> None:
    """What pyproject.toml says is what is installed, and each can be loaded."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group, points in project["entry-points"].items():
        found = declared("entry point", group, own=True)
        assert {name: found[name].value for name in points if name in found} == points
        assert all(load_entry("entry point", found[name]) is not None for name in points)
