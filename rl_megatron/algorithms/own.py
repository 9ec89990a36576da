"""Tries a custom objective, advantages and pair loss (``package.module:name``) on trial inputs before a run.

Letters as in objectives.py: T positions, S sequences.
"""

from __future__ import annotations

import inspect
import logging
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.algorithms.advantages import LEVELS, ROUNDING, group_advantages
from rl_megatron.algorithms.auxiliary import PAIR_LOSSES, losses_with_gradients, resolve_pair_loss
from rl_megatron.algorithms.objectives import OBJECTIVES, RATIO_LEVELS, Objective, masked, resolve_objective
from rl_megatron.algorithms.segments import segment_sum
from rl_megatron.config.reads import problems_of_own_objective
from rl_megatron.config.sections.algorithm import AlgorithmSection, PreferenceSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.errors import ConfigError
from rl_megatron.types import LossInputs
from rl_megatron.user_code import describe_error

logger = logging.getLogger(__name__)

_LENGTHS = (4, 3, 1, 5)  # tokens of each trial sequence; the third has no trained token
_ADVANTAGES = (0.8, -1.1, 0.6, 0.0)
_SPREADS = (0.0, 0.1, 2.0)  # spreads of log-ratios: in the first optimizer step all are 0
_REWARDS = ((0.0, 1.0, 0.0, 0.0), (1.0, 1.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))
_OTHER_REWARDS = ((-1.5, 0.25, 2.0, -0.5), (-0.5,) * 4, (0.5,) * 4)
_NUMBERS_OF_TURNS = (1, 3)
_RATIOS = ((0.0, 0.0), (0.5, -1.0), (-30.0, 4.0), (2.0, 40.0))  # log pi/ref of the better and the worse answer, nats
_LOGPROBS = ((-1.0, -1.0), (-0.5, -2.0), (-30.0, -0.1), (-2.0, -40.0))  # their log pi
_COLUMNS = ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "mask")


def check_custom_objective(row: AlgorithmSection, *, cp: int = 1) -> None:
    """Calls a custom objective on some trial micro-batches; one of the table is left alone.

    Raises ConfigError if it cannot be imported or called, or returns another shape or dtype, a loss or a gradient that
    is not finite, or no gradient. Raises it too if a token's loss depends on another sequence, as packing would
    change it. With ``cp`` above 1 the part that a rank has must not change it. A set key that is not read raises too.
    """
    if row.objective in OBJECTIVES:
        return
    trial = _CustomCheck(f"algorithm.objective={row.objective}", resolve_objective(row.objective), row, _Watched(row))
    trial.check_signature()
    moves = False
    if trial.lowers_better(next(_make_micro_batches(row))):
        logger.warning(
            "%s lowers the log-probs of all tokens with a positive advantage; is the sign of the loss wrong?",
            trial.given,
        )
    for inputs in _make_micro_batches(row):
        moves |= trial.has_gradient(inputs)
        trial.check_independence(inputs)
        if cp > 1:
            trial.check_parts(inputs, cp)
        if not torch.equal(trial.losses(inputs), trial.losses(inputs, shift=0.3)):
            trial.watched.read.add("ratio_level")
    if not moves:
        raise ConfigError(
            f"{trial.given}: its losses have no gradient; inputs.logprobs has one, and so has log_ratio unless "
            "algorithm.ratio_level is sequence_sum"
        )
    if problems := problems_of_own_objective(row, trial.watched.read):
        raise ConfigError("\n".join(problems))


def check_custom_advantages(row: AlgorithmSection, rollout: RolloutSection) -> None:
    """Calls a custom function of a group's rewards on some groups of the run's size; of one group's turns, on four.

    Raises ConfigError as `custom_group_advantages` where the rewards are 0 and 1, and if the advantages of all groups
    are 0, also for other rewards. Warns of faults for other rewards and numbers of turns, which a run may not have.
    """
    if row.advantage_mean in {*LEVELS, "greedy", "moving", "tracked"}:
        return
    of_turns = row.credit == "turn" and row.turn_baseline != "index"
    size = len(_REWARDS[0]) if of_turns else rollout.group_size
    groups = [_group(rewards, size) for rewards in _REWARDS]
    found, given = [_advantages(row, group) for group in groups], f"algorithm.advantage_mean={row.advantage_mean}"
    moved = [bool(one.abs().gt(ROUNDING).any()) for one in found]
    moves = any([*moved, *(_moved_or_warned(row, _group(rewards, size)) for rewards in _OTHER_REWARDS)])
    if not moves and not row.taught_by_equal:
        told = [group.tolist() for group in groups]
        raise ConfigError(
            f"{given}: all advantages are 0 in groups of {'' if of_turns else 'rollout.group_size='}{size}, of rewards "
            f"{told!s:.200} and others, so nothing is trained; return others, or set another rollout.group_size"
        )
    for other in _NUMBERS_OF_TURNS if row.credit == "turn" else ():
        _moved_or_warned(row, _group(_REWARDS[0], other))


def _group(rewards: Sequence[float], size: int) -> Tensor:
    return torch.tensor(rewards)[torch.arange(size) % len(rewards)]


def _advantages(row: AlgorithmSection, group: Tensor) -> Tensor:
    ids = torch.zeros(len(group), dtype=torch.int64)
    lengths = _group(_LENGTHS, len(group))
    return group_advantages(group, ids, mean=row.advantage_mean, std="none", leave_one_out=False, lengths=lengths)


def _moved_or_warned(row: AlgorithmSection, group: Tensor) -> bool:
    """True if the group has an advantage. Logs a warning if the function fails on it."""
    try:
        return bool(_advantages(row, group).abs().gt(ROUNDING).any())
    except ConfigError as error:
        logger.warning("%s; a run with such rewards would end there", error)
        return False


def check_custom_pair_loss(section: PreferenceSection) -> None:
    """Calls a custom pair loss on some pairs; one of the table, and where none is trained on, is left alone.

    Raises ConfigError if it cannot be imported or called, returns anything but one finite loss a pair, or has no finite
    gradient. Raises it too if a pair's loss depends on other pairs, as it would then change with the packing.
    """
    if section.loss in PAIR_LOSSES or section.beta is None:
        return
    given, loss = f"{section.key}.loss={section.loss}", resolve_pair_loss(section.loss, section.key)
    told, pi = (_LOGPROBS, "pi") if section.reference_free else (_RATIOS, "pi/ref")
    pairs, beta = torch.tensor(told), section.beta
    try:
        losses, slopes = losses_with_gradients(loss, pairs[:, 0], pairs[:, 1], beta)
        alone = [losses_with_gradients(loss, pair[:1], pair[1:], beta)[0] for pair in pairs]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{given}, tried before the run, {describe_error(error)}; it must take (better, worse, beta), the log "
            f"{pi} of answers [pairs], and return each pair's loss as a tensor with a gradient"
        ) from error
    if losses.shape != (len(pairs),) or not losses.isfinite().all() or not slopes.isfinite().all():
        raise ConfigError(
            f"{given} must return one finite loss for each of {len(pairs)} pairs, with finite derivatives; it returned "
            f"{losses.tolist()} and {slopes.tolist()} for log {pi} of {pairs.tolist()}"
        )
    if not slopes.any():
        raise ConfigError(f"{given}: its losses have no gradient")
    if not torch.allclose(torch.cat(alone), losses, rtol=1e-4, atol=1e-5):
        raise ConfigError(
            f"{given}: losses are {torch.cat(alone).tolist()} of pairs alone and {losses.tolist()} of pairs next to "
            "others, so they would change with the packing; compute each pair's from its own two numbers"
        )


class _Watched:
    """The row, which remembers the keys that were read."""

    def __init__(self, row: AlgorithmSection) -> None:
        self._row, self.read = row, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return _WatchedParameters(self) if name == "parameters" else getattr(self._row, name)


class _WatchedParameters(UserDict[str, float]):
    """The row's ``parameters``, which remembers the names that were read."""

    def __init__(self, row: _Watched) -> None:
        super().__init__((str(name), value) for name, value in row._row.parameters.items())
        self._read = row.read

    @override
    def __getitem__(self, name: str) -> float:
        self._read.add(f"parameters.{name}")
        return self.data[name]


@dataclass(frozen=True, slots=True)
class _CustomCheck:
    """Calls of the user's function, whose faults are the user's to read."""

    given: str
    objective: Objective
    row: AlgorithmSection
    watched: _Watched

    def check_signature(self) -> None:
        try:
            inspect.signature(self.objective).bind(None, None, None, None)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.given} must take (log_ratio, inputs, lengths, row): {error}") from error

    def losses(self, inputs: LossInputs, shift: float = 0.0) -> Tensor:
        """Returns each token's loss [T], as the run calls it; ``shift`` is added to the log-ratio."""
        inputs = masked(inputs)
        lengths = inputs.segment_sum(inputs.mask.to(inputs.logprobs.dtype))
        log_ratio = RATIO_LEVELS[self.row.ratio_level](inputs, lengths) + shift
        try:
            answer: Any = self.objective(log_ratio, inputs, lengths, cast(AlgorithmSection, self.watched))
        except Exception as error:
            raise ConfigError(f"{self.given}, tried before the run, {describe_error(error)}") from error
        wanted = [(inputs.mask.shape, torch.float32), (inputs.mask.shape, torch.bool)]
        parts = list(answer) if isinstance(answer, tuple | list) else [answer]
        found = [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in parts]
        if found != wanted:
            raise ConfigError(
                f"{self.given} must return each token's loss and whether a limit changed it, {wanted} for "
                f"{len(inputs.mask)} positions; it returned {found}"
            )
        losses: Tensor = parts[0]
        return losses

    def has_gradient(self, inputs: LossInputs) -> bool:
        """True if a log-prob moves a loss. Raises ConfigError for losses and gradients that are not finite."""
        losses, gradient = self.losses(inputs), None
        if losses.requires_grad:
            (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs, allow_unused=True)
        for name, values in (("a loss", losses), ("a gradient", gradient)):
            if values is not None and not values.isfinite().all():
                at = int(values.isfinite().logical_not().nonzero()[0])
                seen, value = masked(inputs), values[at].item()
                log_ratio = (seen.logprobs - seen.old_logprobs)[at].item()
                outside = "" if inputs.mask[at] else ", outside the mask, where all inputs are 0"
                raise ConfigError(
                    f"{self.given} gives {name} of {value} at log-ratio {log_ratio:.3g} and advantage "
                    f"{seen.advantages[at].item():.3g}{outside}"
                )
        return gradient is not None and bool(gradient.any())

    def lowers_better(self, inputs: LossInputs) -> bool:
        """True if a step lowers the log-prob of every token that is trained on and has a positive advantage."""
        losses = self.losses(inputs)
        if not losses.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs, allow_unused=True)
        better = inputs.mask & (inputs.advantages > 0)
        return gradient is not None and bool((gradient[better] > 0).all())

    def check_independence(self, inputs: LossInputs) -> None:
        """Raises ConfigError if a sequence's losses are others where it is alone in its micro-batch."""
        together = self.losses(inputs)
        for s in range(len(_LENGTHS)):
            mine = inputs.segment_ids == s
            ids = torch.zeros(int(mine.sum()), dtype=torch.int64)
            alone = self.losses(replace(_part(inputs, mine), segment_ids=ids, **_sums(ids, 1, self.row)))
            if not torch.allclose(alone, together[mine], rtol=1e-4, atol=1e-5):
                raise ConfigError(
                    f"{self.given}: the loss of a token is {alone.tolist()} where its sequence is alone and "
                    f"{together[mine].tolist()} with others in the micro-batch, so it would change with the packing; "
                    "sum over a sequence by inputs.segment_sum, and over nothing that is wider"
                )

    def check_parts(self, inputs: LossInputs, cp: int) -> None:
        """Raises ConfigError if a token's loss, or a sum over a sequence, is another where two ranks have half of each.

        Each half gets the sums that the whole had, as an all-reduce gives them to every rank.
        """
        whole, halves = list[Tensor](), (list[Tensor](), list[Tensor]())

        def recorded(sums: Tensor) -> Tensor:
            whole.append(sums)
            return sums

        def watch_sums(sums: Tensor, half: list[Tensor]) -> Tensor:
            half.append(sums)
            if len(half) > len(whole):
                raise ValueError(
                    f"with learner.cp={cp} it asks for more sums on a part of a sequence than on all of it"
                )
            return whole[len(half) - 1]

        ids, num = inputs.segment_ids, len(_LENGTHS)
        together = self.losses(replace(inputs, **_sums(ids, num, self.row, recorded)))
        second = torch.cat([torch.arange(length) % 4 % 3 > 0 for length in _LENGTHS])
        apart = torch.empty_like(together)
        for half, mine in zip(halves, (~second, second), strict=True):
            sums = _sums(ids[mine], num, self.row, partial(watch_sums, half=half))
            apart[mine] = self.losses(replace(_part(inputs, mine), segment_ids=ids[mine], **sums))
        added = [a + b for a, b in zip(*halves, strict=False)]
        pairs = [(apart, together), *zip(added, whole, strict=False)]
        if len(added) < len(whole) or not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs):
            raise ConfigError(
                f"{self.given} with learner.cp={cp}: a token's loss, or a sum over its sequence, is another where a "
                f"rank has a part of the sequence: losses are {apart.tolist()} in parts and {together.tolist()} in "
                "whole; sum over a sequence by inputs.segment_sum, of each token's own values, or set learner.cp=1"
            )


def _part(inputs: LossInputs, mine: Tensor) -> LossInputs:
    """Returns the columns of the positions ``mine`` [T] alone."""
    return replace(inputs, **{name: x[mine] for name in _COLUMNS if (x := getattr(inputs, name)) is not None})


def _make_micro_batches(row: AlgorithmSection) -> Iterator[LossInputs]:
    """Yields micro-batches with the columns that a run of the row has."""
    ids = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    mask = (torch.arange(len(ids)) % 4 != 1) & (ids != 2)
    generator = torch.Generator().manual_seed(1)
    for spread in _SPREADS:
        noise = torch.randn(len(ids), generator=generator)
        logprobs = -2 * torch.rand(len(ids), generator=generator) - 0.1
        old = logprobs - spread * noise
        yield LossInputs(
            logprobs=logprobs.requires_grad_(),
            entropy=torch.rand(len(ids), generator=generator),
            old_logprobs=old,
            rollout_logprobs=old + 0.01 * noise,
            ref_logprobs=old - 0.3 * noise if row.needs_reference else None,
            advantages=torch.tensor(_ADVANTAGES)[ids],
            mask=mask,
            segment_ids=ids,
            **_sums(ids, len(_LENGTHS), row),
            num_tokens=int(mask.sum()),
            num_sequences=len(_LENGTHS),
        )


def _sums(
    ids: Tensor, num: int, row: AlgorithmSection, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
) -> dict[str, Any]:
    """``segment_sum`` and, where a run has it, ``turn_sum`` of sequences of one turn; both refuse a gradient."""

    def watch_sequences(values: Tensor) -> Tensor:
        if values.requires_grad:
            raise ValueError("a sum over a sequence is one over ranks and has no gradient; give it values.detach()")
        return over_ranks(segment_sum(values, ids, num))

    turns = {"turn_sum": lambda values: watch_sequences(values)[ids]} if row.ratio_level == "turn" else {}
    return {"segment_sum": watch_sequences, **turns}
