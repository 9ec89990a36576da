"""TRL's trainers on given tokens, in the order given: the loss of each step and its gradient norm before clipping.

    python tests/e2e/trl_trainers.py SPEC.json     (tests.e2e.trl_values writes it; runs in TRL's own environment)

float32, one micro-batch a step, AdamW that leaves vectors undecayed, no router loss. TRL's logs round, so that the
loss is taken where it is returned, and the norm of the gradients where they are clipped.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

PACKAGES = ("trl", "transformers", "torch")


def language_model(folder: str) -> Any:
    """One whose embedding trains the padding token's row too, which a random student samples as often as others."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    return model


def judge(folder: str) -> Any:
    """A classifier whose scores begin at 0."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    return model


def parts_of(spec: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    """The trainer, its configuration, the model, and keywords of the first and of the second."""
    folder, own, still = spec["model"], spec["own"], {"router_aux_loss_coef": 0.0}
    if spec["job"] == "reward_model":
        return RewardTrainer, RewardConfig, judge(folder), {}, own
    model = language_model(folder)
    if spec["job"] == "sft":
        return SFTTrainer, SFTConfig, model, {}, own | still
    if spec["job"] == "dpo":
        return DPOTrainer, DPOConfig, model, {"ref_model": language_model(folder)}, own | still
    teacher = {"teacher_model": language_model(spec["teacher"])}
    return GKDTrainer, GKDConfig, model, teacher, own | still | {"lmbda": 0.0}


def values(spec: dict[str, Any], work: str) -> dict[str, list[float]]:
    """``loss`` and ``grad_norm`` of each step of one trainer."""
    trainer, config, model, keywords, own = parts_of(spec)
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    model.config.pad_token_id = tokenizer.pad_token_id
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    class Watched(trainer):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset: Dataset, *given: Any, **named: Any) -> Dataset:
            """Two of the trainers take tokens as their collators want them, and no step before that does."""
            return dataset if spec["job"] in ("dpo", "gkd") else super()._prepare_dataset(dataset, *given, **named)

        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*given, **named)
            found["loss"].append(loss.item())
            return loss

        def _clip_grad_norm(self, *given: Any, **named: Any) -> Any:
            norms = [p.grad.double().norm() for p in self.model.parameters() if p.grad is not None]
            found["grad_norm"].append(torch.stack(norms).norm().item())
            return super()._clip_grad_norm(*given, **named)

    Watched(
        model=model,
        args=config(
            output_dir=work,
            per_device_train_batch_size=spec["batch_size"],
            max_steps=spec["steps"],
            max_length=256,
            optim="adamw_torch",
            **spec["optimizer"],
            **own,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(spec["rows"]),
        processing_class=tokenizer,
        callbacks=list[TrainerCallback](),
        **keywords,
    ).train()
    assert len(found["loss"]) == len(found["grad_norm"]) == spec["steps"], found
    return found


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        made = {name: values(spec, f"{work}/{name}") for name, spec in given["jobs"].items()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    Path(given["out"]).write_text(json.dumps({"versions": versions, "values": made}))


if __name__ == "__main__":
    main()
