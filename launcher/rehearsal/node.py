"""The task of one node, ``python -m launcher.rehearsal.node``: checks the machine, then starts its link processes.

Standard input is the `Survey`. The answer goes into the file ``<node>.json`` of its folder: once after the machine's
checks, and again with those of the links.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from launcher.processes import limits
from launcher.processes.environment import variables
from launcher.rehearsal import machine
from launcher.rehearsal.messages import Survey
from launcher.wire.greetings import this_node
from launcher.worker.forking import Program, hindrance, import_all, start
from rl_megatron.durable import write_atomically

_IMPORTS = ("torch", "torch.distributed", "launcher.rehearsal.links")


def main() -> None:
    """Check this node."""
    survey, node = Survey.read(sys.stdin.readline()), this_node()
    limits.raise_open_files()
    found: dict[str, object] = {"node": node, "machine": machine.describe(), "problems": (problems := [])}
    try:
        found["gpus"] = machine.gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    except OSError as error:
        problems.append(str(error))
    disks: dict[str, object] = {}
    for folder in survey.disks:
        try:
            disks[folder] = machine.disk(Path(folder))
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
    found["disks"] = disks
    answer = Path(survey.answers) / f"{node}.json"
    write_atomically(answer, json.dumps(found).encode())
    os.environ.update(variables(threads=survey.threads, device=survey.device))
    import_all(_IMPORTS)
    found["links"] = _links(survey, node)
    write_atomically(answer, json.dumps(found).encode())


def _links(survey: Survey, node: str) -> list[object]:
    """The answers of this node's link processes; one that gave none has an error."""
    hindered, started = hindrance(), []
    for local, number in enumerate(survey.processes(node)):
        asking, line = os.pipe()
        answering, answer = os.pipe()
        pid = start(
            Program(
                module="launcher.rehearsal.links",
                arguments=(str(number), str(local), str(os.getpid())),
                files={0: asking, 1: answer},
            ),
            hindered,
            close=(line, answering),
        )
        for end in (asking, answer):
            os.close(end)
        with os.fdopen(line, "wb") as stream:
            stream.write(survey.line())
        started.append((pid, number, answering))
    answers: list[object] = []
    for pid, number, answering in started:
        with os.fdopen(answering) as stream:
            said = stream.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.append(json.loads(said) if said else {"process": number, "error": f"it ended with exit code {code}"})
    return answers


if __name__ == "__main__":
    main()
