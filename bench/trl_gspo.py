"""The baseline of bench.end_to_end: TRL's GRPOTrainer set to GSPO. Runs in TRL's own environment, not in ours.

    python bench/trl_gspo.py SPEC.json     (bench.end_to_end writes it)

It is set for speed on CPUs, since TRL's defaults are for GPUs: float32 without autocast, no gradient checkpointing, no
router loss, nothing logged or saved; and the fastest of these choices here: experts by grouped_mm (eager is a fifth
slower, batched_mm runs out of memory), attention by sdpa (or eager), whole minibatches in one forward (or in 2 or 4),
AdamW fused (or not). A step is one rollout batch: from the end of one's last optimizer step to the end of the next
one's.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAIN = {
    "router_aux_loss_coef": 0.0,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "optim": "adamw_torch_fused",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 0,
}
"""Arguments of TRL's configurations for speed on CPUs, also of `trl_gkd`."""


def text_hash(texts: Sequence[str]) -> list[float]:
    """A reward of the text alone that no group shares: its CRC-32, scaled to [0, 1)."""
    return [zlib.crc32(text.encode()) / 2**32 for text in texts]


def run(spec: dict[str, Any]) -> list[dict[str, float]]:
    """Train; return each rollout batch's completion tokens, seconds, and seconds spent in `generate`."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(spec["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa"
    )
    ends: list[float] = []
    tokens: list[int] = []
    generating: list[float] = []
    generate = model.generate

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        ids = generate(*args, **kwargs)
        generating.append(time.perf_counter() - began)
        return ids

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return text_hash(completions)

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % spec["minibatches"] == 0:
                ends.append(time.perf_counter())

    model.generate = timed_generate
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**config(spec)),
        train_dataset=load_dataset("json", data_files=spec["prompts"], split="train", cache_dir=spec["work"]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        callbacks=[Clock()],
    )
    began = time.perf_counter()
    trainer.train()
    seconds = [end - start for start, end in zip([began, *ends], ends, strict=False)]
    return [
        {"tokens": count, "seconds": whole, "generate": part}
        for count, whole, part in zip(tokens, seconds, generating, strict=True)
    ]


def config(spec: dict[str, Any]) -> dict[str, Any]:
    """GRPOConfig's arguments: `minibatches` optimizer steps on every rollout batch, GSPO's ratio and clip range."""
    completions = spec["prompts_per_step"] * spec["group_size"]
    return {
        "output_dir": spec["work"],
        "per_device_train_batch_size": completions // spec["minibatches"],
        "gradient_accumulation_steps": 1,
        "steps_per_generation": spec["minibatches"],
        "num_iterations": 1,
        "max_steps": spec["steps"] * spec["minibatches"],
        "num_generations": spec["group_size"],
        "max_completion_length": spec["new_tokens"],
        "generation_kwargs": {"min_new_tokens": spec["new_tokens"]} if spec["equal"] else None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "loss_type": "grpo",
        "beta": 0.0,
        "learning_rate": spec["learning_rate"],
        "max_grad_norm": 1.0,
        **PLAIN,
    }


def main() -> None:
    """Run the spec and write its rows to the file that it names."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    Path(spec["out"]).write_text(json.dumps(run(spec)))


if __name__ == "__main__":
    main()
