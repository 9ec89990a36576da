"""Fine-tuning on two nodes of a real Slurm: as on one machine, to the bit."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import Cluster, read_record

KEYS = (
    *("learner.threads=1", "log.tensorboard=false", "sft.batch_size=16", "data.num_eval=16", "train.steps=6"),
    *("checkpoint.every=2", "eval.every=2"),
)


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_fine_tuning_on_two_nodes_is_that_of_one_machine(cluster: Cluster, launcher: str) -> None:
    with cluster.alone("local sft"):
        alone = cluster.work / "runs" / "local-sft"
        if not alone.exists():
            cluster.program("train", "--config", "sft_tiny", *KEYS, "run.name=local-sft")
    job = cluster.submit_config("sft_tiny", f"sft-{launcher}", *KEYS, "slurm.nodes=2", f"run.launcher={launcher}")
    assert job.end() == "COMPLETED", job.said()
    assert [row["step"] for row in job.record()] == list(range(7))
    assert job.record() == read_record(alone)
    weights = "hf_step_000006/model.safetensors"
    assert (job.run / weights).read_bytes() == (alone / weights).read_bytes()
    assert "2 ranks on 2 nodes" in (job.run / "log.txt").read_text()
