"""Jobs on written text on two nodes of a real Slurm, with Ray and without: as on one machine, to the bit."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import Cluster, read_record

SECTIONS = {"sft": "sft", "dpo": "dpo", "reward": "reward_model"}
KEYS = (
    *("learner.threads=1", "log.tensorboard=false", "data.num_eval=16", "train.steps=6"),
    *("checkpoint.every=2", "eval.every=2"),
)


@pytest.mark.parametrize(
    ("recipe", "launcher"), [("sft", "slurm"), ("sft", "ray"), ("dpo", "slurm"), ("reward", "ray")]
)
def test_a_job_on_two_nodes_is_that_of_one_machine(cluster: Cluster, recipe: str, launcher: str) -> None:
    keys, name = (*KEYS, f"{SECTIONS[recipe]}.batch_size=16"), f"local-{recipe}"
    with cluster.alone(f"local {recipe}"):
        alone = cluster.work / "runs" / name
        if not alone.exists():
            cluster.program("train", "--config", f"{recipe}_tiny", *keys, f"run.name={name}")
    job = cluster.submit_config(
        f"{recipe}_tiny", f"{recipe}-{launcher}", *keys, "slurm.nodes=2", f"run.launcher={launcher}"
    )
    assert job.end() == "COMPLETED", job.said()
    assert [row["step"] for row in job.record()] == list(range(7))
    assert job.record() == read_record(alone)
    weights = "hf_step_000006/model.safetensors"
    assert (job.run / weights).read_bytes() == (alone / weights).read_bytes()
    assert "2 ranks on 2 nodes" in (job.run / "log.txt").read_text()
