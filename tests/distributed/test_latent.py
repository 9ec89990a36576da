"""DeepSeek-V2-Lite, DeepSeek-V3 and Kimi-K2 in the learner against transformers: logits, gradients, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config import LearnerSection
from rl_megatron.data.packing import pack
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Samples
from rl_megatron.weights import convert
from tests.distributed.ranks import run_ranks

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "alone": {},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
}
_SIZES: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,  # transformers norms the latents with 1e-6 all the same
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        "q_lora_rank": 10,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.6},
        "num_nextn_predict_layers": 0,
    },
    "kimi_k2": {
        "q_lora_rank": 10,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        "num_nextn_predict_layers": 0,
    },
}


def reference(name: str) -> Any:
    """transformers' model with every number random, norms and the bias for the choice of experts too."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    v2 = name == "deepseek_v2"
    config = (DeepseekV2Config if v2 else DeepseekV3Config)(**_SIZES, **MODELS[name])
    model = (DeepseekV2ForCausalLM if v2 else DeepseekV3ForCausalLM)(config).eval()
    g = torch.Generator().manual_seed(11)
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert bool(biases) != v2
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            shift = 1.0 if tensor.dim() == 1 else 0.0
            tensor.copy_(shift + 0.25 * torch.randn(tensor.shape, generator=g))
    return model


def make_model(name: str, folder: Path) -> Any:
    """The folder of a model, and the model."""
    model = reference(name)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": name}))
    return model


def make_samples() -> Samples:
    g = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 30, (8,), generator=g)
    n = int(lengths.sum())
    return Samples(
        input_ids=torch.randint(0, 61, (n,), generator=g),
        targets=torch.randint(0, 61, (n,), generator=g),
        mask=torch.rand(n, generator=g) < 0.7,
        advantages=torch.zeros(n),
        rollout_logprobs=torch.zeros(n),
        old_logprobs=torch.zeros(n),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )


def transformers_step(model: Any) -> tuple[Tensor, float, float]:
    """Logits [n, vocabulary] of the samples, the mean cross entropy over the mask, and its gradient's norm."""
    samples = make_samples()
    rows = [slice(a, b) for a, b in pairwise(samples.cu_seqlens.tolist())]
    logits = torch.cat([model(samples.input_ids[row][None]).logits[0] for row in rows])
    loss = torch.nn.functional.cross_entropy(logits[samples.mask], samples.targets[samples.mask])
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return logits.detach(), loss.item(), norm.item()


def logits_of(megatron: Any, micro_batches: Sequence[Samples]) -> Tensor | None:
    """Logits [n, padded vocabulary / tp] of the learner's positions on this rank, 0 for others' positions."""
    from megatron.core import parallel_state

    from rl_megatron.learner.forward import run_scores

    class Logits:
        score = "logits"

        def __call__(self, output: Tensor, _: Any) -> dict[str, Tensor]:
            return {"logits": output.squeeze(0)}

    packed = megatron._pack(micro_batches)
    results = run_scores(megatron._chunks, packed, Logits())
    if not parallel_state.is_pipeline_last_stage():
        return None
    out = torch.zeros(len(micro_batches[0].input_ids), results[0].shape[-1])
    real = packed[0].source >= 0
    out[packed[0].source[real]] = results[0][real]
    return out


def one_layout(rank: int, name: str, layout: str, root: Path) -> dict[str, Any]:
    """Fill from the folder, look at names, logits and a step; fill from the converted folder and save."""
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.weights.families import hf_layout, megatron_layout
    from rl_megatron.weights.safetensors_io import Checkpoint, read_boxes

    learner = LearnerSection.model_validate(LAYOUTS[layout])
    folder = root / name
    shape = ModelShape.from_folder(folder)
    device = world.join(learner, rank=rank, rendezvous=f"file://{root}/{name}-{layout}-store", seed=0)
    megatron = make_policy(shape, learner, device, temperature=1.0)
    ranks = megatron_layout(shape, learner.dims, vocab_multiple=learner.vocab_multiple)
    here = {key: tuple(tensor.shape) for key, tensor in megatron.tensors.items()}
    assert here == ranks.local_shapes(rank)
    read_boxes(Checkpoint(folder), hf_layout(shape), ranks, rank, dict(megatron.tensors))
    megatron.adopt()
    filled = {key: tensor.clone() for key, tensor in megatron.tensors.items()}
    batch = pack(make_samples(), dims=learner.dims, max_tokens=4096)
    seen: dict[str, Any] = {"order": batch.micro_batches[0][0].input_ids, "filled": filled}
    seen["logits"] = logits_of(megatron, batch.micro_batches[0])
    step = megatron.train_step(
        batch.micro_batches[0], CrossEntropy(), 1e-3, num_tokens=batch.num_tokens, num_sequences=batch.num_sequences
    )
    seen["step"] = None if step is None else (step.loss, step.grad_norm)
    for key, tensor in megatron.tensors.items():
        assert not torch.equal(tensor, filled[key]) or key.endswith("expert_bias") or not tensor.numel(), key
    megatron.load_weights(root / f"{name}-megatron")
    for key, tensor in megatron.tensors.items():
        assert torch.equal(tensor, filled[key]), key
    megatron.save(root / f"{name}-{layout}-saved")
    world.leave()
    return seen


def rank_main(rank: int, root: Path) -> None:
    """All layouts of all models, one after the other."""
    torch.set_num_threads(1)
    for name in MODELS:
        for layout, degrees in LAYOUTS.items():
            if rank < LearnerSection.model_validate(degrees).dims.world_size:
                torch.save(one_layout(rank, name, layout, root), root / f"{name}-{layout}-{rank}.pt")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[Tensor, float, float]]]:
    """The folder of what two processes saw, and what transformers says."""
    root = tmp_path_factory.mktemp("latent")
    wanted = {}
    for name in MODELS:
        wanted[name] = transformers_step(make_model(name, root / name))
        convert.hf_to_megatron(root / name, root / f"{name}-megatron")
        for layout in LAYOUTS:
            (root / f"{name}-{layout}-saved").mkdir()
    run_ranks(rank_main, 2, root)
    return root, wanted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradient_are_those_of_transformers(name: str, layout: str, ran: Any) -> None:
    root, wanted = ran
    learner = LearnerSection.model_validate(LAYOUTS[layout])
    logits, loss, norm = wanted[name]
    seen = [torch.load(root / f"{name}-{layout}-{rank}.pt") for rank in range(learner.dims.world_size)]
    last = [s for s in seen if s["logits"] is not None]
    assert torch.equal(last[0]["order"], make_samples().input_ids)
    found = sum(s["logits"] for s in last) if learner.cp > 1 else torch.cat([s["logits"] for s in last], 1)
    assert (found[:, : logits.shape[1]] - logits).abs().max() < 1e-4
    for s in last:
        assert s["step"][0] == pytest.approx(loss, rel=1e-5)
        assert s["step"][1] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_saved_learner_converts_back_to_the_bit(name: str, layout: str, ran: Any, tmp_path: Path) -> None:
    root, _ = ran
    convert.megatron_to_hf(root / f"{name}-{layout}-saved", tmp_path / "back", config=root / name)
    found, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", root / name))
    assert found.keys() == original.keys()
    for key, tensor in original.items():
        assert torch.equal(found[key], tensor), key
