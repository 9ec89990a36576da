"""Jobs of Slurm of every kind, as keys of a configuration."""

from __future__ import annotations

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig

BIG = ("learner.device=cuda", "learner.tp=4", "learner.ep=8", "slurm.gpus_per_node=8")


CASES = {
    "cpu_two_nodes": ("slurm.nodes=2", "slurm.time=30"),
    "every_option": (
        *BIG,
        *("slurm.nodes=2", "learner.dp=4", "slurm.cpus_per_task=12", "slurm.memory_per_node=0", "slurm.time=2-00"),
        *("slurm.account=lab", "slurm.partition=gpu", "slurm.constraint=h100"),
        "slurm.exclude=bad[1-3]",
        *("slurm.signal_seconds=600", "slurm.requeues=5", "slurm.restarts=1"),
        *("slurm.setup=module load cuda/12.8 nccl && source /opt/site/env.sh", "slurm.environment.NCCL_DEBUG=INFO"),
        *("slurm.environment.GREETING=it's a $HOME", "slurm.python=/opt/venv/bin/python"),
        "slurm.options=[--qos=high,--reservation=weekend,--dependency=afterok:12,--mail-type=END,FAIL,"
        "--comment=\"a 'b' #c\"]",
    ),
    "ray_and_engine_nodes": (
        *BIG,
        *("run.launcher=ray", "rollout=vllm", "rollout.server.replicas=4", "rollout.server.tp=4", "slurm.nodes=2"),
        *("slurm.engines.nodes=2", "learner.dp=4"),
    ),
    "separate_roles": (
        *("learner.ep=4", "slurm.nodes=2", "slurm.time=30", "algorithm=ppo", "algorithm.kl.coefficient=0.1"),
        *("roles.critic=separate", "roles.reference=separate"),
    ),
}


def config_of(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", ["run.name=golden", *keys])
