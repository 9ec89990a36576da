"""Checks that the packages of the user's own layers, objective, advantages and pair loss exist, without importing them:
that may take seconds, or need a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator

from launcher.preflight.subject import Found, Subject, problem, unchecked
from rl_megatron.config.reads.choices import READS


def check(subject: Subject) -> Iterator[Found]:
    """Yields a problem if ranks could not find a package, as far as that shows without an import."""
    config = subject.config
    named = {"learner.layers": config.learner.own_layers, "dpo.loss": _own(config.dpo.loss, ("dpo",))}
    for key in ("objective", "advantage_mean"):
        named[f"algorithm.{key}"] = _own(getattr(config.algorithm, key), READS[key])
    for key, own in named.items():
        if own is None:
            continue
        package = own.partition(":")[0].partition(".")[0]
        if subject.other_python is None and not _is_there(package):
            yield problem(f"{key}={own}: no module {package!r}; install it or put its folder on PYTHONPATH")
        else:
            yield unchecked(f"{key}={own}, which ranks import")


def _own(name: str, known: Collection[str]) -> str | None:
    return None if name in known else name


def _is_there(package: str) -> bool:
    """Whether ranks would find it; ``__main__`` is another module in ranks."""
    return package != "__main__" and importlib.util.find_spec(package) is not None
