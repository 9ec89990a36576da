"""Keywords of megatron-core's constructors for the learner's keys. No torch, so that features declare theirs."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from rl_megatron import feature
from rl_megatron.config.activations import require_transformer_engine, uses_transformer_engine
from rl_megatron.errors import ConfigError
from rl_megatron.feature import Dtype, Keywords

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

HELD = 2
"""Halves of layers with copies that may outlast the half that computes, so that their GPU memory is not free yet."""
LOGITS_TOKENS = 1024
"""Maximum number of positions that have float32 logits in the learner at one time."""
NEWTON_SCHULZ_STEPS = 5
"""Steps of Muon's iteration, after which all but the smallest singular values are about 0.7 to 1.2."""
SLAB = 2**30
"""Bytes of the host that are pinned in one call for what leaves a GPU while servers sample."""
STEPPED_AT_ONCE = 2**26
"""Parameters that are stepped together where moments are not float32, or one larger tensor, which a rank may step
whole. They have float32 copies then."""
WEIGHT_ROWS = 8192
"""Rows of an output layer in half precision that have float32 copies in the learner at one time."""
_HYBRIDEP = "hybrid_ep_cpp"  # only DeepEP's branch hybrid-ep compiles it


def keywords(learner: LearnerSection, shape: ModelShape) -> Keywords:
    """Returns all keywords for megatron-core, with those of features.

    Raises ConfigError if this machine lacks what a key needs, or if a feature gives a keyword that is given already.
    """
    found: dict[str, dict[str, object]] = {
        "model": {
            **_rank_keywords(learner),
            **_layer_keywords(learner, shape),
            **_recompute_keywords(learner, shape),
            **_expert_keywords(learner, shape),
            **_kernel_keywords(learner, shape),
        },
        "ddp": _gradient_keywords(learner),
        "optimizer": _optimizer_keywords(learner),
    }
    for name, one in feature.features().items():
        more = one.megatron(learner, shape)
        for kind, mine in (("model", more.model), ("ddp", more.ddp), ("optimizer", more.optimizer)):
            if twice := found[kind].keys() & mine.keys():
                raise ConfigError(
                    f"the feature {name!r} gives megatron-core {min(twice)}, which is given already; drop one"
                )
            found[kind].update(mine)
    return Keywords(model=found["model"], ddp=found["ddp"], optimizer=found["optimizer"])


def _rank_keywords(learner: LearnerSection) -> dict[str, object]:
    """Degrees and the pipeline's schedule: 1F1B, or with chunks of stages its interleaved form (arXiv:2104.04473).

    megatron-core needs sequence parallelism to train experts. It derives the data-parallel degree from the world size.
    """
    d = learner.dims
    model: dict[str, object] = {
        "use_cpu_initialization": learner.device == "cpu",  # its default uses the current GPU
        "tensor_model_parallel_size": d.tp,
        "sequence_parallel": d.tp > 1,
        "pipeline_model_parallel_size": d.pp,
        "expert_model_parallel_size": d.ep,
        "expert_tensor_parallel_size": d.etp,
        "context_parallel_size": d.cp,
        "variable_seq_lengths": True,  # micro-batches are packed
    }
    if learner.stages is not None:
        layers = "|".join("t" * count for count in learner.stages)
        model["pipeline_model_parallel_layout"] = f"E{layers}L"  # embedding, transformer layers, loss
    if d.vpp > 1:  # batched p2p is silently wrong with vpp at pp=2
        model["virtual_pipeline_model_parallel_size"] = d.vpp
        model |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    elif d.pp > 1:  # chunks' outputs are still being sent when megatron frees them
        model["deallocate_pipeline_outputs"] = True
    return model


def _layer_keywords(learner: LearnerSection, shape: ModelShape) -> dict[str, object]:
    """Dtypes, and whether kernels are fused, which is so with TransformerEngine's layers alone.

    Never fuses gradient accumulation into a linear's backward, which needs apex, nor cross entropy, which
    `learner.heads` computes.
    """
    dtype, fused = Dtype(learner.dtype), uses_transformer_engine(learner, shape)
    names = ["bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm"]
    names += [] if fused and shape.latent is not None else ["apply_rope_fusion"]
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": learner.dtype == "bfloat16",
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        **dict.fromkeys(names, fused),
    }


def _recompute_keywords(learner: LearnerSection, shape: ModelShape) -> dict[str, object]:
    """Granularity, method and number of layers, or modules. Our latent attention recomputes by itself.

    Raises ConfigError for ``layernorm`` without TransformerEngine, since megatron-core then lacks one of its names.
    """
    section = learner.recompute
    if section.uniform is not None:
        given = {"recompute_method": "uniform", "recompute_num_layers": section.uniform}
        return {"recompute_granularity": "full", **given}
    modules, model = list[str](section.parts), dict[str, object]()
    fused = uses_transformer_engine(learner, shape)
    if "layernorm" in modules and not fused:
        raise ConfigError(
            "learner.recompute.parts=layernorm: it needs TransformerEngine, which is not installed; "
            "install it, or leave this part out"
        )
    if "mla_up_proj" in modules and not fused:
        modules.remove("mla_up_proj")
        model["recompute_up_projections"] = True
    if modules:
        model |= {"recompute_granularity": "selective", "recompute_modules": modules}
    return model


def _expert_keywords(learner: LearnerSection, shape: ModelShape) -> dict[str, object]:
    """Returns keywords of the dispatcher, for dense models too, since megatron-core checks it against
    ``variable_seq_lengths``; and of routers, which choose experts in float32.

    Nothing of megatron-core's own balances load. It multiplies losses by a number of tokens that nothing divides out
    again, counts padding, takes a packed micro-batch as one sequence, and moves biases in steps that are skipped.
    Raises ConfigError if the package of the dispatcher is missing.
    """
    model = _dispatcher_keywords(learner.dispatcher)
    if not shape.num_experts:
        return model
    model |= {"moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none"}
    model |= {"moe_router_bias_update_rate": 0.0} if shape.router.selection_bias else {}
    return {**model, "moe_permute_fusion": uses_transformer_engine(learner, shape)}


def _dispatcher_keywords(name: str) -> dict[str, object]:
    """Packed micro-batches differ in length, and megatron-core's all-gather takes equal ones. So does HybridEP. Its
    ranks gather each other's routing maps (deep_ep's executor.cu, allgather_routing_map) into a buffer as long as the
    first micro-batch (moe/fused_a2a.py): with one size to pad to all are."""
    if name == "alltoall":
        return {"moe_token_dispatcher_type": "alltoall"}
    if importlib.util.find_spec("deep_ep") is None:
        raise ConfigError(
            f"learner.dispatcher={name}: the package deep_ep is not installed here "
            "(https://github.com/deepseek-ai/DeepEP); install it, or set learner.dispatcher=alltoall"
        )
    if name == "hybridep" and importlib.util.find_spec(_HYBRIDEP) is None:
        raise ConfigError(
            f"learner.dispatcher=hybridep: the package deep_ep here has no {_HYBRIDEP}; install that of the branch "
            "hybrid-ep (https://github.com/deepseek-ai/DeepEP/tree/hybrid-ep), or set learner.dispatcher=deepep"
        )
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": name}


def _kernel_keywords(learner: LearnerSection, shape: ModelShape) -> dict[str, object]:
    """Kernels that add in one order, or in float8. Raises ConfigError if TransformerEngine is not installed."""
    model: dict[str, object] = {"deterministic_mode": True} if learner.deterministic else {}
    if learner.fp8 is not None:
        require_transformer_engine(f"learner.fp8={learner.fp8}", learner, shape)
    if learner.fp8 is not None:  # tensorwise takes e5m2 for gradients, the others e4m3 for all, as Megatron-LM does
        model |= {"fp8": "hybrid" if learner.fp8 == "tensorwise" else "e4m3", "fp8_recipe": learner.fp8}
    return model


def _gradient_keywords(learner: LearnerSection) -> dict[str, object]:
    """Gradients in float32, or in the dtype of parameters; Muon takes whole parameters, which megatron's own sharding
    cuts. By default they are reduced in one bucket after the pass."""
    return {
        "grad_reduce_in_fp32": learner.gradient_dtype == "float32",
        "use_distributed_optimizer": learner.optimizer.name == "adamw",
    }


def _optimizer_keywords(learner: LearnerSection) -> dict[str, object]:
    """AdamW, or Muon and AdamW, over float32 copies of the parameters. Data-parallel ranks shard the state
    (arXiv:1910.02054). The learner sets the learning rate before each step.

    Raises ConfigError for moments that are not float32 without TransformerEngine, and as `_offloaded`.
    """
    section = learner.optimizer
    if section.moments_dtype != "float32" and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            f"learner.optimizer.moments_dtype={section.moments_dtype}: TransformerEngine, whose Adam keeps them, is "
            "not installed here; install it, or leave the key out"
        )
    low_moments: dict[str, object] = {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": Dtype(section.moments_dtype),
        "exp_avg_sq_dtype": Dtype(section.moments_dtype),
        "main_params_dtype": Dtype("float32"),
        "main_grads_dtype": Dtype(learner.gradient_dtype),
        "store_param_remainders": False,  # megatron-core could not save them for another layout
    }
    return {
        "params_dtype": Dtype(learner.dtype),
        "bf16": learner.dtype == "bfloat16",
        "optimizer": "adam" if section.name == "adamw" else section.name,
        "lr": 0.0,
        "adam_beta1": section.beta1,
        "adam_beta2": section.beta2,
        "adam_eps": section.eps,
        "weight_decay": section.weight_decay,
        "clip_grad": section.clip_grad,
        "use_distributed_optimizer": section.name == "adamw",
        **(low_moments if section.moments_dtype != "float32" else {}),
        **(_offloaded(learner.offload.optimizer) if learner.offload.optimizer else {}),
    }


def _offloaded(share: float) -> dict[str, object]:
    """Steps a share of the parameters on the CPU (megatron-core's HybridDeviceOptimizer), with copies that overlap.

    Raises ConfigError where TransformerEngine or apex is installed: their Adam counts steps for all parameters, which
    an offloaded optimizer does not get back on a resume.
    """
    for package in ("transformer_engine", "apex"):
        if importlib.util.find_spec(package) is not None:
            raise ConfigError(
                f"learner.offload.optimizer={share:g}: {package} is installed, and with its Adam "
                "megatron-core 0.16.1 cannot resume an offloaded optimizer; set it to 0, or uninstall the package"
            )
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": share,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }
