"""The keys that a resume may change; checkpoints and docs/cluster.md use this table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rl_megatron import feature
from rl_megatron.config.run import RunConfig

FREE: Mapping[str, bool] = {
    "job": False,
    "seed": False,
    "run": True,
    "model": False,
    "model.cache_dir": True,
    "data": False,
    "data.on_leak": True,
    "data.sources.<name>.weight": True,
    "data.sources.<name>.reward.timeout_seconds": True,
    "data.sources.<name>.reward.http": True,
    **{f"data.sources.<name>.environment.{key}": True for key in ("concurrency", "seconds", "step_seconds")},
    "reward": False,
    "reward.timeout_seconds": True,
    "reward.http": True,
    "environment": False,
    "environment.concurrency": True,
    "environment.seconds": True,
    "environment.step_seconds": True,
    "sandbox": True,
    "reward_models": False,
    "algorithm": False,
    **{f"algorithm.kl.teachers.<name>.{key}": True for key in ("server", "engine", "token_file", "timeout_seconds")},
    "rollout": False,
    "rollout.python": True,
    "rollout.slots": True,
    "rollout.completion_timeout_seconds": True,
    "rollout.max_in_flight": True,
    "rollout.server": True,
    "rollout.server.options": False,  # may be of numbers
    "rollout.server.quantization": False,
    "learner": True,
    "learner.model": False,
    "learner.dtype": False,
    "learner.head_dtype": False,
    "learner.fp8": False,
    **feature.resume_keys(),
    "learner.router.frozen": False,  # a frozen router has no state in the optimizer
    "learner.optimizer.name": False,  # Muon's matrices have one moment, AdamW's two
    "roles": True,
    "weights": True,
    "warm_start": False,
    "sft": False,
    "dpo": False,
    "reward_model": False,
    "train": True,
    "eval": True,
    "eval.success_reward": False,  # the NLL of right completions, pass rates of prompts and {right_completion} go by it
    "checkpoint": True,
    "log": True,
    "profile": True,
    "slurm": True,
}
"""For each key or section, whether a resume may change it; the longest entry that matches decides.

Free are the layout, keys that change no number, time limits, and how later steps are sampled, logged and saved.
"""

FREE_BEFORE = ("eval.success_reward",)
"""Fixed keys that earlier releases left free: their checkpoints do not hold these keys, and resume with any value."""


def is_free(key: str) -> bool:
    """True if a resume may change ``section.key``."""
    parts = key.split(".")
    if parts[:2] == ["data", "sources"]:
        parts[2:3] = ["<name>"]
    if parts[:3] == ["algorithm", "kl", "teachers"]:
        parts[3:4] = ["<name>"]
    return _longest(FREE, parts)


def _longest(table: Mapping[str, bool], parts: Sequence[str]) -> bool:
    """The value of the longest entry that a key's ``parts`` begin with; False if there is none."""
    above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((table[name] for name in above if name in table), False)


def changes_rows_only(key: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if the values of a fixed ``key`` differ only in what is done with longer or refused rows. A run that fails
    at such a row has trained on none of them."""
    section, _, name = key.rpartition(".")
    written = section in ("sft", "dpo", "reward_model")
    if name == ("max_tokens" if written else "max_prompt_tokens"):  # limits of the policy's or a teacher's prompts
        longer = None not in (then[key], now[key]) and now[key] > then[key]
        return longer and then.get(f"{section}.on_long" if written else "rollout.on_long_prompt") == "fail"
    return (key == "rollout.on_long_prompt" or (written and name in ("on_long", "on_refused"))) and then[key] == "fail"


def fixed(config: RunConfig) -> dict[str, Any]:
    """The values of all keys that a resume must not change, as JSON values."""
    return {key: value for key, value in flat(config.model_dump(mode="json")) if not is_free(key)}


def defaults(config: RunConfig) -> dict[str, Any]:
    """The defaults of all keys of ``config``'s sections that have one, as JSON values."""
    return dict(flat(_defaults(config)))


def _defaults(section: BaseModel) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            found[key] = _defaults(value)
        elif isinstance(value, Mapping) and value and all(isinstance(one, BaseModel) for one in value.values()):
            found[key] = {name: _defaults(one) for name, one in value.items()}
        elif not field.is_required():
            found[key] = to_jsonable_python(field.get_default(call_default_factory=True))
    return found


def table() -> str:
    """The table of docs/cluster.md, in Markdown, without keys that repeat the row of their section."""
    above = {key: _longest(FREE, key.split(".")[:-1]) if "." in key else None for key in FREE}
    rows = "".join(f"| `{key}` | {'yes' if free else 'no'} |\n" for key, free in FREE.items() if free != above[key])
    return f"| section or key | may change |\n|---|---|\n{rows}"


def flat(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of nested sections with its dotted key; an empty section is a value."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
