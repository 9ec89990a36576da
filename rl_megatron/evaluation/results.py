"""The file of an evaluation's results, and the paired comparison of two: problem by problem, over the same problems.

Besides the model, figures of a set depend on how its samples were judged, and on how they were drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rl_megatron.config.resume import flat, is_free
from rl_megatron.config.sections.reward import RANKS, EnvironmentSection, RewardSection, SandboxSection
from rl_megatron.data.problems.mixture import digest_of_prompts
from rl_megatron.digests import digest_bytes
from rl_megatron.errors import DataError
from rl_megatron.evaluation.figures import difference_interval, pass_at_k
from rl_megatron.evaluation.sets import EvalSet, EvalSetSamples
from rl_megatron.files import write_atomically
from rl_megatron.observability.intervals import Interval
from rl_megatron.section import Section

_DRAWN = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
_JUDGES: Mapping[str, type[Section]] = {"reward": RewardSection, "environment": EnvironmentSection}
_OF_PROGRAMS = ("type", "seconds", "memory_mb")


def differing_reward_keys(*two: tuple[Mapping[str, Any], Mapping[str, Any]]) -> list[str]:
    """Returns the keys by which samples of a set were judged otherwise, each with both values. ``two``: each side's
    configuration and the set's keys."""
    first, second = (_judging(config, section) for config, section in two)
    one, other = (_named(config, keys) for (config, _), keys in zip(two, (first, second), strict=True))
    both = one.keys() & other.keys()  # a name of one alone is a difference already
    return [
        *differing_keys(first, second),
        *differing_keys(*({key: value for key, value in each.items() if key in both} for each in (one, other))),
    ]


def judging_keys(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by which samples of a set with these keys were judged, and those of what keys name."""
    found = _judging(config, section)
    return {**found, **_named(config, found)}


def _judging(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by which samples of a set with these keys were right; defaults where older files have none."""
    of_run = section.get("data", {}).get("type", "run") == "run"
    sources = config.get("data", {}).get("sources", {}) if of_run else {}
    found = {"eval.success_reward": config.get("eval", {}).get("success_reward", 1.0)}
    for name, kind in _JUDGES.items():
        own, usual = section.get(name), config.get(name) or {}
        given = {name: own or usual}
        if own is None:
            given |= {f"data.sources.{source}.{name}": one.get(name) or usual for source, one in sources.items()}
        for key, values in given.items():
            found |= {leaf: value for leaf, value in flat(_whole(kind, values), f"{key}.") if _judges(leaf)}
    return found


def _named(config: Mapping[str, Any], judges: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of other sections that ``judges`` go by, by key: those of the models that they name, and the
    sandbox's for tests and environments."""
    found = dict[str, Any]()
    for key, value in judges.items():
        *_, above, last = key.split(".")
        name = str(above if value is None else value)  # a part without a function has that of its name
        if name.startswith(RANKS):
            model = name.removeprefix(RANKS)
            found[f"reward_models.{model}.path"] = config.get("reward_models", {}).get(model, {}).get("path")
        elif last == "function" and (name == "tests" or (above == "environment" and value is not None)):
            limits = _whole(SandboxSection, config.get("sandbox") or {})
            found |= {f"sandbox.{limit}": limits.get(limit) for limit in _OF_PROGRAMS}
    return found


def drawing_keys(config: Mapping[str, Any], section: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Returns the values by which samples of a set with these keys were drawn, by key."""
    rollout = config.get("rollout", {})
    found = {key: section[key] for key in _DRAWN if key in section}
    if found.get("max_new_tokens", 0) is None:
        found["max_new_tokens"] = rollout.get("max_new_tokens")
    return {
        "rollout.engine": engine,
        "learner.dtype": config.get("learner", {}).get("dtype"),
        **found,
        "rollout.ignore_eos": rollout.get("ignore_eos", False),
        "rollout.stop": list(rollout.get("stop", ())),
        "rollout.server.quantization": rollout.get("server", {}).get("quantization", "none"),
    }


def differing_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Yields a text for each key whose values differ, with both."""
    for key in dict.fromkeys([*first, *second]):
        if (one := first.get(key)) != (other := second.get(key)):
            yield f"{key} ({one} and {other})"


def _judges(key: str) -> bool:
    return not is_free(key) and not key.endswith(".on_error")  # a failed sample is wrong in any case


def _whole(kind: type[Section], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the section with defaults of keys that an older version did not have; as it is if it had others."""
    try:
        return kind.model_validate(given).model_dump(mode="json")
    except ValidationError:
        return given


WHOLE = "held_out"
"""The name of the run's own held-out data, where ``eval.sets`` has no set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """The measurements of one set. ``digest`` is of its problems: their ids, tokens and answers; ``questions`` of their
    ids, questions and answers, as the data has them; ``rows`` of all their fields, which rewards and environments may
    read."""

    digest: str
    questions: str
    rows: str
    section: Mapping[str, Any]  # the set's keys
    measured: EvalSetSamples
    figures: Mapping[str, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything of an evaluation. ``weights`` is the digest of all tensors' checksums, in learner.dtype."""

    model: str
    weights: str
    engine: str
    config: Mapping[str, Any]
    sets: Mapping[str, SetResult]

    def write(self, path: Path, *, private: bool) -> None:
        """Writes the file, atomically; other users cannot read a ``private`` one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self), indent=1).encode() + b"\n", private=private)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedFigure:
    """A figure of two evaluations: their values, and the mean difference over problems, second minus first."""

    set: str
    figure: str
    first: float
    second: float
    difference: Interval


_RESULTS = TypeAdapter(Results)


def make_result(problems: EvalSet, measured: EvalSetSamples) -> SetResult:
    """Returns the result of a set."""
    return SetResult(
        digest=_problems_digest(problems),
        questions=_digest([(one.id, one.question, one.answer) for one in problems.prompts]),
        rows=digest_of_prompts(problems.prompts),
        section=_section(problems),
        measured=measured,
        figures=measured.metrics(problems.section.pass_at),
    )


def unfinished(path: Path) -> Path:
    """Returns the file of an evaluation that has not measured all of its sets yet; its results will be at ``path``."""
    return path.with_name(f".{path.name}.unfinished")


def finished_sets(path: Path, earlier: Results, sets: Sequence[EvalSet]) -> dict[str, SetResult]:
    """Returns the sets in `unfinished` of ``path`` that need not be measured again, by name, of those in ``sets``. They
    have the weights of ``earlier``, the same problems and keys, and samples that are drawn and judged alike. A set with
    a sample without a reward is left out: its judge may be there now.

    Raises DataError for a file that cannot be read.
    """
    if not (file := unfinished(path)).is_file():
        return {}
    found = read_results(file)
    if found.weights != earlier.weights:
        return {}
    wanted = {
        one.name or WHOLE: _dependency_digest(
            earlier, _section(one), _problems_digest(one), digest_of_prompts(one.prompts)
        )
        for one in sets
    }
    return {
        name: one
        for name, one in found.sets.items()
        if not one.measured.errors and _dependency_digest(found, one.section, one.digest, one.rows) == wanted.get(name)
    }


def _dependency_digest(results: Results, section: Mapping[str, Any], *problems: str) -> str:
    """Returns a digest of all that a set's samples depend on except the weights; ``problems``: digests of these."""
    config = results.config
    shown = config["model"]["template_variables"]  # environments get it, and no digest has their messages
    return _digest([(*problems, section, config["seed"], shown, *_ways(config, section, results.engine))])


def eval_digest(config: Mapping[str, Any], problems: EvalSet) -> str:
    """Returns a digest of all that a set's accuracy depends on except the weights. These are its problems' tokens and
    fields, and how samples of a run with this ``config`` are drawn and judged."""
    has_more = any(one.meta for one in problems.prompts)
    fields = [digest_of_prompts(problems.prompts)] if has_more else []
    return _digest(
        [(_problems_digest(problems), *fields, *_ways(config, _section(problems), config["rollout"]["engine"]))]
    )


def _ways(config: Mapping[str, Any], section: Mapping[str, Any], engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values by which samples of a set with these keys are drawn, and those by which they are judged."""
    return drawing_keys(config, section, engine), judging_keys(config, section)


def _problems_digest(problems: EvalSet) -> str:
    return _digest([(one.id, one.token_ids, one.answer) for one in problems.prompts])


def _section(problems: EvalSet) -> dict[str, Any]:
    return {**problems.section.model_dump(mode="json"), "temperature": problems.temperature}


def _digest(rows: Sequence[tuple[object, ...]]) -> str:
    return digest_bytes(json.dumps(rows).encode()).xxh3_128


def read_results(path: Path) -> Results:
    """Returns the file's results. Raises DataError."""
    try:
        return _RESULTS.validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give a file that rl-megatron eval wrote") from error
    except ValidationError as error:
        said = error.errors()[0]
        place = ".".join(map(str, said["loc"]))
        raise DataError(f"{path}: {place}: {said['msg']}; give a file that rl-megatron eval wrote") from error


def paired_figures(first: Results, second: Results) -> list[PairedFigure]:
    """Returns each figure that both have, of each set that both have. Raises DataError for one name of different
    problems, for problems with other fields, for samples that were judged otherwise, and if they share no set."""
    shared = _shared(first, second)
    if not shared:
        raise DataError(f"the two share no set: {', '.join(first.sets)} and {', '.join(second.sets)}")
    for name in shared:
        if unlike := differing_reward_keys(*((each.config, each.sets[name].section) for each in (first, second))):
            raise DataError(
                f"set {name}: the two evaluations have other rewards, by {', '.join(unlike)}, so their scores cannot "
                "be compared; evaluate both with the same keys"
            )
    return [row for name in shared for row in _compare_set(name, first.sets[name], second.sets[name])]


def differing_sampling_keys(first: Results, second: Results) -> dict[str, list[str]]:
    """Returns the keys, with both values, by which samples were drawn otherwise, by the name of each such set."""
    found = dict[str, list[str]]()
    for name in _shared(first, second):
        ways = (drawing_keys(each.config, each.sets[name].section, each.engine) for each in (first, second))
        if unlike := list(differing_keys(*ways)):
            found[name] = unlike
    return found


def _shared(first: Results, second: Results) -> list[str]:
    return [name for name in first.sets if name in second.sets]


def _compare_set(name: str, first: SetResult, second: SetResult) -> Iterator[PairedFigure]:
    if first.digest != second.digest and first.questions != second.questions:
        raise DataError(
            f"set {name}: the two have different problems ({len(first.measured.problems)} and "
            f"{len(second.measured.problems)}), so nothing can be compared problem by problem; evaluate both on one"
        )
    if first.rows != second.rows:
        raise DataError(
            f"set {name}: the two have the same questions and answers, and other fields of their rows differ, as test "
            "cases, by which rewards and environments may judge; evaluate both on one"
        )
    samples = min(first.measured.samples, second.measured.samples)
    for figure, (a, b, draws) in _figures(first, second, samples).items():
        yield PairedFigure(
            set=name,
            figure=figure,
            first=sum(a) / len(a),
            second=sum(b) / len(b),
            difference=difference_interval(a, b, samples=draws),
        )


def num_draws(samples: int, k: int) -> int:
    """Returns the number of draws that a problem's pass@k is taken for: the steps from 0 to 1 that its value has.

    It is 1 from ``samples`` - k + 1 right samples on; so it is a mean's value with k = 1, and a single sample's with
    k = ``samples``. docs/evaluation.md has how such intervals hold.
    """
    return samples - k + 1


def _figures(
    first: SetResult, second: SetResult, samples: int
) -> dict[str, tuple[Sequence[float], Sequence[float], int]]:
    """Returns both sides' values by problem, by name, and the draws that `difference_interval` takes each value for."""

    def shares(one: EvalSetSamples, k: int) -> list[float]:
        return [pass_at_k(right, one.samples, k) for right in one.right]

    a, b = first.measured, second.measured
    out: dict[str, tuple[Sequence[float], Sequence[float], int]] = {"mean": (shares(a, 1), shares(b, 1), samples)}
    both = set(first.section["pass_at"]) & set(second.section["pass_at"]) - {1}
    for k in sorted(both):
        out[f"pass@{k}"] = shares(a, k), shares(b, k), num_draws(samples, k)
    if a.votes is not None and b.votes is not None and a.samples == b.samples:
        out[f"maj@{samples}"] = a.votes, b.votes, 1
    return out
