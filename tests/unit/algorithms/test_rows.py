"""Rows of conf/algorithm: each builds, has the keys of rows.yaml, and gives the losses of published formulas."""

from __future__ import annotations

import functools
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from torch import Tensor

from rl_megatron.algorithms import corrections
from rl_megatron.algorithms.advantages import LEVELS
from rl_megatron.algorithms.auxiliary import ValueLoss
from rl_megatron.algorithms.kl import ESTIMATORS
from rl_megatron.algorithms.losses import AGGREGATIONS, policy_loss
from rl_megatron.algorithms.objectives import OBJECTIVES, RATIO_LEVELS
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection, CorrectionSection, KLSection
from rl_megatron.errors import ConfigError
from rl_megatron.types import LossInputs
from tests.rows import BESIDE, NAMES, WITH_TURNS, config_of
from tests.samples import loss_inputs

ROOT = Path(__file__).parents[3]


def documented_rows() -> dict[str, dict[str, object]]:
    rows = yaml.safe_load((Path(__file__).parent / "rows.yaml").read_text())
    return {
        name: {k: yaml.safe_load(_number(v)) for k, v in (p.split("=") for p in keys.split())}
        for name, keys in rows.items()
    }


def _number(text: str) -> str:
    """YAML 1.1 reads 3e-4 as a string."""
    return str(float(text)) if re.fullmatch(r"[0-9.]+e-?[0-9]+", text) else text


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_configuration_is_the_documented_row_and_builds(name: str) -> None:
    keys = [f"{of_section(key)}={value}" for key, value in documented_rows()[name].items()]
    base = "calculator" if name in WITH_TURNS else "tiny_cpu"
    by_keys = load_config(base, ["algorithm=default_row", *BESIDE.get(name, ()), *keys], conf_with_an_empty_row())
    assert by_keys == config_of(name)


def of_section(key: str) -> str:
    return key if key.partition(".")[0] in RunConfig.model_fields else f"algorithm.{key}"


@functools.cache
def conf_with_an_empty_row() -> Path:
    """A copy of conf/ in which ``algorithm=default_row`` is the schema's defaults."""
    copy = Path(tempfile.mkdtemp()) / "conf"
    shutil.copytree(ROOT / "conf", copy)
    (copy / "algorithm" / "default_row.yaml").write_text("{}\n")
    return copy


def test_every_documented_row_ships() -> None:
    assert sorted(documented_rows()) == NAMES


def test_the_limits_of_the_papers_are_in_the_rows() -> None:
    """A token ratio's 0.2 in a GSPO recipe is a thousand times too wide."""
    rows = documented_rows()
    assert (rows["gspo"]["clip_low"], rows["gspo"]["clip_high"]) == (3e-4, 4e-4)
    assert rows["dapo"]["clip_high"] == 0.28


def test_a_sequence_ratio_makes_grpo_gspo() -> None:
    clips = ["algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"]
    changed = load_config("tiny_cpu", ["algorithm=grpo", "algorithm.ratio_level=sequence", *clips])
    assert changed.algorithm == load_config("tiny_cpu", ["algorithm=gspo"]).algorithm


def test_the_names_that_the_schema_allows_are_those_of_the_tables() -> None:
    fields = {
        (AlgorithmSection, "ratio_level"): set(RATIO_LEVELS),
        (AlgorithmSection, "aggregation"): set(AGGREGATIONS),
        (AlgorithmSection, "advantage_std"): set(LEVELS) | {"advantages"},
        (CorrectionSection, "mode"): set(corrections.MODES) | {"none"},
        (CorrectionSection, "level"): set(corrections.LEVELS) | {"worst"},
        (KLSection, "estimator"): set(ESTIMATORS),
    }
    for (section, name), names in fields.items():
        assert set(get_args(section.model_fields[name].annotation)) == names
    or_own = {"objective": set(OBJECTIVES), "advantage_mean": set(LEVELS) | {"greedy", "moving", "tracked"}}
    for name, names in or_own.items():
        known, _ = get_args(AlgorithmSection.model_fields[name].annotation)
        assert set(get_args(known)) == names


@pytest.mark.parametrize(
    "keys", [["objective=reinforce", "ratio_level=sequence"], ["ratio_level=sequence", "aggregation=token_mean"]]
)
def test_an_unsound_row_is_refused_with_its_reason(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.(objective|aggregation)="):
        load_config("tiny_cpu", ["algorithm=grpo", *(f"algorithm.{key}" for key in keys)])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["advantage_mean=moving"], "advantage_mean=moving: that baseline is the reward of a whole completion"),
        (["advantage_mean=greedy", "advantage_std=none"], "advantage_mean=greedy: that baseline is the reward of a"),
        (["turn_baseline=index", "advantage_std=batch"], "turns with the same number are compared within their"),
        (["turn_baseline=index", "advantage_std=advantages"], "turns with the same number are compared within their"),
        (["turn_baseline=state", "advantage_std=batch", "turn_compared=returns"], "from one state are compared"),
        (["turn_baseline=state"], r"=rewards and algorithm\.gamma_turn=1: .* set turn_compared=returns, or g"),
        (["turn_compared=returns", "gamma_turn=0"], "turn_compared=returns does nothing.* is its own reward"),
        (["turn_compared=returns", "advantage_mean=none", "advantage_std=none"], "turns are not compared"),
        (["advantage_mean=batch", "advantage_std=advantages"], "for the batch it is the std of rewards"),
        (["advantage_std=none", "std_unbiased=false"], r"advantage_std=none does not read it.*=group or batch or"),
        (["kl.coefficient=0.1", "kl.placement=completion_reward"], "the last turn's reward; set kl.placement=loss"),
        (["kl.coefficient=0.1", "kl.placement=token_reward"], "the last turn's reward; set kl.placement=loss"),
        (["turn_baseline=index", "advantage_mean=none", "advantage_std=none"], "turns are not compared"),
        (["ratio_level=turn"], r"ratio_level=turn with .* long sequence.*; set aggregation=seq_mean_token_mean"),
    ],
)
def test_what_credit_over_turns_cannot_be_beside_is_refused(keys: list[str], reason: str) -> None:
    given = [*(f"algorithm.{key}" for key in keys), "algorithm.credit=turn"]
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm=dapo", *given])


@pytest.mark.parametrize(
    ("row", "key", "same"), [("grpo", "credit", "completion"), ("gspo", "ratio_level", "sequence")]
)
def test_turns_without_an_environment_are_refused(row: str, key: str, same: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}=turn.*: .*a completion is one turn.*{key}={same}"):
        load_config("tiny_cpu", [f"algorithm={row}", f"algorithm.{key}=turn"])
    load_config("calculator", [f"algorithm={row}", f"algorithm.{key}=turn"])


def test_keys_of_turns_without_credit_over_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gamma_turn=0\.5 does nothing.*algorithm\.credit=turn does"):
        load_config("tiny_cpu", ["algorithm.gamma_turn=0.5"])


def test_steps_of_a_completion_have_no_states() -> None:
    """Nothing is read between them, also where another source has an environment."""
    mixed = ["warm_start.steps=0", "data=mixture", "data.sources.played.environment.function=guess"]
    mixed += [f"data.sources.{name}.type=arithmetic" for name in ("judged", "played")]
    for of, beside in (("reward", []), ("data.sources.judged.reward", mixed)):
        keys = ["algorithm=gigpo", f"{of}.steps=true", f"{of}.function=tests.toy_roles:grade_steps", *beside]
        with pytest.raises(ConfigError, match=r"turn_baseline=state with .*reward\.steps=true: steps of a"):
            load_config("tiny_cpu", keys)
        load_config("tiny_cpu", [*keys, "algorithm.turn_baseline=index"])


# The same recipe on the same batch: our loss beside the formulas that verl, AReaL, TRL and slime publish. Formulas
# are written afresh in padded [B, L] form, under the peers' keys; where they come from: verl: verl-project/verl,
# verl/trainer/ppo/core_algos.py at 018f23b5, its DPPO at 1dda039b; AReaL: inclusionAI/AReaL,
# areal/utils/functional/functional.py at 2274616c, its CISPO as areal/api/cli_args.py says; TRL: huggingface/trl,
# trl/trainer/grpo_config.py at 006d32c9 and public copies of trl/trainer/grpo_trainer.py; slime: THUDM/slime,
# slime/utils/ppo_utils.py at 06787cf5, slime/backends/megatron_utils/{loss,cp_utils}.py. Where the numbers differ,
# the test shows both, and docs/migrating.md says why.
LENGTHS, PROMPTS = [9, 4, 6, 2, 5, 7], [2, 1, 3, 1, 0, 2]
WIDTH = max(LENGTHS)


@dataclass(frozen=True)
class Padded:
    """[B, L] each; zeros where masked out. ``logp`` has a gradient."""

    logp: Tensor
    old: Tensor
    ref: Tensor
    adv: Tensor
    mask: Tensor


PeerLoss = Callable[[Padded], Tensor]


def padded(spread: float = 0.3) -> Padded:
    """Six responses; what stands before each is a tool's and not trained. Advantages are one a response."""
    g = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), WIDTH)
    place = torch.arange(WIDTH)
    mask = (place < torch.tensor(LENGTHS)[:, None]) & (place >= torch.tensor(PROMPTS)[:, None])
    old = -torch.rand(shape, generator=g, dtype=torch.float64)
    drawn = (old + spread * torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    new, ref = (x.clamp(max=-0.01) for x in drawn)  # a probability is below 1
    adv = torch.randn(len(LENGTHS), 1, generator=g, dtype=torch.float64).expand(shape)
    return Padded((new * mask).requires_grad_(), old * mask, ref * mask, adv * mask, mask.double())


def packed(x: Padded, logp: Tensor) -> LossInputs:
    """The same batch without its padding."""
    real = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    return loss_inputs(
        LENGTHS,
        x.mask[real].bool(),
        logprobs=logp[real],
        old_logprobs=x.old[real],
        rollout_logprobs=x.old[real],
        ref_logprobs=x.ref[real],
        advantages=x.adv[real],
    )


def ours(x: Padded, *keys: str) -> Tensor:
    given = [key if key.startswith("rollout") else f"algorithm{key}" for key in keys]
    config = load_config("tiny_cpu", [f"rollout.max_new_tokens={WIDTH}", *given])
    row, longest = config.algorithm, config.rollout.max_new_tokens
    return policy_loss(row, kl_coefficient=row.kl.coefficient, max_new_tokens=longest)(packed(x, x.logp)).loss


def per_row(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def surrogate(ratio: Tensor, adv: Tensor, low: float, high: float, dual: float = math.inf) -> Tensor:
    """PPO's clipped loss of a token, with its ratio bounded by ``dual`` where the advantage is below 0."""
    worst = torch.maximum(-ratio * adv, -ratio.clamp(1 - low, 1 + high) * adv)
    return torch.where(adv < 0, torch.minimum(worst, (-adv * dual).nan_to_num()), worst) if dual < math.inf else worst


def sequence_ratio(x: Padded) -> Tensor:
    """exp of the mean log-ratio, [B, 1], by autograd through the mean."""
    return per_row(x.logp - x.old, x.mask).exp()[:, None]


def dppo(divergence: str, x: Padded, low: float, high: float, cap: float) -> Tensor:
    """[B, L]: verl's dppo_tv and dppo_kl, Stable-RL's dppo_binary_tv and dppo_binary_kl."""
    p, q, ratio = x.logp.detach().exp(), x.old.exp(), (x.logp - x.old).detach().exp()
    if divergence == "dppo_tv":
        distance = (p - q).abs()
    else:
        distance = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    near = torch.where(x.adv > 0, (distance <= high) | (p <= q), (distance <= low) | (p >= q))
    return -x.adv * ratio.clamp(max=cap) * x.logp * near


def verl(
    loss_mode: str = "vanilla",
    loss_agg_mode: str = "token-mean",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    loss_scale_factor: int | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_type: str = "low_var_kl",
) -> PeerLoss:
    def aggregate(token: Tensor, mask: Tensor, mode: str) -> Tensor:
        if mode == "token-mean":
            return (token * mask).sum() / mask.sum()
        if mode == "seq-mean-token-mean":
            return per_row(token, mask).mean()
        total = (token * mask).sum(1).mean()
        return total / (loss_scale_factor or mask.shape[1]) if mode.endswith("norm") else total

    def loss(x: Padded) -> Tensor:
        ratio, mode = (x.logp - x.old).clamp(-20, 20).exp(), loss_agg_mode
        if loss_mode == "vanilla":
            token = surrogate(ratio, x.adv, clip_ratio_low, clip_ratio_high, clip_ratio_c)
        elif loss_mode == "gspo":  # its dual clip and aggregation keys are not read
            token, mode = surrogate(sequence_ratio(x), x.adv, clip_ratio_low, clip_ratio_high), "seq-mean-token-mean"
        elif loss_mode.startswith("dppo"):
            token = dppo(loss_mode, x, clip_ratio_low, clip_ratio_high, clip_ratio_c)
        else:
            token = -ratio.detach().clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * x.adv * x.logp
        d = x.ref - x.logp
        kl = {"kl": -d, "mse": d.square() / 2, "low_var_kl": (d.exp() - d - 1).clamp(max=10)}[kl_loss_type]
        return aggregate(token, x.mask, mode) + kl_loss_coef * aggregate(kl, x.mask, loss_agg_mode)

    return loss


def areal(
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    importance_sampling_level: str = "token",
    use_cispo_loss: bool = False,
) -> PeerLoss:
    def loss(x: Padded) -> Tensor:
        high, ratio = eps_clip if eps_clip_higher is None else eps_clip_higher, (x.logp - x.old).exp()
        if use_cispo_loss:
            token = -ratio.detach().clamp(1 - eps_clip, 1 + high) * x.adv * x.logp
        else:
            chosen = ratio if importance_sampling_level == "token" else sequence_ratio(x)
            token = surrogate(chosen, x.adv, eps_clip, high, c_clip or math.inf)
        return (token * x.mask).sum() / x.mask.sum()

    return loss


def trl_gamma_weight(x: Padded) -> Tensor:
    """[B, L]: w^k exp(-lambda w) / exp(-lambda), w the product over the row of its ratios."""
    w = (x.logp - x.old).detach().mul(x.mask).sum(1, keepdim=True).exp()
    k, rate = (torch.where(x.adv >= 0, good, bad).to(w) for good, bad in ((2.0, 3.0), (3.0, 2.0)))
    return w**k * (-rate * w).exp() / (-rate).exp()


def trl(
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_sampling_level: str = "token",
    max_completion_length: int = 256,
    beta: float = 0.0,
) -> PeerLoss:
    def loss(x: Padded) -> Tensor:
        high = epsilon if epsilon_high is None else epsilon_high
        ratio = (x.logp - x.old).exp() if importance_sampling_level == "token" else sequence_ratio(x)
        if loss_type == "cispo":
            token = -ratio.detach().clamp(max=high) * x.adv * x.logp
        elif loss_type == "vespo":  # of its defaults
            token = -trl_gamma_weight(x) * x.adv * x.logp
        else:
            token = surrogate(ratio, x.adv, epsilon, high)
        token = token + beta * ((x.ref - x.logp).exp() - (x.ref - x.logp) - 1)
        if loss_type == "grpo":
            return per_row(token, x.mask).mean()
        if loss_type == "luspo":  # of one loss a response, [B, 1], or of each token's
            return (per_row(token, x.mask) * x.mask.sum(1)).mean()
        length = len(x.mask) * max_completion_length if loss_type == "dr_grpo" else x.mask.sum()
        return (token * x.mask).sum() / length

    return loss


def slime(
    advantage_estimator: str = "grpo",
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    calculate_per_token_loss: bool = False,
    kl_loss_coef: float = 0.0,
) -> PeerLoss:
    """``kl_loss_type`` is k2."""

    def loss(x: Padded) -> Tensor:
        high, ratio = eps_clip if eps_clip_high is None else eps_clip_high, (x.logp - x.old).exp()
        if advantage_estimator == "cispo":
            token = -ratio.detach().clamp(1 - eps_clip, 1 + high) * x.adv * x.logp
        else:
            chosen = sequence_ratio(x) if advantage_estimator == "gspo" else ratio
            token = surrogate(chosen, x.adv, eps_clip, high)
        token = token + kl_loss_coef * (x.logp - x.ref).square() / 2
        return (token * x.mask).sum() / x.mask.sum() if calculate_per_token_loss else per_row(token, x.mask).mean()

    return loss


UNWEIGHTED = ".kl.importance_weighted=false"
DPPO_LIMITS = (".clip_low=0.02", ".clip_high=0.04", ".cap_high=1.1")
GSPO_CLIPS = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
SAME: list[tuple[list[str], PeerLoss]] = [
    (["=grpo", ".dual_clip=3.0"], verl(loss_agg_mode="seq-mean-token-mean")),
    (["=grpo", ".aggregation=token_mean", ".dual_clip=3.0"], verl()),
    (["=grpo", ".aggregation=token_mean"], areal()),
    (["=grpo", ".aggregation=token_mean", ".dual_clip=1.1"], areal(c_clip=1.1)),
    (["=grpo"], trl(loss_type="grpo")),
    (["=grpo"], slime()),
    (["=dapo", ".dual_clip=3.0"], verl(clip_ratio_high=0.28)),
    (["=dapo"], areal(eps_clip_higher=0.28)),
    (["=dapo"], trl(epsilon_high=0.28)),
    (["=dapo"], slime(eps_clip_high=0.28, calculate_per_token_loss=True)),
    (
        ["=dr_grpo", "rollout.max_new_tokens=12", ".dual_clip=3.0"],
        verl(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=12),
    ),
    (["=dr_grpo", ".dual_clip=3.0"], verl(loss_agg_mode="seq-mean-token-sum-norm")),
    (["=dr_grpo", "rollout.max_new_tokens=12"], trl(loss_type="dr_grpo", max_completion_length=12)),
    (["=gspo"], verl("gspo", **GSPO_CLIPS)),
    (["=gspo"], trl("grpo", 3e-4, 4e-4, importance_sampling_level="sequence")),
    (["=luspo"], trl("luspo", 2e-3, 2.5e-3, importance_sampling_level="sequence")),
    (["=vespo"], trl("vespo")),
    (["=gspo"], slime("gspo", 3e-4, 4e-4)),
    *(([f"={kind}", *DPPO_LIMITS], verl(kind, "token-mean", 0.02, 0.04, 1.1)) for kind in ("dppo_tv", "dppo_kl")),
    (["=cispo", ".cap_high=1.4"], verl("cispo", clip_ratio_low=1.0, clip_ratio_high=0.4)),
    (["=cispo", ".cap_low=0.8", ".cap_high=1.2"], verl("cispo")),
    (["=cispo", ".cap_high=1.4"], areal(eps_clip=1.0, eps_clip_higher=0.4, use_cispo_loss=True)),
    (["=cispo", ".cap_high=1.4"], trl(loss_type="cispo", epsilon_high=1.4)),
    (["=cispo", ".cap_high=1.4"], slime("cispo", 1.0, 0.4, calculate_per_token_loss=True)),
    (
        ["=dapo", ".dual_clip=3.0", ".kl.coefficient=0.1", UNWEIGHTED, ".kl.estimator=k3"],
        verl(clip_ratio_high=0.28, kl_loss_coef=0.1),
    ),
    (
        ["=dapo", ".dual_clip=3.0", ".kl.coefficient=0.1", UNWEIGHTED, ".kl.estimator=k2"],
        verl(clip_ratio_high=0.28, kl_loss_coef=0.1, kl_loss_type="mse"),
    ),
    (["=grpo", ".kl.coefficient=0.1", UNWEIGHTED], trl(loss_type="grpo", beta=0.1)),
    (["=grpo", ".kl.coefficient=0.1", UNWEIGHTED, ".kl.estimator=k2"], slime(kl_loss_coef=0.1)),
]


@pytest.mark.parametrize(("keys", "peer"), SAME, ids=[f"{keys} {peer.__qualname__}" for keys, peer in SAME])
@pytest.mark.parametrize("spread", [0.3, 1e-3])
def test_the_same_recipe_has_the_same_loss_and_gradient(keys: list[str], peer: PeerLoss, spread: float) -> None:
    x = padded(spread)
    values = [ours(x, *keys), peer(x)]
    gradients = [torch.autograd.grad(value, x.logp)[0] for value in values]
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1] * x.mask, rtol=1e-9, atol=1e-12)


def two_responses() -> Padded:
    """2 tokens of A = -1 and 20 of A = ½, at ratio 1."""
    mask = (torch.arange(20) < torch.tensor([[2], [20]])).double()
    old, adv = -mask, torch.tensor([[-1.0], [0.5]]).double() * mask
    return Padded(old.clone().requires_grad_(), old, old, adv, mask)


def test_gspo_as_a_token_mean_turns_the_sign_of_the_loss() -> None:
    """AReaL has no other mean, TRL's default is this one; the paper's is over sequences, and so is ours."""
    x = two_responses()
    per_token = [areal(importance_sampling_level="sequence"), trl(importance_sampling_level="sequence")]
    assert [peer(x).item() for peer in per_token] == pytest.approx([(2 - 10) / 22] * 2)
    assert verl("gspo", **GSPO_CLIPS)(x).item() == pytest.approx((1 - 0.5) / 2)


def test_a_cispo_cap_of_five_is_six_in_verl_areal_and_slime() -> None:
    """One token of ratio 8: the weight is 5 here and in TRL, 1 + 5 where caps are distances from 1."""
    one = torch.ones(1, 1, dtype=torch.float64)
    x = Padded((-one).requires_grad_(), -one - math.log(8), -one, one, one)
    distances = [verl("cispo", clip_ratio_high=5.0), areal(1.0, 5.0, use_cispo_loss=True), slime("cispo", 1.0, 5.0)]
    assert [-torch.autograd.grad(peer(x), x.logp)[0].item() for peer in distances] == pytest.approx([6.0] * 3)
    assert -torch.autograd.grad(trl("cispo", epsilon_high=5.0)(x), x.logp)[0].item() == pytest.approx(5.0)


def test_low_var_kl_stops_at_ten() -> None:
    """verl and slime clamp the estimate: e³ - 4 = 16.1 counts as 10 and pulls no more; ours, as TRL's, goes on."""
    one = torch.ones(1, 1, dtype=torch.float64)
    x, beta = Padded((-4 * one).requires_grad_(), -4 * one, -one, 0 * one, one), 0.1
    clamped, free = verl(kl_loss_coef=beta)(x), trl(beta=beta)(x)
    assert (clamped.item(), free.item()) == pytest.approx((beta * 10, beta * (math.exp(3) - 4)))
    assert torch.autograd.grad(clamped, x.logp)[0].item() == 0.0
    assert torch.autograd.grad(free, x.logp)[0].item() == pytest.approx(beta * (1 - math.exp(3)))


def test_the_critics_loss_is_that_of_verl_and_areal() -> None:
    """verl's cliprange_value, AReaL's critic.eps_clip, slime's --value-clip: half the worse of two squared errors."""
    x, g = padded(), torch.Generator().manual_seed(7)
    values, old, returns = (torch.randn(x.mask.shape, generator=g, dtype=torch.float64) for _ in range(3))
    clipped = old + (values - old).clamp(-0.5, 0.5)
    worse = torch.maximum((values - returns).square(), (clipped - returns).square()) / 2
    real = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    inputs = replace(packed(x, x.logp), values=values[real], old_values=old[real], returns=returns[real])
    assert ValueLoss(clip=0.5)(inputs).loss.item() == pytest.approx(((worse * x.mask).sum() / x.mask.sum()).item())
