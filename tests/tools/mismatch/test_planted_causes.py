"""Each cause is planted for real: the doctor names it alone, and names none if none was planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_megatron.engines.local import engine as local
from rl_megatron.models import experts as mlp
from rl_megatron.models.attention import Context
from rl_megatron.models.kv_cache import KVCache, PrefixCache
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Completion, GenerationRequest, Samples
from tests.tools.mismatch.rig import (
    BOS,
    EOS,
    UNREAD,
    Embedded,
    Learner,
    Policy,
    SampledBefore,
    Transformers,
    diagnose,
    guilty,
    requests_with,
    told,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy.make(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_nothing_is_named_where_nothing_is_wrong(policy: Policy, temperature: float) -> None:
    engine = policy.engine()
    found = diagnose(Learner(model=policy.model, temperature=temperature), engine, weights=policy.check(engine))
    assert guilty(found) == [], told(found)
    assert found["dtype or kernels"].verdict == "noise"
    assert not [f for f in found.values() if f.verdict == "not checked"], told(found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.7}, "temperature 0.7 (the learner: 1)"),
        ({"top_p": 0.8}, "top_p 0.8 (the learner: 1)"),
        ({"top_k": 5}, "top_k 5 (the learner: 0)"),
        ({"temperature": 0.6, "top_k": 7}, "temperature 0.6 (the learner: 1), top_k 7 (the learner: 0)"),
        ({"temperature": 1.3, "top_p": 0.9}, "temperature 1.3 (the learner: 1), top_p 0.9 (the learner: 1)"),
    ],
)
def test_other_sampling_parameters(policy: Policy, changes: dict[str, float], said: str) -> None:
    engine = policy.engine()
    engine.change = requests_with(**changes)
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine))
    assert guilty(found) == ["sampling parameters"], told(found)
    assert said in found["sampling parameters"].evidence


def test_a_top_p_that_the_run_itself_asks_for(policy: Policy) -> None:
    engine = policy.engine()
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine), top_p=0.9)
    assert guilty(found) == ["sampling parameters"], told(found)
    assert "set rollout.top_p=1" in found["sampling parameters"].fix


@pytest.mark.parametrize("limits", [{"top_p": 0.9, "top_k": 30}, {"top_k": 7}])
def test_limits_that_the_learner_has_too_are_acquitted(policy: Policy, limits: dict[str, Any]) -> None:
    """But not what masks do not explain, another temperature beside them."""
    engine, learner = policy.engine(), Learner(model=policy.model)
    found = diagnose(learner, engine, weights=policy.check(engine), columns=("kept", "routes"), **limits)
    assert guilty(found) == [], told(found)
    engine.change = requests_with(temperature=0.7)
    found = diagnose(learner, engine, weights=policy.check(engine), columns=("kept", "routes"), **limits)
    assert guilty(found) == ["sampling parameters"], told(found)
    assert found["sampling parameters"].evidence.startswith("with temperature 0.7 (the learner: 1)")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"options": {"repetition_penalty": 1.3}}, "repetition_penalty 1.3 "),
        ({"processor": lambda length: SampledBefore(length, frequency=0.4)}, "frequency_penalty 0.4 "),
        ({"options": {"top_p": 0.8}, "raw": True}, "not drawn from the distribution reported"),
    ],
    ids=["repetition", "frequency", "raw"],
)
def test_what_only_transformers_samples_with(policy: Policy, engine: dict[str, object], said: str) -> None:
    found = diagnose(Learner(model=policy.model), Transformers(model=policy.model, **engine))  # type: ignore[arg-type]
    assert guilty(found) == ["sampling parameters"], told(found)
    assert said in found["sampling parameters"].evidence


def rolled(by: int) -> Callable[[Completion], Completion]:
    return lambda c: replace(c, logprobs=np.roll(c.logprobs, -by))


@pytest.mark.parametrize("by", [1, -1])
def test_logprobs_one_token_off(policy: Policy, by: int) -> None:
    engine = policy.engine()
    engine.twist = rolled(by)
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine))
    assert guilty(found) == ["token shift"], told(found)


def with_bos(request: GenerationRequest) -> GenerationRequest:
    return replace(request, token_ids=(BOS, *request.token_ids)[: 24 + 1])


def with_eos_behind(request: GenerationRequest) -> GenerationRequest:
    return replace(request, token_ids=(*request.token_ids, EOS))


@pytest.mark.parametrize(
    ("change", "said"), [(with_bos, f"bos_token ({BOS}) put before it"), (with_eos_behind, f"({EOS}) put behind it")]
)
def test_another_prompt(policy: Policy, change: Callable[[GenerationRequest], GenerationRequest], said: str) -> None:
    engine = policy.engine()
    engine.change = change
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine))
    assert guilty(found) == ["template or tokenizer"], told(found)
    assert said in found["template or tokenizer"].evidence


def one_value(tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] += 3.0
    return "model.layers.1.self_attn.k_proj.weight"


def gate_and_up(tensors: dict[str, Tensor]) -> str:
    gate, up = (tensors[f"model.layers.0.mlp.experts.5.{name}_proj.weight"] for name in ("gate", "up"))
    kept = gate.clone()
    gate.copy_(up)
    up.copy_(kept)
    return "model.layers.0.mlp.experts.5.gate_proj.weight, model.layers.0.mlp.experts.5.up_proj.weight"


def router_rows(tensors: dict[str, Tensor]) -> str:
    router = tensors["model.layers.1.mlp.gate.weight"]
    router.copy_(router.roll(1, 0))
    return "model.layers.1.mlp.gate.weight"


PLANTED = [(one_value, True), (gate_and_up, True), (router_rows, True)]
UNREAD_TOO = [(gate_and_up, False), (router_rows, False)]  # keys alone look like positions from outside


@pytest.mark.parametrize(("plant", "read"), PLANTED + UNREAD_TOO)
def test_other_weights(policy: Policy, plant: Callable[[dict[str, Tensor]], str], read: bool) -> None:
    engine = policy.engine()
    name = plant(engine.engine.tensors)
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine) if read else UNREAD)
    assert guilty(found) == ["weights"], told(found)
    assert not read or f"the engine holds others in {name}" in found["weights"].evidence
    if plant is gate_and_up and not read:
        assert "those through expert 5 of MoE layer 0 differ by" in found["weights"].evidence


def rounding_routers(router_logits: Tensor, shape: ModelShape, selection_bias: None) -> tuple[Tensor, Tensor]:
    """Where the last chosen and the first left out are near, the other is taken."""
    assert shape.normalize_top_k
    assert selection_bias is None
    experts_per_token = shape.experts_per_token
    ordered, experts = router_logits.sort(dim=-1, descending=True)
    near = ordered[:, experts_per_token - 1] - ordered[:, experts_per_token] < 0.05
    chosen = experts[:, :experts_per_token].clone()
    chosen[near, -1] = experts[near, experts_per_token]
    return chosen, router_logits.gather(1, chosen).softmax(-1, dtype=torch.float32)


@pytest.mark.parametrize("replays", [False, True])
def test_routers_that_round_otherwise(policy: Policy, monkeypatch: pytest.MonkeyPatch, replays: bool) -> None:
    monkeypatch.setattr(mlp, "choose_experts", rounding_routers)
    engine = policy.engine()
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine), replays=replays)
    assert guilty(found) == ([] if replays else ["routing"]), told(found)
    assert found["routing"].verdict == ("noise" if replays else "guilty")
    assert "with the engine's experts: mean |d| " in found["routing"].evidence


def offset_when_decoding(engine: Embedded) -> None:
    inner = engine.engine.model.hidden

    def hidden(tokens: Tensor, positions: Tensor, context: Context, *others: Tensor | None) -> Tensor:
        return inner(tokens, positions + int(isinstance(context, KVCache)), context, *others)  # type: ignore[arg-type]

    engine.engine.model.hidden = hidden  # type: ignore[method-assign]


def test_positions_off_by_one_between_prompt_and_completion(policy: Policy) -> None:
    engine = policy.engine()
    offset_when_decoding(engine)
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine))
    assert guilty(found) == ["padding or position"], told(found)
    assert "as decoded and as continued" in found["padding or position"].evidence


@pytest.mark.parametrize("read", [True, False])
def test_other_rotary_embeddings(policy: Policy, read: bool) -> None:
    engine = policy.engine(rope_theta=300.0)
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine) if read else UNREAD)
    assert guilty(found) == ["padding or position"], told(found)
    assert "behind one token they agree" in found["padding or position"].evidence


def test_left_padding_that_is_attended_to(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = KVCache.insert

    def insert(self: KVCache, start: int, clock: int, prefix: PrefixCache, lengths: Tensor) -> None:
        inner(self, start, clock, prefix, torch.full_like(lengths, prefix.columns.shape[2]))

    monkeypatch.setattr(local.KVCache, "insert", insert)
    engine = policy.engine()
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine))
    assert guilty(found) == ["padding or position"], told(found)
    assert "in a batch of unlike lengths and alone" in found["padding or position"].evidence


class Leaking(Learner):
    """Attends over the borders of packed sequences."""

    def _forward(self, samples: Samples) -> Tensor:
        return super()._forward(replace(samples, cu_seqlens=torch.tensor([0, len(samples.input_ids)])))


def test_a_learner_that_packs_wrongly(policy: Policy) -> None:
    engine = policy.engine()
    found = diagnose(Leaking(model=policy.model), engine, weights=policy.check(engine), max_tokens=256, columns=())
    assert guilty(found) == ["padding or position"], told(found)
    assert "the learner's log-probs packed and alone" in found["padding or position"].evidence


def test_bfloat16_is_noise(policy: Policy) -> None:
    engine = policy.engine(torch.bfloat16)
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine), engine_dtype="bfloat16")
    assert guilty(found) == [], told(found)
    assert found["dtype or kernels"].verdict == "noise"
    assert "float32 and bfloat16" in found["dtype or kernels"].evidence


def test_in_half_precision_the_parts_that_may_differ_are_named(policy: Policy) -> None:
    engine, half = policy.engine(torch.bfloat16), {"learner_dtype": "bfloat16", "engine_dtype": "bfloat16"}
    learner, weights = Learner(model=policy.model), policy.check(engine)
    finding = diagnose(learner, engine, weights=weights, head_dtype="float32", **half)["dtype or kernels"]
    assert finding.verdict == "noise"
    assert "rounding in bfloat16, the learner's output layer in float32" in finding.evidence
    assert all(part in finding.fix for part in ("learner.head_dtype", "routers", "selection biases"))


@pytest.mark.parametrize(("served", "named"), [(True, ["rollout.server", "learner"]), (False, ["learner"])])
def test_the_modes_against_what_depends_on_the_batch_are_named(policy: Policy, served: bool, named: list[str]) -> None:
    engine, half = policy.engine(torch.bfloat16), {"learner_dtype": "bfloat16", "engine_dtype": "bfloat16"}
    learner, seen = Learner(model=policy.model), {"batched": torch.full((8,), 0.02), "packed": torch.full((8,), 0.01)}
    for planted in (seen, {name: torch.zeros(8) for name in seen}):
        finding = diagnose(learner, engine, weights=policy.check(engine), served=served, planted=planted, **half)[
            "dtype or kernels"
        ]
        for one in ("rollout.server", "learner"):
            expected = one in named and planted is seen
            assert (f"{one}.batch_invariant=true" in finding.fix) is expected, finding.fix


def test_another_epsilon_is_a_kernels_fault(policy: Policy) -> None:
    engine = policy.engine(norm_eps=0.5)
    found = diagnose(Learner(model=policy.model), engine, weights=policy.check(engine))
    assert guilty(found) == ["dtype or kernels"], told(found)
    assert "learner.head_dtype" in found["dtype or kernels"].fix
