"""``rollout.sampling_masks``: the learner's log-probs are over the tokens that sampling kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_megatron.columns import Column
from rl_megatron.feature import Feature
from rl_megatron.rules import Above, Excludes, Needs, On, OneOf, Rule
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


class SamplingMaskKeys(Section):
    """The feature's key of the rollout."""

    sampling_masks: bool = False
    """The engine returns the tokens that top_p and top_k kept for each sampled token, and all log-probs are over these:
    those of the policy, of the old policy and of a reference. So limits bias no ratio (docs/troubleshooting.md). Needs
    top_k, the most ids that are kept for a token, 4 bytes each."""


def _asks(config: RunConfig) -> str | None:
    assert isinstance(config.rollout, SamplingMaskKeys)
    return "rollout.sampling_masks=true" if config.rollout.sampling_masks and config.kind.samples else None


_MASKS = On("rollout.sampling_masks", True)
_SGLANG = On("rollout.engine", "sglang")
_LEAVE_OUT = "leave one of them out"
# fmt: off
_RULES: Sequence[Rule] = (
    Needs(when=_MASKS, all=On("rollout.top_k", Above(0)),
          why="a mask has an id for each token that is kept, and top_p may keep the whole vocabulary",
          fix="set rollout.top_k=512"),
    Needs(when=_MASKS, all=On("rollout.engine", OneOf(("local", "sglang"))),
          why="vLLM 0.32.0 returns masks only from its second model runner, which needs a GPU and was not tried, and "
          "other adapters ask for none", fix="set rollout=local or sglang, or leave it out"),
    Excludes(one=(_MASKS, _SGLANG), other=On("rollout.top_k", Above(4096)),
             why="SGLang returns at most as many ids of a token by default", fix="set top_k to 4096 or less"),
    Excludes(one=(_MASKS, _SGLANG), other=On("rollout.server.draft_tokens", Above(0)),
             why="SGLang returns no masks beside proposals", fix=_LEAVE_OUT),
    Excludes(one=_MASKS, other=On("algorithm.needs_top", True, "algorithm.kl.estimator"),
             why="it compares probabilities of tokens that sampling may not have kept",
             fix="set kl.estimator=k1, k2 or k3"),
    Excludes(one=_MASKS, other=On("algorithm.kl.teachers.*.server"),
             why="servers return log-probs over the whole vocabulary", fix="hold the teacher on ranks"),
    Excludes(one=_MASKS, other=On("algorithm.preference.beta"), why="pairs have no ratio to the engine",
             fix=_LEAVE_OUT),
    Excludes(one=_MASKS, other=On("algorithm.demonstration_gamma"), why="no engine sampled it", fix=_LEAVE_OUT),
    Excludes(one=_MASKS, other=On("rollout.interrupt.earliest", Above(0)),
             why="engines return masks per request, and an interrupted completion needs two", fix=_LEAVE_OUT),
)
# fmt: on

FEATURE = Feature(
    name="sampling_masks",
    keys={"rollout": SamplingMaskKeys},
    rules=_RULES,
    columns=(Column(name="kept", of="sampled"),),  # ragged: ids of the tokens from which each one was drawn, int32
    asks={"kept": _asks},
    logits="rl_megatron.features.sampling_masks.learner:kept_tokens",
)
