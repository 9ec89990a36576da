"""The base class of the configuration's sections, and the ranges of single values."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_INTEGER = 2**63 - 1
_OWN_CODE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _no_boolean(given: object) -> object:
    """Pydantic takes true for 1."""
    if isinstance(given, bool):
        raise PydanticCustomError("number", "Input should be a number, not true or false")
    return given


NUMBER = BeforeValidator(_no_boolean)
"""Refuses true and false in place of a number."""
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER), NUMBER]
NonNegative = Annotated[int, Field(ge=0, le=MAX_INTEGER), NUMBER]
Finite = Annotated[float, Field(allow_inf_nan=False), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NUMBER]
PositiveFraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), NUMBER]
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Divided by less, logits may leave float32; SGLang samples greedily then. Divided by more, they are equal."""
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, allow_inf_nan=False), NUMBER]


def _greedy_or_not(given: float) -> float:
    if 0 < given < MIN_TEMPERATURE:
        raise PydanticCustomError("number", "Input should be 0 or {least} and more", {"least": f"{MIN_TEMPERATURE:g}"})
    return given


GreedyOrTemperature = Annotated[
    float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False), AfterValidator(_greedy_or_not), NUMBER
]
"""A temperature, or 0: greedy."""

EntryName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""The user's name of an entry of a mapping, such as one of ``data.sources``."""


def _listed(given: object) -> object:
    if isinstance(given, str):
        return [one.strip(" '\"") for one in given.strip("[] ").split(",") if one.strip()]
    return (given,) if isinstance(given, int) else given


LISTED = BeforeValidator(_listed)
"""Makes a key of several values accept a command line's text, such as ``1,8`` or ``[1,8]``, or one number."""

SORTED = AfterValidator(lambda given: tuple(sorted(set(given))))
"""Makes a key of several names keep each once, in order."""


def _check_user_code(text: str) -> str:
    if not _OWN_CODE.fullmatch(text):
        raise PydanticCustomError("own_code", "Input should be package.module:name of your own code")
    return text


OwnCode = Annotated[str, AfterValidator(_check_user_code)]
"""Names an object of the user's own packages, as `rl_megatron.user_code.load_named` finds it."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change after loading."""

    instead: ClassVar[str] = ""
    """The advice to a user who sets, in one of several alternative sections, a key of another of them."""
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
