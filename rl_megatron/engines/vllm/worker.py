"""Runs inside vLLM's workers: loads weights from a mirror file, and reports checksums of the loaded parameters.

vLLM imports it by ``--worker-extension-cls`` in its own interpreter, which has torch but not our other dependencies.
Written against vLLM 0.32.0 (vllm/distributed/weight_transfer/base.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from rl_megatron.engines.vllm.window import LayerWindow
from rl_megatron.errors import WeightError
from rl_megatron.weights.checks.places import ParameterBox, record
from rl_megatron.weights.checks.reports import (
    REPORT_FORM,
    BackgroundChecksums,
    ChecksumReport,
    drop_private,
    make_checksum_report,
    merge_rank_reports,
    packed_report,
)
from rl_megatron.weights.routes import mirror
from rl_megatron.weights.routes.engine_ends import Receiver
from rl_megatron.weights.routes.rendezvous import Rendezvous, gather_json

T = TypeVar("T")

BACKEND = "rl_megatron_mirror"
_SMALL = 16  # scales and biases are smaller than a layer's weight / 16


@dataclass
class NoInit(WeightTransferInitInfo):
    """The settings of the transfer. Empty, because each update opens a file."""


@dataclass
class MirrorUpdate(WeightTransferUpdateInfo):
    """The mirror file and the version that it must hold."""

    path: str
    version: int
    straight: bool = False  # the learner's ranks send shards over the group that this rank has joined


class MirrorEngine(WeightTransferEngine):
    """Loads Hugging Face tensors through the model's own loader, which shards them for this rank."""

    init_info_cls = NoInit
    update_info_cls = MirrorUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        """Discards the remains of a failed update, and records each layer for the reload."""
        abort_update(self.model)
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MirrorUpdate) -> None:
        """Loads the version. Raises SyncError if the file holds another, or learner and engine ranks do not meet."""
        if update_info.straight:
            READ[self.model] = STRAIGHT[self.model].receive(update_info.version)
            return
        found, beside = mirror.read(Path(update_info.path), update_info.version), BackgroundChecksums()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            """Computes checksums of tensors as they are read, because most end in a private layout of the kernels."""
            for name, tensor in found.items():
                beside.read(name, tensor)
                yield name, tensor.to(self.device)

        self.model.load_weights(tensors())
        READ[self.model] = beside.report()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Skips the base class's wait for an accelerator, which a CPU lacks; `Tensor.to` has already waited."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Makes vLLM convert the loaded tensors for its kernels."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Does nothing, because there is nothing to release."""


def runner_models(runner: Any) -> list[nn.Module]:
    """Returns a runner's model, and its draft model if it has one."""
    proposer = runner.get_draft_model()
    return [runner.model] if proposer is None else [runner.model, proposer]


def abort_update(model: nn.Module) -> None:
    """Discards a partial update that failed: tensors that it left in a layer would count for the next."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
            info.reset()


def forget_packed_experts(model: nn.Module) -> None:
    """Makes a reload pack the experts again.

    On CPUs, vLLM 0.32.0 packs them only while there is no kernel (UnquantizedFusedMoEMethod._setup_kernel). A second
    load would leave them unpacked for a kernel that expects them packed. Log-probs would be wrong without an error.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod":
            method.moe_kernel = None


def repack_tied_heads(model: nn.Module) -> None:
    """Packs an output layer again that is tied to the embedding.

    On CPUs, vLLM 0.32.0 samples with a packed copy of it, and repacks that only if a checkpoint has a tensor for the
    layer. A tied layer would keep the first weights' logits without an error.
    """
    weights = {id(m.weight) for m in model.modules() if type(m).__name__ == "VocabParallelEmbedding"}
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and id(module.weight) in weights:
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


class WorkerExtension:
    """The methods that the trainer calls over /collective_rpc. vLLM mixes them into its worker."""

    rank: int  # index in its dp replica
    model_runner: Any
    weight_transfer_engine: Any
    model_config: Any
    vllm_config: Any

    def rl_megatron_ping(self) -> None:
        """Does nothing: its return shows that this rank answers."""

    def rl_megatron_describe(self) -> dict[str, str]:
        """Returns settings that the trainer checks before use. Raises WeightError if some rank could not answer."""
        self._check_world()
        speculative = self.vllm_config.speculative_config
        return {
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(self.model_config.logprobs_mode),
            "architecture": ",".join(self.model_config.hf_config.architectures),
            "policy": str(self.vllm_config.scheduler_config.policy),
            "speculative_tokens": str(speculative.num_speculative_tokens if speculative else 0),
            "reports": REPORT_FORM,
            "routes": str(self.vllm_config.aux_output_config.enable_return_routed_experts),
        }

    def rl_megatron_end_update(self) -> None:
        """Ends an update that failed or was left open. The layers get the kernels' tensors back."""
        for model in runner_models(self.model_runner):
            abort_update(model)
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False

    def rl_megatron_held(self, path: str, private: list[str], known: list[str]) -> list[dict[str, object]]:
        """Returns a `packed_report` on each rank's parameters. Only the probe checks private layouts of kernels.

        Collective, like all below: no replica may sample.
        """
        own = []
        for model in runner_models(self.model_runner):
            places = drop_private(find_vllm_boxes(model, path, partial=True), private)
            own.append(make_checksum_report(places, dict(model.named_parameters())))
            own.append(READ.pop(model, ChecksumReport(rows=(), seconds=0.0)))
        return self._gathered(packed_report(merge_rank_reports(own), known))

    def rl_megatron_boxes(self, path: str) -> list[dict[str, object]]:
        """Returns the box of each Hugging Face tensor that each rank holds."""
        return self._gathered({one.hf: one.box for one in find_vllm_boxes(self.model_runner.model, path)})

    def rl_megatron_join(self, path: str, rendezvous: str, first: int) -> None:
        """Joins the group of learner and engine ranks, as ``first`` plus the rank in its server. Collective."""
        model = self.model_runner.model
        abort_update(model)
        if model in STRAIGHT:
            STRAIGHT.pop(model).close()
        STRAIGHT[model] = DirectReceiver(
            model, path, Rendezvous(**json.loads(rendezvous)), first + get_world_group().rank
        )

    def _gathered(self, own: T) -> list[T]:
        """Returns the answers of all ranks of the server, in order, on the first rank of a dp replica, and otherwise
        an empty list. Collective.

        vLLM calls every rank, and returns the answers of one dp replica's ranks.
        """
        said = gather_json(own, get_world_group().cpu_group)
        return [] if self.rank else said

    def _check_world(self) -> None:
        world, ranks = get_world_group().world_size, self.vllm_config.parallel_config.world_size_across_dp
        if world != ranks:
            raise WeightError(f"{world} ranks of vLLM can answer, but it has {ranks}: tp * pp * dp")


class DirectReceiver:
    """This rank's end of a transport, with the window through which layers arrive."""

    def __init__(self, model: nn.Module, path: str, rendezvous: Rendezvous, rank: int) -> None:
        places, device = find_vllm_boxes(model, path), next(model.parameters()).device
        wanted = {one.param for one in places}
        modules: dict[nn.Module, dict[str, str]] = {}
        with load_parameters(model) as params:
            for prefix, layer in model.named_modules():
                for name in get_layer_tensors(layer):
                    if (param := f"{prefix}.{name}" if prefix else name) in wanted:
                        modules.setdefault(layer, {})[name] = param
            self._window = LayerWindow(places, params, modules, device, finish_layer_load)
        self._receiver = Receiver(rendezvous, rank, self._window.boxes)

    def receive(self, version: int) -> ChecksumReport:
        """Receives a version, and converts each layer for the kernels. Returns its checksums.

        After an error some layers are of this version and others of the last.
        """
        self._window.begin()
        try:
            self._receiver.receive(version, self._window.whole, self._window.coming)
            return self._window.finish()
        finally:
            self._window.release()

    def close(self) -> None:
        """Leaves the group of learner and engine ranks."""
        self._receiver.close()


def finish_layer_load(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Gives a layer's tensors to its kernels, which copy the values that they need, like vLLM after a load.

    Kernels of experts keep scales and biases themselves (FusedMoEQuantConfig). So these are copies, because the memory
    of ``tensors`` is released.
    """
    largest = max(tensor.numel() for tensor in tensors.values())
    for name, tensor in tensors.items():
        wanted, filled = getattr(layer, name), tensor.detach()
        if tensor.numel() * _SMALL <= largest:
            filled = filled.clone()
        filled.__class__, filled.__dict__ = wanted.__class__, wanted.__dict__.copy()
        setattr(layer, name, filled)
    _layerwise_process(layer, get_layerwise_info(layer))


STRAIGHT: dict[Any, DirectReceiver] = {}
"""Model -> receiver of the shards that the learner's ranks send."""


READ: dict[Any, ChecksumReport] = {}
"""Model -> report of the last load, until it is requested."""


@cache
def find_vllm_boxes(model: Any, path: str, *, partial: bool = False) -> list[ParameterBox]:
    """Returns the places of a mirror file's tensors in the model. ``partial``: only those that its loader copies."""
    with load_parameters(model) as params:
        file = Path(path)
        return record(model.load_weights, mirror.shapes(file), params, mirror.dtypes(file), partial=partial)


@contextmanager
def load_parameters(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context with the parameters that the loader expects, without data. On exit the kernels' are restored."""
    abort_update(model)  # an update that was left open holds these
    layers = list(model.modules())
    try:
        for layer in layers:
            info = get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            restore_layer_on_meta(layer, info)
            for tensor in get_layer_tensors(layer).values():
                if hasattr(tensor, "weight_loader"):  # an earlier load has wrapped it
                    tensor.weight_loader = _get_original_loader(tensor)
        yield dict(model.named_parameters())
    finally:
        for layer in layers:
            info = get_layerwise_info(layer)
            _place_kernel_tensors(layer, info)
            info.reset()


def repair() -> None:
    """Makes the sampler read each request's own temperature, top_p and top_k on CPUs. Once a process.

    vLLM 0.32.0's replacement of a Triton kernel fills a copy of the caller's result (utils/cpu_triton_utils.py,
    ``_expand_kernel_impl``). So the temperature of each proposed token is uninitialized memory. Tokens would be drawn
    from logits divided by that, with log-probs of -9999 or of another distribution.
    """
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expanded


def expanded(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeats ``x`` [requests] by each request's proposed tokens to [num_tokens], with ``replace_from`` replaced.

    ``cu_num_tokens`` [requests] are running sums of the proposed tokens.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


repair()

if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, MirrorEngine)
