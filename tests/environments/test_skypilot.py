"""SkyPilot's own package of 460 MB reads the example (``make test-all PART=environments``)."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from tests.environments.served import interpreter
from tests.processes.test_documents import SCHEDULERS

READ = """
import json, sys
import jsonschema
from sky import Task
from sky.utils import schemas

given = json.load(sys.stdin)
jsonschema.Draft202012Validator(schemas.get_task_schema()).validate(given)
given.pop("volumes")  # which Task looks for at the API server
(resources,) = Task.from_yaml_config(given).resources
json.dump(resources.accelerators, sys.stdout)
"""


@pytest.mark.parametrize("key", [None, "node_count"])
def test_the_example_is_a_task_and_a_misspelt_one_is_none(key: str | None) -> None:
    task = yaml.safe_load((SCHEDULERS / "skypilot.yaml").read_text(encoding="utf-8"))
    if key:
        task[key] = task.pop("num_nodes")
    command = [interpreter("skypilot"), "-c", READ]
    ended = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=300)
    if key:
        assert f"'{key}' was unexpected" in ended.stderr
    else:
        assert (ended.returncode, json.loads(ended.stdout or "{}")) == (0, {"H100": 2}), ended.stderr
