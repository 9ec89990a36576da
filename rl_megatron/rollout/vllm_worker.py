"""Runs inside vLLM's workers: takes weights from a mirror file and says which tensors it does not hold as written.

vLLM loads it by ``--worker-extension-cls``, in its own interpreter: of this package it needs what torch alone needs.
Written against vLLM 0.32.0 (vllm/distributed/weight_transfer/base.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rl_megatron.weights import mirror

if TYPE_CHECKING:
    from torch import nn

BACKEND = "rl_megatron_mirror"


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing to agree on: a file is opened for each update."""


@dataclass
class MirrorUpdate(WeightTransferUpdateInfo):
    """Which file, and which version it must hold."""

    path: str
    version: int


class MirrorEngine(WeightTransferEngine):
    """Loads Hugging Face tensors through the model's own loader, which shards them for this rank."""

    init_info_cls = NoInit
    update_info_cls = MirrorUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """See WeightTransferEngine."""
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MirrorUpdate) -> None:
        """Raises CorruptionError that names the tensor whose bytes are not the learner's."""
        tensors = mirror.read(Path(update_info.path), update_info.version)
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors.items())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without the base class's wait for an accelerator, which a CPU has not; `Tensor.to` has waited."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """See WeightTransferEngine."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def forget_packed_experts(model: nn.Module) -> None:
    """Make a reload pack the experts again.

    On CPUs, vLLM 0.32.0 packs them only while there is no kernel (UnquantizedFusedMoEMethod._setup_kernel): a second
    load would leave them unpacked under a kernel that takes them for packed, and wrong log-probs without an error.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod":
            method.moe_kernel = None


def repack_tied_heads(model: nn.Module) -> None:
    """Pack an output layer that is the embedding anew.

    On CPUs, vLLM 0.32.0 samples from a packed copy of it, which it makes anew only where a checkpoint has a tensor for
    the layer: tied to the embedding it would keep the first weights' logits without an error.
    """
    weights = {id(m.weight) for m in model.modules() if type(m).__name__ == "VocabParallelEmbedding"}
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and id(module.weight) in weights:
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


class WorkerExtension:
    """Mixed into vLLM's worker; the trainer calls these over /collective_rpc."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def rl_megatron_describe(self) -> dict[str, str]:
        """What the trainer must know before it trusts this server."""
        return {
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(self.model_config.logprobs_mode),
            "architecture": ",".join(self.model_config.hf_config.architectures),
            "routes": str(self.vllm_config.aux_output_config.enable_return_routed_experts),
        }

    def rl_megatron_differing(self, path: str, version: int) -> tuple[int, list[str]]:
        """How many of the mirror's tensors this rank holds as they are, and the names of those with other bytes.

        Sharded, stacked and packed ones cannot be compared so; the probe's log-probs are their check.
        """
        checksums = mirror.sealed_checksums(Path(path), version)
        shapes = mirror.shapes(Path(path))
        held = {n: p for n, p in self.model_runner.model.named_parameters() if shapes.get(n) == tuple(p.shape)}
        return len(held), [name for name, p in held.items() if mirror.checksum(p.cpu()) != checksums[name]]


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, MirrorEngine)
