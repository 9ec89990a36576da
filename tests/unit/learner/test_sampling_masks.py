"""Log-probs over kept tokens: those of float64's log-softmax of the logits that are left, with their gradients; and
what masks go with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from launcher.preflight import sizes
from launcher.preflight.subject import PreflightContext
from rl_megatron.columns import Ragged
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.features.sampling_masks.learner import kept_tokens
from rl_megatron.learner.heads import Kept, head_logprobs, logit_norms, token_logprobs
from rl_megatron.learner.packed import PackedMicroBatch

T, V, ROWS, HIDDEN = 11, 37, 48, 16  # rows beyond the vocabulary are padding
COUNTS = torch.tensor([3, 0, 1, 37, 2, 5, 0, 9, 1, 4, 20], dtype=torch.int32)  # 0: the whole vocabulary
Numbers = tuple[Tensor, Tensor]


def case() -> tuple[Tensor, Tensor, Tensor, Ragged]:
    """Hidden states, weight, targets, which are kept, and the kept tokens."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, HIDDEN, generator=g), torch.randn(ROWS, HIDDEN, generator=g)
    orders = torch.stack([torch.randperm(V, generator=g) for _ in range(T)])
    kept = torch.cat([order[:count] for order, count in zip(orders, COUNTS, strict=True)])
    return hidden, weight, orders[:, 0], Ragged(kept.int(), COUNTS)


def of(kept: Ragged, vocab: range = range(V)) -> Kept:
    found = kept_tokens(cast("PackedMicroBatch", SimpleNamespace(extra={"kept": kept})), vocab)
    assert found is not None
    return found


def dense(logits: Tensor, targets: Tensor, kept: Ragged) -> Numbers:
    """The same in plain torch, of [T, V] logits over the temperature."""
    left = torch.zeros_like(logits, dtype=torch.bool)
    left[torch.arange(T).repeat_interleave(kept.counts), kept.values.long()] = True
    left[kept.counts == 0] = True
    log_p = logits.masked_fill(~left, -torch.inf).log_softmax(1)
    entropy = -(log_p.exp() * log_p.masked_fill(~left, 0.0)).sum(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("of_hidden", [False, True])
def test_they_are_float64s_of_the_logits_that_are_left(of_hidden: bool, chunk: int) -> None:
    hidden, weight, targets, kept = case()
    weights, temperature = torch.randn(2, T, generator=torch.Generator().manual_seed(1)), 0.7
    cut: dict[str, Any] = {"temperature": temperature, "vocab_size": V, "chunk": chunk, "kept": of(kept)}
    source = hidden.clone().requires_grad_() if of_hidden else (hidden @ weight.T).requires_grad_()
    compute: Callable[..., Numbers] = (lambda x: head_logprobs(x, weight, targets, **cut)) if of_hidden else (
        lambda x: token_logprobs(x, targets, **cut)
    )  # fmt: skip
    found = compute(source)
    (found[0] * weights[0] + found[1] * weights[1]).sum().backward()

    exact = source.detach().double().requires_grad_()
    logits = (exact @ weight.double().T if of_hidden else exact)[:, :V] / temperature
    wanted = dense(logits, targets, kept)
    (wanted[0] * weights[0] + wanted[1] * weights[1]).sum().backward()
    for ours, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=0, atol=2e-6)
    assert source.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(source.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)

    step, along = 1e-2, torch.randn(source.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():  # finite differences, in one direction
        ahead, behind = (compute(source + sign * step * along)[0] for sign in (1, -1))
        slope = ((ahead - behind) * weights[0]).sum() / (2 * step)
    (of_logprobs,) = torch.autograd.grad((compute(source)[0] * weights[0]).sum(), source)
    assert float(slope) == pytest.approx(float((of_logprobs * along).sum()), rel=2e-2, abs=2e-2)


def test_norms_are_those_of_the_gradient_in_the_logits_that_are_left() -> None:
    hidden, weight, targets, kept = case()
    logits = hidden @ weight.T
    cut = {"rows": ROWS, "temperature": 0.7, "vocab_size": V, "chunk": 3}
    found = logit_norms(logits, targets, lambda x: x.clone(), kept=of(kept), **cut)
    scaled = (logits.double()[:, :V] / 0.7).requires_grad_()
    (gradient,) = torch.autograd.grad(dense(scaled, targets, kept)[0].sum(), scaled)
    torch.testing.assert_close(found.double(), gradient.square().sum(1), rtol=1e-5, atol=1e-10)
    alone = COUNTS == 1
    assert not found[alone].any()


def test_a_rank_without_a_kept_token_adds_nothing() -> None:
    """Its rows are others', of a position with kept tokens; it knows that these are not over the whole vocabulary."""
    found = of(Ragged(torch.tensor([3, 4]), torch.tensor([0, 2, 0])), range(V, ROWS))
    assert found.runs == {False: [slice(0, 1), slice(2, 3)], True: [slice(1, 2)]}
    assert (len(found.rows), found.ends) == (0, [0, 0, 0, 0])
    assert kept_tokens(cast("PackedMicroBatch", SimpleNamespace(extra={})), range(V)) is None


KEYS = ["rollout.top_p=0.9", "rollout.top_k=64", "rollout.sampling_masks=true"]


@pytest.mark.parametrize("row", ["vespo", "topr", "grpo algorithm.correction.level=product"])
def test_masks_end_the_refusals_of_limits(row: str) -> None:
    name, *more = row.split()
    keys = [f"algorithm={name}", *more, *(["algorithm.correction.mode=truncate"] if more else [])]
    for limits in (KEYS[:1], KEYS[1:2]):
        with pytest.raises(ConfigError, match=r"the engine's log-probs are of the tokens that it keeps"):
            load_config("tiny_cpu", [*keys, *limits])
    config = load_config("tiny_cpu", [*keys, *KEYS])
    assert config.required_columns == {"kept": "rollout.sampling_masks=true"}


def test_the_note_on_limits_falls_with_masks() -> None:
    for keys, count in ((KEYS[:2], 1), (KEYS, 0)):
        config = load_config("tiny_cpu", ["algorithm=grpo", "algorithm.kl.coefficient=0.01", *keys])
        found = [
            one.text for one in sizes.check_batches(PreflightContext(config, False)) if "sampling masks" in one.text
        ]
        assert len(found) == count


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["rollout.top_k=0"], "set rollout.top_k=512"),
        (["rollout=vllm"], "only from its second model runner"),
        (["rollout=sglang", "rollout.top_k=5000"], "set top_k to 4096 or less"),
        (["rollout=sglang", "rollout.server.draft_tokens=2", "learner.draft.train=true"], "no masks beside proposals"),
        (["algorithm=gkd", "algorithm.kl.reference=tests"], "tokens that sampling may not have kept"),
        (["algorithm=dpo"], "pairs have no ratio to the engine"),
        (["algorithm=luffy"], "no engine sampled it"),
        (["rollout.interrupt.earliest=2", "rollout.interrupt.text=end"], "an interrupted completion needs two"),
    ],
)
def test_what_masks_do_not_go_with_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", [*KEYS, *keys])
