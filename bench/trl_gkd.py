"""The baseline of bench.distill: TRL's GKDTrainer, wholly on-policy. Runs in TRL's own environment, not in ours.

    python -m bench.trl_gkd SPEC.json     (bench.distill writes it)

Set for speed on CPUs as `trl_gspo`: float32, no gradient checkpointing, no router loss, experts by grouped_mm,
attention by sdpa, AdamW fused, nothing logged or saved. Prompts have one length, so that nothing is padded but what is
sampled. A step is from the end of one optimizer step to the end of the next.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.trl_gspo import PLAIN


def run(spec: dict[str, Any]) -> list[dict[str, float]]:
    """Train; return each step's sampled tokens and seconds."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    torch.set_num_threads(spec["threads"])
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(
            spec[name], dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa"
        )
        for name in ("model", "teacher")
    )
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    ends: list[float] = []
    tokens: list[int] = [0]

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.perf_counter())
            tokens.append(0)

    class Counting(GKDTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
            loss = super().training_step(model, inputs, *rest)
            tokens[-1] += int((inputs["labels"] != -100).sum())  # those that it has just sampled
            return loss

    def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        ones = torch.ones_like(ids)
        of_prompts = {"prompts": ids, "prompt_attention_mask": ones}
        return {"input_ids": ids, "attention_mask": ones, "labels": ids, **of_prompts}  # it divides by their number

    trainer = Counting(
        model=student,
        teacher_model=teacher,
        args=GKDConfig(**config(spec)),
        data_collator=collated,
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in rows_of(spec, tokenizer)]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    if spec["equal"]:
        trainer.generation_config.min_new_tokens = spec["new_tokens"]
    began = time.perf_counter()
    trainer.train()
    seconds = [end - start for start, end in zip([began, *ends], ends, strict=False)]
    return [{"tokens": count, "seconds": whole} for count, whole in zip(tokens, seconds, strict=False)]


def rows_of(spec: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """The prompt of each completion, in order."""
    texts = [json.loads(line)["prompt"] for line in Path(spec["prompts"]).read_text().splitlines()]
    count = spec["prompts_per_step"] * spec["steps"]
    asked = [tokenizer(texts[n % len(texts)])["input_ids"] for n in range(count)]
    return [ids for ids in asked for _ in range(spec["group_size"])]


def config(spec: dict[str, Any]) -> dict[str, Any]:
    """GKDConfig's arguments."""
    completions = spec["prompts_per_step"] * spec["group_size"]
    return {
        "output_dir": spec["work"],
        "per_device_train_batch_size": spec["micro_batch"],
        "gradient_accumulation_steps": completions // spec["micro_batch"],
        "max_steps": spec["steps"],
        "max_new_tokens": spec["new_tokens"],
        "temperature": 1.0,
        "lmbda": 1.0,
        "beta": spec["beta"],
        "learning_rate": spec["learning_rate"],
        **PLAIN,
    }


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(given["out"]).write_text(json.dumps(run(given)))
