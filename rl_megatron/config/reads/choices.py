"""Lists the keys that each choice of the ``algorithm`` section reads.

A test checks the table: each key changes what a step does, or is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

ON, OFF = "on", "off"
"""The states of a choice that is a number: off is 0 or null, on is any other."""
OWN = "package.module:name"
"""The state of a choice that is code of the user's own."""
_CORRECTION = ("correction.level", "correction.high")
_OF_RATIOS = (*_CORRECTION, "correction.low")
_OF_THE_GAP = ("correction.mode", "correction.veto")
_KL = tuple(f"kl.{key}" for key in ("placement", "estimator", "importance_weighted", "top_k", "beta", "teachers"))
OF_OBJECTIVES = (
    "ratio_level",
    "clip_low",
    "clip_high",
    "keep_low",
    "keep_high",
    "dual_clip",
    "cap_low",
    "cap_high",
    "tau_positive",
    "tau_negative",
    "shape_positive",
    "shape_negative",
    "rate_positive",
    "rate_negative",
)
"""The keys that an objective may read."""

READS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "advantage_mean": {
        "none": (),
        "group": ("leave_one_out", "best_of"),
        "batch": ("leave_one_out",),
        "greedy": (),
        "moving": ("baseline_decay",),
        "tracked": ("baseline_decay",),
        OWN: (),
    },
    "advantage_std": {
        "none": (),
        "group": ("std_unbiased",),
        "batch": ("std_unbiased",),
        "advantages": ("std_unbiased",),
    },
    "credit": {
        "completion": (),
        "turn": ("gamma_turn", "turn_baseline", "turn_compared", "turn_weight"),
        "discounted": ("gamma",),
        "optimal": ("gamma",),
        "gae": ("gamma", "lam", "lam_length_factor", "critic"),
    },
    "objective": {
        "clip": ("ratio_level", "clip_low", "clip_high", "keep_low", "keep_high", "dual_clip", "balance"),
        "cispo": ("ratio_level", "cap_low", "cap_high"),
        "reinforce": (),
        "importance": ("ratio_level",),
        "sapo": ("ratio_level", "tau_positive", "tau_negative"),
        "vespo": ("ratio_level", "shape_positive", "shape_negative", "rate_positive", "rate_negative"),
        "topr": ("ratio_level", "cap_low", "cap_high"),
        "gmpo": ("clip_low", "clip_high"),
        "dppo_tv": ("clip_low", "clip_high", "cap_high"),
        "dppo_kl": ("clip_low", "clip_high", "cap_high"),
        OWN: OF_OBJECTIVES,  # which of them is known once it is called: algorithms.own
    },
    "old_logprobs": {
        "learner": (*_OF_THE_GAP, "old_kl_limit"),
        "interpolated": _OF_THE_GAP,  # this old policy follows the current one
        "rollout": ("old_kl_limit",),  # the old policy is the one that sampled
    },
    "correction.mode": {
        "none": (),
        **dict.fromkeys(("truncate", "mask", "band"), _OF_RATIOS),
        "reject": _CORRECTION,
    },
    "tokens.choose": {
        "all": (),
        "top_entropy": ("tokens.share",),
        "clip_cov": ("tokens.share", "tokens.low", "tokens.high"),
        "kl_cov": ("tokens.share", "tokens.kl_coefficient"),
        "second_moment": ("tokens.limit",),
    },
    "balance.share": {OFF: (), ON: ("balance.high", "balance.low")},
    "kl.coefficient": {OFF: (), ON: _KL},
    "kl.placement": {"loss": ("kl.importance_weighted",), "token_reward": (), "completion_reward": ()},
    "kl.follow_rate": {OFF: (), ON: ("kl.follow_every", "kl.reset_moments")},
    "kl.estimator": dict.fromkeys(("k1", "k2", "k3", "abs"), ("kl.importance_weighted",))
    | {"top_k": ("kl.top_k", "kl.beta")},
    "critic.backbone": {
        "own": ("critic.path", "critic.learning_rate", "critic.only_steps", "critic.optimizer"),
        "policy": ("critic.coefficient",),
    },
    "overlong_buffer": {OFF: (), ON: ("overlong_factor",)},
    "whiten": {OFF: (), ON: ("whiten_of",)},
}
"""For each choice of the ``algorithm`` section and each of its values: the keys and inner sections that it reads."""

PREFERENCE_READS = (
    "preference",
    "kl",  # the reference; no coefficient: _kl_problems
    "unfinished_reward",
    "overlong_buffer",
    "overlong_factor",
    "reward_scale",
    "normalise_rewards",
    "old_logprobs",
    "routing_replay",
)
"""The keys that training on pairs (``preference.beta``) reads; without it, any key may be read."""
