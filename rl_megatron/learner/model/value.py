"""The output layer of a critic or a reward model: one value a position, in place of the logits or beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ValueParameter(torch.nn.Parameter):
    """A parameter that no policy checkpoint holds."""


class ScoreLayer(torch.nn.Module):
    """Maps hidden states to scores, in float32; replicated over TP. Its weights start at 0, and so do the scores.

    Transformers' classifiers have the same weight, and no bias.
    """

    kind: ClassVar[type[torch.nn.Parameter]] = torch.nn.Parameter

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = self._parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None

    def _parameter(self, data: Tensor) -> torch.nn.Parameter:
        parameter = self.kind(data)
        parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]  # all-reduced over TP
        return parameter

    def forward(self, hidden: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """[s, b, h] ([s / tp, b, h] under sequence parallelism) -> ([s, b, 1], None), as megatron's output layer."""
        bias = None if self.bias is None else self.bias.float()
        values = torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class ValueLayer(ScoreLayer):
    """A critic's, which has a bias, too."""

    kind = ValueParameter

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.bias = self._parameter(torch.zeros(1, dtype=config.params_dtype))


def put_layer(layer: type[ScoreLayer], chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
    """Replace the output layer of the chunk that has one."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = layer(config)


class BesideOutput:
    """The value layer of a policy that is its own critic, on the hidden states that its output layer reads.

    It is a module of the last chunk: gradients, optimizer and checkpoints have it as any other. Ranks of other stages
    have none.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
        self._hidden: list[Tensor] = []
        last = chunks[-1]
        if last.post_process:
            last.value_layer = ValueLayer(config)
            last.decoder.register_forward_hook(self._see)
        self._chunk = last

    def _see(self, _module: object, _inputs: object, hidden: Tensor) -> None:
        self._hidden[:] = [hidden]

    def __call__(self) -> Tensor:
        """The values [t] float32 of the micro-batch that has passed last, once."""
        values: Tensor = self._chunk.value_layer(self._hidden.pop())[0]
        return values.flatten()
