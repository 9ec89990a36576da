"""Supervised steps on correct answers by the same learner, before reinforcement: until it answers some problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.data.packing import pack
from rl_megatron.data.prompts import PromptStream
from rl_megatron.data.samples import supervised_samples
from rl_megatron.errors import Stopped
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.checkpoints import Checkpoint, TrainerState
from rl_megatron.training.stopping import unless_stopped
from rl_megatron.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, kw_only=True)
class WarmStart:
    """Cross-entropy on ``Prompt.answer``; leaves its weights in the learner and in the engine."""

    trainer: Trainer
    prompts: PromptStream
    tokenizer: PreTrainedTokenizerBase

    async def run(self, done: int | None = None) -> bool:
        """Up to ``warm_start.steps`` steps; ends when held-out accuracy reaches ``warm_start.stop_at_accuracy``.

        ``done`` steps were made before a resume, and their weights pushed. False where a stop came first: then a
        checkpoint was written.
        """
        t, section = self.trainer, self.trainer.config.warm_start
        if done is None:
            await unless_stopped(t.stop, self._start())
        watch = Stopwatch()
        for step in range((done or 0) + 1, section.steps + 1):
            if t.stop.is_set():
                if step == 1:
                    raise Stopped("stopped before the first step")
                await self._save(step - 1)
                return False
            loss = await self._step()
            if step % section.check_every and step != section.steps:
                continue
            await t.roles.weights.push(0)
            measured = await t.evaluate()
            row: Row = {"step": 0, "phase": "warm_start", "warm_start/step": step, "warm_start/loss": loss}
            t.recorder.write(row | measured | {"seconds/step": watch.row()["seconds/step"]})
            watch = Stopwatch()
            if float(measured["eval/accuracy"] or 0) >= section.stop_at_accuracy:
                break
        return True

    async def _start(self) -> None:
        t = self.trainer
        await t.roles.weights.push(0)
        if t.config.warm_start.steps:
            t.recorder.write({"step": 0, "phase": "warm_start", "warm_start/step": 0, **await t.evaluate()})

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from the checkpoint of a warm start that was stopped."""
        await checkpoint.load({"learner": self.trainer.roles.learner})
        self.prompts.restore(checkpoint.state.prompts)
        await self.trainer.roles.weights.push(0)

    async def _save(self, done: int) -> None:
        state = TrainerState(step=0, batches_sampled=0, prompts=self.prompts.state(), buffer=(), warm_start_step=done)
        await self.trainer.checkpoints.save(state, {"learner": self.trainer.roles.learner})

    async def _step(self) -> float | None:
        """The loss; None where the step was left out."""
        t, c = self.trainer, self.trainer.config
        prompts = self.prompts.take(c.warm_start.batch_size)
        samples = supervised_samples(prompts, [p.answer for p in prompts], self.tokenizer)
        batch = pack(
            samples,
            dims=c.learner.dims,
            max_tokens=c.learner.max_tokens_per_micro_batch,
            attention_cost=t.update.attention_cost,
        )
        result = await t.roles.learner.train_step(batch, CrossEntropy(), c.warm_start.learning_rate)
        made = t.update.policy_steps.made(result, batch, prompts)
        return None if made is None else made.loss
