"""Keys that only some values of others read: set without these they are refused by name, with the reason; at their
defaults they are taken, so that a saved configuration is. Keys of a step: test_every_key_acts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError

ROWS = ("data=gsm8k", "data.train=a.jsonl", "data.eval=b.jsonl")
SET = "eval.sets.hard.temperature"
UNREAD = [  # the key, what makes it one that nothing reads, and what reads it
    ("model.tiny.num_layers=3", ("model.path=models/mine",), ()),
    ("model.cache_dir=cache", ("model.path=models/mine",), ()),
    ("warm_start.batch_size=8", ("warm_start.steps=0",), ("warm_start.steps=3",)),
    ("warm_start.stop_at_accuracy=0.5", ("warm_start.steps=0",), ("warm_start.steps=3",)),
    ("data.on_leak=drop", (), ROWS),
    ("data.on_leak=drop", (), ("eval.sets.own.data.type=files", "eval.sets.own.data.eval=b.jsonl")),
    ("eval.temperature=0.5", (f"{SET}=1",), ("eval.sets.hard.limit=3",)),
    ("log.samples_per_group=2", ("log.samples_per_step=0",), ()),
    ("log.wandb_project=mine", (), ("log.wandb=offline",)),
    ("slurm.container_runtime=apptainer", (), ("slurm.container=/a.sif",)),
    ("slurm.container_mounts=/data", (), ("slurm.container=/a.sif",)),
    ("slurm.container_python=python3", (), ("slurm.container=/a.sif",)),
    ("rollout.server.running_requests=abort", ("rollout=vllm",), ("rollout=vllm", "train.max_staleness=1")),
    ("rollout.server.running_requests=abort", ("rollout=vllm",), ("rollout=vllm", "eval.mode=beside")),
    (
        "slurm.speeds.draft_acceptance=0.5",
        (),
        ("rollout=vllm", "rollout.server.draft_tokens=1", "learner.draft.train=true"),
    ),
]


@pytest.mark.parametrize(("key", "idle", "read"), UNREAD)
def test_a_key_that_nothing_reads_is_refused_and_one_that_acts_is_taken(
    key: str, idle: tuple[str, ...], read: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", [*idle, key])
    assert any(line.startswith(f"{key} does nothing: ") for line in str(caught.value).splitlines()), caught.value
    assert "leave it out, or set it to its default, " in str(caught.value)
    load_config("tiny_cpu", [*read, key])
    load_config("tiny_cpu", idle)


def test_a_number_of_steps_beside_epochs_is_refused() -> None:
    load_config("sft_tiny", ["train.steps=7"])
    with pytest.raises(ConfigError, match=r"^train\.steps=7 does nothing: sft\.epochs=2 says how many steps"):
        load_config("sft_tiny", ["sft.epochs=2", "train.steps=7"])


@pytest.mark.parametrize("field", ["prompt_field", "answer_field", "prompt_template"])
def test_rows_of_conversations_have_no_fields_of_a_problem(field: str) -> None:
    data = {"type": "files", "train": "a", "eval": "b", "messages_field": "messages"}
    RunConfig.model_validate({"job": "sft", "data": data})
    with pytest.raises(ValueError, match=rf"{field}='other' does nothing with messages_field='messages'"):
        RunConfig.model_validate({"job": "sft", "data": {**data, field: "other"}})


def test_what_was_set_before_gives_way_to_an_override_that_leaves_it_nothing_to_do(tmp_path: Path) -> None:
    """tiny_cpu has a warm start, gsm8k_tiny the sizes of a tiny model, sft_tiny a number of steps."""
    assert load_config("tiny_cpu", ["warm_start.batch_size=8", "warm_start.steps=0"]).warm_start.batch_size == 256
    without = load_config("tiny_cpu", ["warm_start.steps=0"])
    assert without.warm_start == RunConfig().warm_start
    assert load_config("gsm8k_tiny", [*ROWS[1:], "model.path=models/mine"]).model.tiny == RunConfig().model.tiny
    assert load_config("sft_tiny", ["sft.epochs=2"]).train.steps == RunConfig().train.steps
    save_resolved(without, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml"), []) == without


def test_a_file_gives_way_to_one_that_starts_from_it_but_not_to_itself(tmp_path: Path) -> None:
    above = tmp_path / "mine.yaml"
    above.write_text("defaults: tiny_cpu\nwarm_start: {steps: 0}\n")
    assert load_config(str(above), []).warm_start == RunConfig().warm_start
    above.write_text("defaults: tiny_cpu\nwarm_start: {steps: 0, batch_size: 8}\n")
    with pytest.raises(ConfigError, match=r"^warm_start\.batch_size=8 does nothing: warm_start\.steps=0 is no warm"):
        load_config(str(above), [])
