"""Jobs on written text, and a distillation, on two nodes of a real Slurm, with Ray and without: as on one machine, to
the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.jobs import Cluster, read_record

STEPS = 6
KEYS = (
    *("learner.threads=1", "log.tensorboard=false", "data.num_eval=16", f"train.steps={STEPS}"),
    *("checkpoint.every=2", "eval.every=2"),
)
LAST = f"hf_step_{STEPS:06d}"
OWN = {
    "sft": ("sft.batch_size=16",),
    "dpo": ("dpo.batch_size=16",),
    "reward": ("reward_model.batch_size=16",),
    "distill": (
        *("rollout.prompts_per_step=4", "rollout.group_size=4", "warm_start.steps=0"),
        f"algorithm.kl.reference=runs/local-sft/{LAST}",
    ),
}


def local(cluster: Cluster, recipe: str) -> Path:
    """The recipe's run on this machine, without Slurm; made once. What was fine-tuned is the teacher."""
    if recipe == "distill":
        local(cluster, "sft")
    with cluster.alone(f"local {recipe}"):
        run = cluster.work / "runs" / f"local-{recipe}"
        if not run.exists():
            cluster.program("train", "--config", f"{recipe}_tiny", *KEYS, *OWN[recipe], f"run.name={run.name}")
        return run


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
@pytest.mark.parametrize("recipe", OWN)
def test_a_job_on_two_nodes_is_that_of_one_machine(cluster: Cluster, recipe: str, launcher: str) -> None:
    alone = local(cluster, recipe)
    job = cluster.submit_config(
        f"{recipe}_tiny", f"{recipe}-{launcher}", *KEYS, *OWN[recipe], "slurm.nodes=2", f"run.launcher={launcher}"
    )
    assert job.end() == "COMPLETED", job.said()
    assert [row["step"] for row in job.record()] == list(range(STEPS + 1))
    assert job.record() == read_record(alone)
    weights = f"{LAST}/model.safetensors"
    assert (job.run / weights).read_bytes() == (alone / weights).read_bytes()
    assert "2 ranks on 2 nodes" in (job.run / "log.txt").read_text()
