"""Every command block of the documents: commands are there, take these arguments, and configurations load.

These tests start processes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from launcher.preflight.checks import preflight
from launcher.preflight.sizes import size_problems
from rl_megatron.models.named import NAMED
from rl_megatron.scaling.estimates import estimate
from rl_megatron.scaling.memory import check_memory
from tests.unit.test_documented_commands import EVERY, REPO, Command, configuration, parsed, program


@pytest.mark.parametrize(
    "command",
    [c for c in EVERY if c.place.startswith("docs/migrating.md") and program(c) == "rl-megatron"],
    ids=lambda c: c.place[:90],
)
def test_recipes_of_who_moves_here_fit_their_gpus(command: Command) -> None:
    """Sent as written, they find a fault in nothing but the reader's own files."""
    name, given = parsed(command)
    assert name == "submit"
    config = configuration(str(given["config"]), ["run.launcher=slurm", *given["overrides"]])  # type: ignore[misc]
    fullest = check_memory(config, NAMED[str(config.model.name)])
    assert fullest is not None
    assert list(size_problems(config, NAMED[str(config.model.name)])) == []
    assert list(estimate(config, NAMED[str(config.model.name)]).warnings()) == []
    found = preflight(config, for_job=True)
    own = ("model.path=", "data.train=", "data.eval=", "rollout.python=", "reward.function='my_rewards")
    assert [text for text in found.texts("problem") if not text.startswith(own)] == []
    assert found.texts("note") == []


def test_a_machine_with_its_own_torch_names_all_packages_that_are_missing() -> None:
    """Every package that this one depends on; here none is missing, and without site-packages all are."""
    (asked,) = (c for c in EVERY if c.place.startswith("docs/install.md") and c.words[:2] == ("python3", "-c"))
    program = asked.words[2]
    named = set(program.split('"""')[1].split())
    wanted = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    distributions = {re.split("[=>]", line)[0] for line in wanted}
    imported = {"megatron-core": "megatron", "pyyaml": "yaml"}
    assert {imported.get(name, name.replace("-", "_")) for name in distributions} <= named
    here, bare = (
        subprocess.run([sys.executable, *flags, "-c", program], capture_output=True, text=True, check=True).stdout
        for flags in ([], ["-I", "-S"])
    )
    assert here == "[]\n"
    assert set(ast.literal_eval(bare)) == named
