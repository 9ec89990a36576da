"""The baseline of bench.written: TRL's SFTTrainer, DPOTrainer or RewardTrainer. Runs in TRL's own environment, not in
ours.

    python bench/trl_written.py SPEC.json     (bench.written writes it)

Set for speed on CPUs as `trl_gspo`: float32, no gradient checkpointing, no router loss, experts by grouped_mm,
attention by sdpa, AdamW fused, nothing logged or saved. Sequences are padded to the longest of a micro-batch: TRL packs
only with kernels for GPUs. Rows are tokenized before the clock starts, which is TRL's way.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def trainer_of(job: str) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    """The trainer, its configuration, the kind of model, and keywords of the model and of the configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    if job == "sft":
        own = {"completion_only_loss": True, "router_aux_loss_coef": 0.0, "packing": False}
        return SFTTrainer, SFTConfig, AutoModelForCausalLM, {}, own
    if job == "dpo":
        return DPOTrainer, DPOConfig, AutoModelForCausalLM, {}, {}
    return RewardTrainer, RewardConfig, AutoModelForSequenceClassification, {"num_labels": 1}, {}


def run(spec: dict[str, Any]) -> list[float]:
    """Train; return the seconds of each optimizer step."""
    import torch
    from datasets import load_dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback

    trained, config, kind, labels, own = trainer_of(spec["job"])
    torch.set_num_threads(spec["threads"])
    model = kind.from_pretrained(
        spec["model"], dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa", **labels
    )
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], split_special_tokens=False)  # TRL writes the end as text
    model.config.pad_token_id = tokenizer.pad_token_id
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.perf_counter())

    class InOrder(trained):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=model,
        args=config(
            output_dir=spec["work"],
            per_device_train_batch_size=spec["micro_batch"],
            gradient_accumulation_steps=spec["batch_size"] // spec["micro_batch"],
            max_steps=spec["steps"],
            max_length=spec["max_tokens"],
            learning_rate=spec["learning_rate"],
            lr_scheduler_type="constant",
            **own,
            optim="adamw_torch_fused",
            weight_decay=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=load_dataset("json", data_files=spec["rows"], split="train", cache_dir=spec["work"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    began = time.perf_counter()
    trainer.train()
    return [end - start for start, end in zip([began, *ends], ends, strict=False)]


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(given["out"]).write_text(json.dumps(run(given)))
