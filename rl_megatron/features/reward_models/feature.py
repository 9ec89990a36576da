"""``reward_models``: sequence classifiers on separate ranks, which rewards call while engines sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.sections.reward import RANKS, REWARD, reward_key
from rl_megatron.feature import Feature, RoleModel
from rl_megatron.rules import CheckFunction

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def _roles(c: RunConfig) -> dict[str, RoleModel]:
    models = c.reward_models if c.kind.samples else {}
    return {
        f"{REWARD}{name}": RoleModel(folder=one.path, key=f"reward_models.{name}.path", scores=True)
        for name, one in models.items()
    }


def _problems(c: RunConfig) -> Iterator[str]:
    """Yields a line for each reward model on ranks that no reward calls, or that is called and missing or too small."""
    if not c.kind.samples:
        return
    rewards = {"reward": c.reward} | {reward_key(name): one for name, one in c.own_rewards.items()}
    named = [(key, name) for key, one in rewards.items() for name in one.functions.values() if name.startswith(RANKS)]
    asked = {name.removeprefix(RANKS): key for key, name in named}
    for name in sorted(asked.keys() - set(c.reward_models)):
        known = ", ".join(c.reward_models) or "none"
        yield f"{asked[name]}.function={RANKS}{name:.80}: reward_models has {known}; give reward_models.{name:.80}.path"
    for name in sorted(set(c.reward_models) - asked.keys()):
        yield f"reward_models.{name}: no reward uses it; set reward.function={RANKS}{name}, or leave it out"
    yield from _longer_than_a_micro_batch(c)


def _longer_than_a_micro_batch(c: RunConfig) -> Iterator[str]:
    """Yields a line for each set with completions longer than a reward model on ranks can read; training's fit."""
    before, most = c.rollout.max_prompt_tokens, c.learner.max_tokens_per_micro_batch
    of_training = {"reward": c.reward} | {reward_key(name): one for name, one in c.source_rewards.items()}
    for name, one in c.eval.sets.items():
        if (one.environment or c.environment).function is not None:
            continue
        new = one.max_new_tokens or c.rollout.max_new_tokens
        judges = of_training if one.reward is None else {reward_key(f"eval.sets.{name}"): one.reward}
        for key, section in judges.items():
            ranked = any(function.startswith(RANKS) for function in section.functions.values())
            if ranked and (longest := min(before + new, section.model.max_tokens or before + new)) > most:
                yield (
                    f"learner.max_tokens_per_micro_batch={most} is less than the {longest} tokens that reward_models "
                    f"score of rollout.max_prompt_tokens={before} and eval.sets.{name}.max_new_tokens={new}; raise the "
                    f"first, or set {key}.model.max_tokens={most}, so that they read the last ones"
                )


FEATURE = Feature(name="reward_models", roles=_roles, rules=(CheckFunction(_problems),))
