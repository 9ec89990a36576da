"""Loads objects of the user's own packages, by ``package.module:name``. Importing one runs its code."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_megatron.errors import ConfigError, RLMegatronError

_MOST_SAID = 500  # characters of a foreign exception


def add_import_folder(folder: Path) -> None:
    """Makes the user's modules in ``folder`` importable, after all others: our programs start with ``-P``, so without
    the current folder as the first."""
    sys.path.append(str(folder))


def load_named(path: str, key: str, what: str, fits: Callable[[object], bool]) -> Any:
    """Loads the object at ``path``, a ``what`` that passes ``fits``.

    Raises ConfigError that begins with ``key`` and names the missing object, a similar name, or the import's error.
    """
    given = f"{key}={path!r:.200}"
    module_name, _, name = path.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        meant = f"{Path(module_name).stem}:{name}"
        raise ConfigError(f"{given}: write {meant}; the folder of the file must be this one, or on PYTHONPATH")
    if not module_name or not name.isidentifier():
        raise ConfigError(f"{given}: write it as package.module:{what}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{given}: importing {module_name} failed: {error!s:.500}") from error
        raise ConfigError(f"{given}: no module {error.name!r}; install it or put its folder on PYTHONPATH") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything, and exit
        raise ConfigError(f"{given}: importing {module_name} {describe_error(error)}") from error
    found = getattr(module, name, None)
    if not fits(found):
        wrong = f"is not a {what}" if hasattr(module, name) else "is not there"
        near = difflib.get_close_matches(name, [n for n, value in vars(module).items() if fits(value)], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{given}: {name!r} of {module_name} {wrong}{hint}")
    return found


def describe_error(error: BaseException) -> str:
    """Returns ``raised <type>: <text>``, bounded; for an error meant for the user, only its text."""
    if isinstance(error, RLMegatronError):
        return str(error)
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  the user's class
        text = "(an exception whose text cannot be had)"
    text = text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}..."
    return f"raised {type(error).__name__:.80}: {text}"
