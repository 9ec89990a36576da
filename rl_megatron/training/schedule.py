"""Learning rates as functions of the step, and the steps of a number of epochs."""

from __future__ import annotations

import math
from fractions import Fraction

from rl_megatron.config.run import RunConfig


def schedule(config: RunConfig, step: int, *, after: int = 0) -> float:
    """The factor of the learning rate at RL step ``step`` (from 1) of a model that is trained ``after`` a number of
    steps, in which it is 0: linear warm-up, then the configured decay to 0."""
    if step <= after:
        return 0.0
    train = config.train
    warm = min(1.0, (step - after) / train.lr_warmup_steps) if train.lr_warmup_steps else 1.0
    left = (train.steps - step + 1) / max(1, train.steps - after - train.lr_warmup_steps)
    shapes = {"none": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * min(1.0, left))}
    return min(warm, shapes[train.lr_decay])


def learning_rate(config: RunConfig, step: int) -> float:
    """The policy's learning rate at ``step``; its schedule begins once the critic no longer trains alone."""
    section = config.algorithm
    after = section.critic.only_steps if section.needs_critic else 0
    return config.train.learning_rate * schedule(config, step, after=after)


def critic_learning_rate(config: RunConfig, step: int) -> float:
    """The critic's learning rate at ``step``, on the same schedule from the first step on."""
    rate = config.algorithm.critic.learning_rate
    return (config.train.learning_rate if rate is None else rate) * schedule(config, step)


def steps_of(epochs: float, rows: int, batch_size: int) -> int:
    """The steps of so many passes over ``rows``, of ``epochs`` as it is written: as a float 1.1 is more."""
    return math.ceil(Fraction(str(epochs)) * rows / batch_size)
