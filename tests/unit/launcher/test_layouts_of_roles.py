"""A critic and a reference in layouts of their own: their nodes, the job's request for these, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.preflight.checks import preflight
from launcher.programs import submit
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError

GIVEN = (
    *("run.name=layouts", "run.launcher=slurm", "learner.device=cuda", "learner.tp=4", "learner.ep=8"),
    *("slurm.gpus_per_node=8", "slurm.nodes=2", "learner.dp=4", "algorithm=ppo", "algorithm.kl.coefficient=0.1"),
)
APART = ("roles.critic=separate", "roles.reference=separate")
CRITIC = ("roles.layouts.critic.tp=2", "roles.layouts.critic.pp=2", "roles.layouts.critic.dp=2")
REFERENCE = ("roles.layouts.reference.tp=4", "roles.layouts.reference.dp=3")


def config_of(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", [*GIVEN, *keys])


def test_they_fill_as_many_nodes_as_they_need() -> None:
    config = config_of(*APART, *CRITIC, *REFERENCE, "slurm.heterogeneous=true", "slurm.reference.gpus_per_node=4")
    lines = submit.checked(config).describe().splitlines()
    assert lines[lines.index("critic: 8 ranks on 1 nodes, 8 on each") :] == [
        *("critic: 8 ranks on 1 nodes, 8 on each", "  node 2: ranks 0-7"),
        *("  tp=2: inside a node", "  dp=2: inside a node", "  pp=2: inside a node"),
        *("  etp=2: inside a node", "  edp=2: inside a node"),
        "reference: 12 ranks on 3 nodes, 4 on each",
        *(f"  node {3 + i}: ranks {4 * i}-{4 * i + 3}" for i in range(3)),
        *("  tp=4: inside a node", "  dp=3: across 3 nodes", "  etp=4: inside a node", "  edp=3: across 3 nodes"),
    ]
    script = submit.job_script(config, folder=Path("/work"), python="python", package=Path("/code"))
    asked = [re.findall(r"#SBATCH --(?:nodes|ntasks-per-node)=(\d+)", part) for part in script.split("#SBATCH hetjob")]
    assert asked[:3] == [["2", "8"], ["1", "8"], ["3", "4"]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (CRITIC, "roles.layouts.critic, but roles.critic=learner: the learner's ranks hold such a critic, in their"),
        ((*APART, "roles.layouts.policy.tp=2"), "roles.layouts.policy"),
        ((*APART, "roles.layouts.critic.vpp=2"), "roles.layouts.critic.vpp=2 needs a pipeline, but roles.layouts.cri"),
        ((*APART, "roles.layouts.critic.pp=3"), "give the layers of each stage (roles.layouts.critic.stage_layers;"),
        (
            (*APART, "roles.layouts.critic.tp=16"),
            "roles.layouts.critic.tp=16 does not divide critic ranks on a node=8: a tensor-parallel group would leave",
        ),
        (
            (*APART, *CRITIC, "slurm.critic.nodes=2"),
            "slurm.critic.nodes=2, but a separate critic has 8 ranks, which fill 1 of the learner's nodes",
        ),
        (
            (*APART, *REFERENCE, "slurm.reference.nodes=5", "slurm.heterogeneous=true"),
            "slurm.reference.nodes=5 cannot share out the ranks of a separate reference evenly: it has tp*cp",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_the_roles_keys(keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(config_of(*keys), for_job=True).raise_problems()
    assert message in str(caught.value)
