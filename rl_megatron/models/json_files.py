"""Reads the JSON files of a model's folder, bounded in size, and names each key of a wrong type. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import override

from rl_megatron.errors import CheckpointError, ConfigError, RLMegatronError, quote_start
from rl_megatron.files import parse

MAX_BYTES = 256 << 20  # the index of a trillion parameters in 200,000 tensors has 20 MB
_MAX_LINES = 10


class JsonFields(BaseModel):
    """Base class for the types of a file's keys. Other keys are allowed and not read."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


F = TypeVar("F", bound=BaseModel)


def read_json(path: Path, kind: type[F], error: type[RLMegatronError] = ConfigError) -> F:
    """Returns the file's content. Raises ``error`` if the file is missing, truncated or of other types."""
    data = _bytes_of(path, error)
    if not data:
        raise error(f"{path} is empty; fetch it again")
    try:
        return kind.model_validate_json(data, strict=True)
    except ValidationError as wrong:
        raise error("\n".join(_lines(path, wrong))) from wrong


class _Index(JsonFields):
    weight_map: dict[str, str]


def tensor_names(folder: Path) -> Collection[str]:
    """Returns the names in the folder's safetensors index, or in the header of its only such file; none without either,
    as for plans. Raises CheckpointError if it is torn."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return read_json(index, _Index, CheckpointError).weight_map
    if not single.is_file():
        return ()
    with single.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            names = parse(file.read(min(size, MAX_BYTES)))
        except ValueError as error:
            raise CheckpointError(f"{single}: its header is torn; fetch it again") from error
    return names if isinstance(names, dict) else ()


class Fields(dict[str, Any]):
    """Values of a file by key. Reading a key checks its value against the type that ``kind`` has for the key.

    Both ``get`` and ``[]`` raise ConfigError for a value of another type, ``[]`` also for a missing or null key.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, kind: type[JsonFields], above: str = "") -> None:
        super().__init__(values)
        self._path, self._kind, self._above = path, kind, above

    @override
    def get(self, key: str, default: Any = None) -> Any:
        if key not in self or key not in self._kind.model_fields:
            return super().get(key, default)
        try:
            return getattr(self._kind.model_validate({key: super().get(key)}, strict=True), key)
        except ValidationError as wrong:
            raise ConfigError("\n".join(_lines(self._path, wrong, self._above))) from wrong

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self._path}: no {self._above}{key}; fetch the file again")
        return value


def _bytes_of(path: Path, error: type[RLMegatronError]) -> bytes:
    try:
        if not path.is_file():
            raise error(f"{path}: no such file; give a Hugging Face checkpoint folder")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as failed:
        raise error(f"{path} cannot be read: {failed.strerror or failed}") from failed
    if len(data) > MAX_BYTES:
        raise error(f"{path} has more than {MAX_BYTES} bytes, which no such file of a model has; fetch it again")
    return data


def _lines(path: Path, wrong: ValidationError, above: str = "") -> list[str]:
    found = wrong.errors(include_url=False)
    if found[0]["type"] == "json_invalid":
        return [f"{path} is torn or no JSON ({found[0]['msg'][:200]}); fetch it again"]
    lines = [
        f"{path}: {above}{quote_start('.'.join(map(str, one['loc'])))[1:-1]}={quote_start(one['input'])}: "
        f"{one['msg'][:200]}"
        for one in found[:_MAX_LINES]
    ]
    return lines + ([f"and {len(found) - _MAX_LINES} more"] if len(found) > _MAX_LINES else [])
