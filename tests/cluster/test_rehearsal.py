"""A rehearsal on a real Slurm, one of whose nodes has a slow network."""

from __future__ import annotations

import json

from rl_megatron.config.run import TinyModelSection
from rl_megatron.models.tiny import make_tiny_model
from tests.cluster.jobs import Cluster

TRIO = ("slurm.nodes=3", "slurm.partition=trio", "learner.dp=3", "learner.ep=3")
STAGES = ["survey", "start", "resume"]


def test_a_rehearsal_names_the_slow_node_and_goes_through_every_stage(cluster: Cluster) -> None:
    """The model's folder has sizes and a tokenizer alone."""
    model = make_tiny_model(TinyModelSection(num_experts=6), cluster.work / "models", 0)
    (model / "model.safetensors").unlink()
    with cluster.throttle("node21", "200mbit"):
        job = cluster.rehearse("trio", *TRIO, f"model.path={model}")
        assert job.end() == "COMPLETED", job.log() + job.said()
    report = json.loads((job.run / "rehearsal.json").read_text())
    assert report["failures"] == []
    assert list(report["seconds"]) == STAGES
    assert sum(report["seconds"].values()) < 20 * 60
    networks = {node for node, what in report["slow"].items() if any("its network" in each for each in what)}
    assert networks == {"node21"}
    lines = {line["what"]: line for line in report["lines"]}
    assert lines["nodes without a fault"]["measured"] == 3
    assert lines["between nodes"]["measured"] < 0.03  # GB/s: 200 Mbit/s, and the bucket's burst
    assert all(lines[f"{kind} group of 3, over nodes"]["measured"] > 0 for kind in ("dp", "ep"))
    bytes_of_push = next(line for what, line in lines.items() if what.startswith("bytes of a push"))
    assert 1 <= bytes_of_push["measured"] / bytes_of_push["predicted"] < 1.05
    saved = lines["bytes of a checkpoint"]
    assert 0 <= saved["measured"] - saved["predicted"] < 1e-3  # GB: an index and each file's head
    assert all(lines[what]["measured"] > 0 for what in ("start to the first step", "resume to its first step"))
    assert lines["killed rank to the run's end"]["verdict"] == "ok"
    assert [row["step"] for row in report["metrics"]][:3] == [1, 2, 3]
    assert "SLOW: node21: its network" in job.log()
    assert not (job.run / "checkpoints").exists()
    assert not list(job.run.glob("hf_step_*"))
