"""Builds and steps megatron's (distributed) AdamW, with fixes for its use of torch's, or a feature's optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import megatron.core.optimizer.clip_grads as clip_grads
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm

from rl_megatron.feature import Keywords, features, load_side
from rl_megatron.learner.keywords import STEPPED_AT_ONCE
from rl_megatron.learner.model.build import with_dtypes
from rl_megatron.learner.parameters import overrides, set_decay

_HYBRID_KEYS = inspect.signature(HybridDeviceOptimizer).parameters.keys() - {"params"}
_NO_PARAMETER = "no parameter"  # the key of a state that has a step alone


def make_optimizer(chunks: Sequence[DistributedDataParallel], given: Keywords) -> MegatronOptimizer:
    """Returns the optimizer of this rank's chunks. Every rank calls it. The learning rate is set before each step."""
    _fix_torch_adam()
    _fix_places_of_state()
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # neither TransformerEngine nor apex has a kernel
        clip_grads.l2_norm_impl = l2_norm
    HybridDeviceOptimizer._move_new_state_to_right_device = _move_state
    config = OptimizerConfig(**with_dtypes(given.optimizer))
    if (name := config.optimizer) != "adam":
        config.optimizer = "adam"  # steps all but the feature's: megatron's functions know this name alone
        optimizer: MegatronOptimizer = load_side(features()[name].optimizer)(config, chunks)
    else:
        optimizer = get_megatron_optimizer(config, list(chunks), overrides(config))
        # If only experts have adapters, the optimizer of dense parameters has nothing to step on any rank.
        optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    for part in inner_optimizers(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):  # neither apex nor TransformerEngine
            for group in part.optimizer.param_groups:
                group["fused"] = True  # one kernel for all parameters
        if isinstance(part, distrib_optimizer.DistributedOptimizer):
            if hasattr(part.optimizer, "get_unscaled_state"):  # TransformerEngine's FusedAdam
                _keep_state(part.optimizer)
            if _steps_in_place(part):
                part._copy_main_params_to_model_params = lambda: None
        if stores_master_weights(part.optimizer):
            _step_in_pieces(part.optimizer)
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer.param_update_in_fp32 = False  # its weights are float32: it would look for copies at a load
            for group in part.optimizer.param_groups:
                for key in _HYBRID_KEYS & group.keys():  # classes among them, which checkpoints must not hold
                    del group[key]
    _gather_once(inner_optimizers(optimizer))
    set_decay(optimizer, config.weight_decay)
    return optimizer


def _gather_once(parts: Sequence[MegatronOptimizer]) -> None:
    """Makes the last optimizer of a chunk gather its parameters. In megatron each gathers all of its chunks', so those
    of a mixture of experts, which has two, are sent twice."""
    gathered = set[int]()
    for part in reversed(parts):
        if isinstance(part, distrib_optimizer.DistributedOptimizer):
            chunks = {id(chunk) for chunk in part.model_chunks}
            if chunks <= gathered:
                part.step_with_ready_grads = partial(MixedPrecisionOptimizer.step_with_ready_grads, part)
            gathered |= chunks


def _steps_in_place(part: distrib_optimizer.DistributedOptimizer) -> bool:
    """True if the weights that it steps are the model's, so that megatron would copy each onto itself."""
    if part.is_stub_optimizer or isinstance(part.optimizer, HybridDeviceOptimizer):
        return False
    pairs = [
        (stepped, model, part._get_model_param_range_map(model)["param"].start)
        for steps, models in zip(part.shard_fp32_groups, part.model_fp32_groups, strict=True)
        for stepped, model in zip(steps, models, strict=True)
    ]
    return not any(part.model_float16_groups) and all(
        stepped.data_ptr() == model.data_ptr() + start * model.element_size() for stepped, model, start in pairs
    )


def bucket_groups(chunks: Sequence[DistributedDataParallel]) -> list[Any]:
    """Returns groups of buckets: megatron reduces a group's gradients, and gathers its parameters, in one message."""
    return [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


def wait_for_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Waits until reductions of gradients that have begun are complete; the next step waits for it once more."""
    for group in bucket_groups(chunks):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()


def inner_optimizers(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """Returns the optimizers of a chained one (dense and expert parameters have their own), or the optimizer."""
    inside: Sequence[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return inside


def stores_master_weights(adam: torch.optim.Optimizer) -> bool:
    """True if TransformerEngine's FusedAdam has the float32 weights, in its state, and steps those of the model."""
    return getattr(adam, "use_decoupled_grad", False)


def l2_norm(
    chunk: int, overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *_: object
) -> tuple[torch.Tensor, None]:
    """Returns the norm [1] of a list of tensors, in place of apex's. Megatron's own waits for a GPU at each tensor."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*lists[0]]))).reshape(1), None


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Returns the gradient's norm over the whole model, for `step`. Every rank calls it, and all get the same."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def step(optimizer: MegatronOptimizer, learning_rate: float, norm: float) -> None:
    """Clips the gradient of `gradient_norm` and steps: megatron's ChainedOptimizer.step, which never checks the norm.
    Every rank calls it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    for part in inner_optimizers(optimizer):
        if part.config.clip_grad > 0:
            _clip(part, part.config.clip_grad / (norm + 1e-6))  # megatron's factor
    optimizer.step_with_ready_grads()
    for part in inner_optimizers(optimizer):
        if not part.get_parameters():
            _count_empty_step(part.optimizer)


def _count_empty_step(adam: Any) -> None:
    """Counts a step of an optimizer without parameters, which counts none itself. A checkpoint holds rank 0's count,
    and rank 0's stage may have no parameter at all."""
    state: dict[Any, Any] = adam.state
    if isinstance(adam, torch.optim.AdamW):
        state[_NO_PARAMETER] = {"step": state.get(_NO_PARAMETER, {}).get("step", torch.tensor(0.0)) + 1}
        return
    for group in adam.param_groups:
        group["step"] = group.get("step", 0) + 1
        if isinstance(adam, HybridDeviceOptimizer):  # its step keeps no state but that of parameters
            state[_NO_PARAMETER] = {"step": torch.tensor(float(group["step"]))}


def _clip(part: MegatronOptimizer, factor: float) -> None:
    """Multiplies all gradients in place by a ``factor`` below 1; megatron makes copies where it lacks kernels."""
    decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    named = "decoupled_grad" if decoupled else "grad"
    found = [grad for p in part.get_parameters() if (grad := getattr(p, named, None)) is not None]
    if factor < 1.0 and found:
        torch._foreach_mul_(found, factor)


def optimizer_state(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yields float32 weights, or the parameters themselves where these are stepped, and moments, wherever they are."""
    for adam in _adams(optimizer):
        yield from (parameter for group in adam.param_groups for parameter in group["params"])
        for value in (value for state in adam.state.values() for value in state.values()):
            if isinstance(value, torch.Tensor):
                yield value


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yields the optimizers that hold state; one with parts on host and GPU comes before these."""
    for part in inner_optimizers(optimizer):
        yield part.optimizer
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield from part.optimizer.sub_optimizers


def adopt(optimizer: MegatronOptimizer) -> None:
    """Copies the model's parameters into the optimizer's float32 weights, on whichever device they are stepped."""
    optimizer.reload_model_params()
    for part in inner_optimizers(optimizer):
        hybrid = part.optimizer
        for weight, state in hybrid.state.items() if stores_master_weights(hybrid) else ():  # megatron leaves these
            state["master_param"].copy_(weight)
        if isinstance(hybrid, HybridDeviceOptimizer):  # megatron copies only weights that it made itself
            part.optimizer = None
            try:
                part._copy_model_params_to_main_params()
            finally:
                part.optimizer = hybrid
    copy_to_host(optimizer)


def copy_to_host(optimizer: MegatronOptimizer) -> None:
    """Copies the float32 weights into those that are stepped on the CPU, after they were written."""
    for part in inner_optimizers(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            with torch.no_grad():
                for weight, on_host in part.optimizer.gpu_params_map_cpu_copy.items():
                    on_host.copy_(weight)


def create_state(optimizer: MegatronOptimizer) -> None:
    """Gives a fresh AdamW its (zero) state: a sharded load needs the tensors to exist.

    torch's AdamW counts steps per parameter; apex's and TransformerEngine's count per group, in those with parameters
    alone, and get no ``step`` here before the first. A pipeline stage without experts has an expert optimizer without
    parameters. Rank 0's count of steps is the one that a checkpoint holds, of experts too: there it is the others', or
    else that of `step`.
    """
    steps: torch.Tensor | None = None
    counted: int | None = None
    for part in inner_optimizers(optimizer):  # the dense parameters' one, where these are stepped, comes first
        adam = part.optimizer
        parameters = [p for group in adam.param_groups for p in group["params"]]
        alone = adam.state.pop(_NO_PARAMETER, {"step": torch.tensor(0.0)})  # may be of a stage that had no experts
        if isinstance(adam, HybridDeviceOptimizer):
            for inside in adam.sub_optimizers:
                _fill_state(inside)
            adam._sync_sub_optimizers_state_to_hdo()
        else:
            _fill_state(adam)
        by_parameter = isinstance(adam, torch.optim.AdamW | HybridDeviceOptimizer)
        if not by_parameter:
            counted = _count_in_all_groups(adam, counted)
        elif parameters:
            steps = adam.state[parameters[0]]["step"]
        else:
            adam.state[_NO_PARAMETER] = alone if steps is None else {"step": steps.clone()}


def _count_in_all_groups(adam: torch.optim.Optimizer, counted: int | None) -> int | None:
    """Gives groups without parameters the steps of those that have some, or else those ``counted`` by other
    optimizers; returns them."""
    said = [group["step"] for group in adam.param_groups if group["params"] and "step" in group]
    counted = said[0] if said else counted
    for group in adam.param_groups:
        if not group["params"] and counted is not None:
            group["step"] = counted
    return counted


def _fill_state(adam: torch.optim.Optimizer) -> None:
    counts = isinstance(adam, torch.optim.AdamW)
    if hasattr(adam, "create_state"):  # a feature's
        adam.create_state()
    for parameter in (p for group in adam.param_groups for p in group["params"]):
        if not adam.state[parameter] and stores_master_weights(adam):
            adam.initialize_state(parameter, False)  # type: ignore[attr-defined]  # with a copy of the weight
        elif not adam.state[parameter]:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            step = {"step": torch.zeros((), device=parameter.device)} if counts else {}
            adam.state[parameter] = {**step, **zeros}


def _step_in_pieces(adam: Any) -> None:
    """Makes a FusedAdam step `STEPPED_AT_ONCE` parameters after another: it makes float32 copies of their moments, for
    a whole group in one step."""
    at_once = adam.step

    def step(*arguments: Any, **named: Any) -> None:
        groups = adam.param_groups
        try:
            for group in groups:
                before = {key: value for key, value in group.items() if key != "params"}
                for piece in _pieces(group["params"]):
                    adam.param_groups = [{**before, "params": piece}]
                    at_once(*arguments, **named)
                    group["step"] = adam.param_groups[0]["step"]  # the same of each
        finally:
            adam.param_groups = groups

    adam.step = step


def _pieces(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    piece: list[torch.Tensor] = []
    for parameter in parameters:
        if piece and sum(p.numel() for p in piece) + parameter.numel() > STEPPED_AT_ONCE:
            yield piece
            piece = []
        piece.append(parameter)
    if piece:
        yield piece


def _keep_state(adam: Any) -> None:
    """Makes a FusedAdam name its state without copies in float32, and keep it where DistributedOptimizer hands it back,
    to load the tensors that `create_state` made one by one."""
    adam.state_dict = partial(torch.optim.Optimizer.state_dict, adam)

    def load_state_dict(state: dict[str, Any]) -> None:
        for group, saved in zip(adam.param_groups, state["param_groups"], strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**saved, "params": parameters})

    adam.load_state_dict = load_state_dict


def _move_state(hybrid: HybridDeviceOptimizer) -> None:
    """Moves loaded state to its weight's device. Megatron tells devices by the optimizers' classes, which are one class
    without apex and TransformerEngine."""
    for part in hybrid.sub_optimizers:
        for weight, state in part.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(weight.device)


def _fix_places_of_state() -> None:
    """Fixes which state DistributedOptimizer saves for a parameter after the first bucket (0.16.1).

    It joins the buckets' states without the padding between them, and then cuts parameters out at their places in the
    buffer, which count the padding. Here the joined state keeps it.
    """
    cls = distrib_optimizer.DistributedOptimizer
    if getattr(cls, "places_fixed", False):
        return
    original = cls.sharded_param_state_fully_reshardable

    def sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [part for buffer in self.buffers for part in (buffer, *buffer.buckets)]
        unpadded = [part.numel_unpadded for part in padded]
        for part in padded:
            part.numel_unpadded = part.grad_data.numel()
        try:
            return original(self, *args, **kwargs)
        finally:
            for part, count in zip(padded, unpadded, strict=True):
                part.numel_unpadded = count

    cls.sharded_param_state_fully_reshardable = sharded
    cls.places_fixed = True


def _fix_torch_adam() -> None:
    """Fixes how DistributedOptimizer reloads torch's AdamW, used without apex and TransformerEngine (0.16.1, GPUs too).

    It shares one ``step`` tensor among all parameters. That is then incremented once per parameter, so the bias
    correction is silently wrong. It also copies fp32 shards with autograd on, which raises.
    """
    cls = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or getattr(cls, "torch_adam_fixed", False):
        return
    original = cls.load_state_dict

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        with torch.no_grad():
            for name, destination in {"param": main, **self.optimizer.state[main]}.items():
                if name != "step":
                    destination.copy_(tensors[name])

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    cls._set_main_param_and_optimizer_states = set_states
    cls.load_state_dict = load_state_dict
    cls.torch_adam_fixed = True
