"""Each shipped configuration with each choice of a group: it loads, or is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from tests.rows import BESIDE, PAIR_ROWS

CONF = Path(__file__).resolve().parents[2] / "conf"
CONFIGS = sorted(path.stem for path in CONF.glob("*.yaml"))
CHOICES = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml"))
OF_COMPLETIONS = {
    **{f"algorithm={name}": " with algorithm" for name in (*PAIR_ROWS, "remax")},
    "algorithm=scalerl": ": only single completions",
    "algorithm=grpo_process": " with reward: the environment gives",  # environments judge their own turns
    "algorithm=luffy": ": a demonstration is the text of one answer",
    "algorithm=gdpo": ": an environment gives one reward",
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_shipped_config_loads_with_every_choice(choice: str) -> None:
    for name in CONFIGS:  # here, since a test of pytest takes as long as a configuration
        refused = loaded_or_refused_by(name, choice)
        assert refused is None, f"{name}: {refused}"


def loaded_or_refused_by(name: str, choice: str) -> str | None:
    """None where the configuration loads with the choice, or is refused with the reason that it should be."""
    none = ["slurm.engines.nodes=0", "slurm.heterogeneous=false", "weights.transport=auto", "weights.folder=null"]
    none += [f"slurm.engines.{key}=null" for key in ("gpus_per_node", "memory_per_node", "cpus_per_server")]
    none += ["learner.offload.while_sampling=null"]
    where = none if choice == "rollout=local" else []  # no servers: no nodes, no route and no file for them
    of_two = choice.removeprefix("algorithm=") in PAIR_ROWS  # sequences
    pairs = ["learner.max_tokens_per_micro_batch=16384"] if of_two else []
    hub = ["data.repo=a/b", f"data.revision={'a' * 40}", "data.train=a.jsonl", "data.eval=b.jsonl"]
    if name in ("dpo_tiny", "reward_tiny"):
        hub, pairs = [*hub, "data.rejected_field=bad"], ["data.rejected_field=bad"] if choice == "data=gsm8k" else []
    given = {"data=mixture": ["data.sources.sums.type=arithmetic"], "data=hub": hub}.get(choice, [])
    plain = ["learner.head_dtype=null"] if choice == "algorithm=gkd" else []
    keys = [choice, "model.path=/given", *where, *pairs, *given, *plain, *BESIDE.get(choice.partition("=")[2], ())]
    refused, samples_none = "", name in ("sft_tiny", "dpo_tiny", "reward_tiny")
    if name in ("calculator", "guess") and choice in OF_COMPLETIONS:
        refused = rf"environment\.function={name}{OF_COMPLETIONS[choice]}"
    elif choice == "algorithm=scalerl" and load_config(name, keys[1:2]).rollout.server.colocated:
        refused = r"with train\.max_staleness=8 servers sample while the learner trains"
    elif samples_none and (choice.startswith("algorithm=") or choice in ("rollout=vllm", "rollout=sglang")):
        refused = r"job=\w+ does not read it, job=rl may"
    elif choice == "algorithm=gigpo" and load_config(name, keys[1:2]).environment.function is None:
        refused = r"algorithm\.credit=turn: without environment\.function"
    elif name == "distill_tiny" and choice.startswith("algorithm=") and choice[10:] not in BESIDE:  # without a teacher
        refused = r"reward\.parts: the weights of exact_match are all 0|preference\.beta|with reward\.parts"
    try:
        load_config(name, keys)
    except ConfigError as error:
        return None if refused and re.search(refused, str(error)) else str(error)
    return f"not refused: {refused}" if refused else None
