"""``learner.padding``: few sizes of micro-batches, so that kernels, memory and CUDA graphs see few shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from rl_megatron.options.fp8 import rows
from rl_megatron.options.option import Option
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape
    from rl_megatron.types import ParallelDims


_SIZES = re.compile(r"[1-9]\d{0,11}(,[1-9]\d{0,11})*")


def _checked(text: str) -> str:
    if not _SIZES.fullmatch(text):
        raise PydanticCustomError("sizes", "Input should be numbers of positions, as 4096,8192")
    return text


Sizes = Annotated[
    str, AfterValidator(_checked), BeforeValidator(lambda given: str(given) if type(given) is int else given)
]


class PaddingSection(Section):
    """Sizes to which micro-batches are padded. Padding counts nowhere: not in losses, metrics, or experts' balance."""

    tokens: Sizes | None = None
    """Sizes in positions of all cp ranks, as `4096,8192`, rising, the last of them `max_tokens_per_micro_batch`: a
    micro-batch is padded to the least that holds it, and its padding repeats its own tokens, so that experts get their
    usual shares. null: to the multiple that tp, cp and fp8 need."""
    sequences: Positive | None = None
    """The most sequences of a micro-batch; each then tells attention of as many, and one of padding. null: as many as
    fit. Needs `tokens`."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of ``tokens``; none if that is null."""
        return tuple(int(size) for size in self.tokens.split(",")) if self.tokens else ()


class PaddingKeys(Section):
    """The section of keys of `Padding`."""

    padding: PaddingSection = PaddingSection()


class Padding(Option):
    """Classes of micro-batches, which `data.packing` fills and `learner.packed` pads."""

    keys = PaddingKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Sizes that do not rise, do not end at the most tokens, or that tp, cp and fp8 would pad further."""
        section, most = learner.padding, learner.max_tokens_per_micro_batch
        given, sizes = f"learner.padding.tokens={section.tokens}", section.sizes
        if not sizes:
            if section.sequences is not None:
                yield (
                    f"learner.padding.sequences={section.sequences} without learner.padding.tokens: micro-batches "
                    "would still have any number of positions; set both, or leave it out"
                )
            return
        if any(one >= next_one for one, next_one in pairwise(sizes)):
            yield f"{given} do not rise; sort them, each once"
        if sizes[-1] != most:
            yield (
                f"{given} with learner.max_tokens_per_micro_batch={most}: the last size must be that, so that every "
                "micro-batch fits one; change one of the two"
            )
        if odd := [size for size in sizes if size % token_multiple(learner)]:
            yield (
                f"{given} with learner.tp={learner.tp}, learner.cp={learner.cp} and learner.fp8={learner.fp8}: "
                f"{odd[0]} is no multiple of {token_multiple(learner)}; round the sizes up to one"
            )


def sequence_multiple(dims: ParallelDims) -> int:
    """What divides the positions of a padded sequence: 2 * cp equal chunks, unless cp is 1."""
    return 2 * dims.cp if dims.cp > 1 else 1


def most_padded(tokens: int, dims: ParallelDims) -> int:
    """The positions that a micro-batch of at most ``tokens`` has at most with its padding for TP and CP."""
    return padded_tokens(tokens, sequence_multiple(dims) * dims.tp, ())


def token_multiple(learner: LearnerSection) -> int:
    """What divides the positions of a micro-batch of all cp ranks: zig-zag chunks over tp, and rows of float8."""
    return math.lcm(sequence_multiple(learner.dims) * learner.tp, rows(learner) * learner.tp * learner.cp)


def padded_tokens(tokens: int, multiple: int, sizes: Sequence[int]) -> int:
    """Positions of a micro-batch of ``tokens`` with its padding: the least of ``sizes`` that holds it, if one does, or
    the next multiple."""
    least = -(-tokens // multiple) * multiple
    return next((size for size in sizes if size >= least), least)
