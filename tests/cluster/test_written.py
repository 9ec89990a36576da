"""Jobs on written text, distillations, and a run that a reward model judges, on two nodes of a real Slurm, with Ray and
without: as on one machine, to the bit. Two teachers, or one of them, and the reward model are on nodes of their own; a
server that slurm.setup starts has the other.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import Cluster, read_record
from tests.e2e.served_teacher import serving

STEPS = 6
KEYS = (
    *("learner.threads=1", "log.tensorboard=false", "data.num_eval=16", f"train.steps={STEPS}"),
    *("checkpoint.every=2", "eval.every=2"),
)
LAST = f"hf_step_{STEPS:06d}"
SAMPLED = ("rollout.prompts_per_step=4", "rollout.group_size=4", "warm_start.steps=0")
TEACHERS = "algorithm.kl.teachers"
TAUGHT = (
    *(*SAMPLED, "algorithm=distill", "algorithm.kl.reference=null", "train.learning_rate=5e-4"),
    *(f"{TEACHERS}.late.path=runs/local-sft/{LAST}", f"{TEACHERS}.late.weight=3"),
    *(f"{TEACHERS}.other.path=runs/local-dpo/{LAST}", "roles.layouts.teacher_other.pp=1"),
)
PORT = 18999  # of the served teacher; each node has a network of its own
OWN = {
    "sft": ("sft.batch_size=16",),
    "dpo": ("dpo.batch_size=16",),
    "reward": ("reward_model.batch_size=16",),
    "teachers": (*TAUGHT, "roles.layouts.teacher_late.tp=1"),
    "served": (
        *(*TAUGHT, f"{TEACHERS}.late.server=http://127.0.0.1:{PORT}"),
        f"{TEACHERS}.late.engine=tests.e2e.served_teacher:Transformers",
    ),
    "judged": (
        *(*SAMPLED, "reward.function=ranks:judge", f"reward_models.judge.path=runs/local-reward/{LAST}"),
        "roles.layouts.reward_judge.tp=1",
    ),
}
CONFIGS = {
    **{recipe: f"{recipe}_tiny" for recipe in OWN},
    **dict.fromkeys(("teachers", "served"), "distill_tiny"),
    "judged": "tiny_cpu",
}
BEFORE = {"teachers": ("sft", "dpo"), "served": ("sft", "dpo"), "judged": ("reward",)}
"""The recipes whose models a recipe needs."""
SERVES = f"{sys.executable} -m tests.e2e.served_teacher runs/local-sft/{LAST} {PORT} >runs/teacher.txt 2>&1 &"
ON_SLURM = {"served": (f"slurm.setup={SERVES}",)}
OTHERS = {
    "teachers": tuple(f"teacher_{name}: 1 ranks on 1 nodes" for name in ("late", "other")),
    "served": ("teacher_other: 1 ranks on 1 nodes",),
    "judged": ("reward_judge: 1 ranks on 1 nodes",),
}
"""What placement.txt says of those beside the learner."""


def local(cluster: Cluster, recipe: str) -> Path:
    """The recipe's run on this machine, without Slurm; made once. What was fine-tuned is the teacher or the judge."""
    for other in BEFORE.get(recipe, ()):
        local(cluster, other)
    with cluster.alone(f"local {recipe}"):
        run = cluster.work / "runs" / f"local-{recipe}"
        if not run.exists():
            teacher = cluster.work / "runs" / "local-sft" / LAST
            with serving(teacher, port=PORT) if recipe == "served" else contextlib.nullcontext():
                cluster.program("train", "--config", CONFIGS[recipe], *KEYS, *OWN[recipe], f"run.name={run.name}")
        return run


@pytest.mark.parametrize(
    ("recipe", "launcher"),
    [*((recipe, "slurm") for recipe in OWN), ("sft", "ray"), ("teachers", "ray"), ("judged", "ray")],
)
def test_a_job_on_two_nodes_is_that_of_one_machine(cluster: Cluster, recipe: str, launcher: str) -> None:
    alone = local(cluster, recipe)
    keys = (*KEYS, *OWN[recipe], "slurm.nodes=2", f"run.launcher={launcher}", *ON_SLURM.get(recipe, ()))
    job = cluster.submit_config(CONFIGS[recipe], f"{recipe}-{launcher}", *keys)
    assert job.end() == "COMPLETED", job.said()
    assert [row["step"] for row in job.record()] == list(range(STEPS + 1))
    assert job.record() == read_record(alone)
    weights = f"{LAST}/model.safetensors"
    assert (job.run / weights).read_bytes() == (alone / weights).read_bytes()
    assert "2 ranks on 2 nodes" in (job.run / "log.txt").read_text()
    placed = (job.run / "placement.txt").read_text()
    assert all(line in placed for line in OTHERS.get(recipe, ()))
