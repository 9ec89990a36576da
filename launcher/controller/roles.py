"""Presents many ranks as one Learner, one RolloutEngine and one WeightSync, whichever launcher started them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from launcher.controller.engine import EngineGroup
from launcher.controller.group import WorkerGroup
from launcher.controller.kernels import record_kernels
from launcher.controller.learner import LearnerGroup, LearnerGroups
from launcher.controller.plane import Plane
from launcher.controller.slowest import SlowestRank
from launcher.controller.weights import WeightGroup
from rl_megatron.config.beside import frozen_folders, reward_model_roles
from rl_megatron.config.run import RunConfig
from rl_megatron.interfaces import Roles
from rl_megatron.placement.names import LEARNER


def roles_of(groups: Mapping[str, WorkerGroup], config: RunConfig) -> Roles:
    """The trainer's view of ready ranks: roles without their own ranks are on the learner's."""
    group = groups[LEARNER]
    trained = {"policy": True, "critic": config.algorithm.needs_critic}
    scoring = dict.fromkeys(reward_model_roles(config), True)
    frozen = {role: role not in scoring for role in frozen_folders(config)}
    planes = {role: Plane(its, config.learner_of(role).dims) for role, its in groups.items()}
    learners, others, reward_models = (
        {
            role: LearnerGroup(groups.get(role, group), role, planes.get(role, planes[LEARNER]))
            for role, needed in roles.items()
            if needed
        }
        for roles in (trained, frozen, scoring)
    )
    models = [*learners.values(), *others.values(), *reward_models.values()]
    together = [
        LearnerGroups([one for one in models if (one.role if one.role in groups else LEARNER) == name], plane)
        for name, plane in planes.items()
    ]

    slowest = SlowestRank(group.workers)

    def rank_metrics() -> dict[str, float]:
        rows = [plane.row() for plane in planes.values()]
        return slowest.row() | {name: sum(row[name] for row in rows) for name in rows[0]}

    return Roles(
        learners=learners,
        frozen=others,
        reward_models=reward_models,
        engine=EngineGroup(group),
        weights=WeightGroup(group),
        together=together,
        gpus=group.gpus,
        rank_metrics=rank_metrics,
        record_kernels=partial(record_kernels, groups.values()),
    )
