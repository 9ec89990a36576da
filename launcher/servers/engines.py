"""The table of engines that are servers, the adapter of the configured one, and what its servers lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rl_megatron.config.run import RunConfig
from rl_megatron.engines.adapter import Adapter, normalize_options, refused_variables
from rl_megatron.engines.local.adapter import EmbeddedAdapter
from rl_megatron.engines.sglang.adapter import SGLangAdapter
from rl_megatron.engines.vllm.adapter import VLLMAdapter
from rl_megatron.feature import features
from rl_megatron.models.shape import ModelShape
from rl_megatron.user_code import load_named
from rl_megatron.weights.push.trust import PROBE_LENGTH

SERVERS: Mapping[str, Callable[[ModelShape], Adapter]] = {"sglang": SGLangAdapter, "vllm": VLLMAdapter}
"""Engines of others, whose interpreters are theirs."""
KNOWN: Mapping[str, Callable[[ModelShape], Adapter]] = {"local": EmbeddedAdapter, **SERVERS}
"""Engines with adapters of this project."""


def load_adapter(engine: str, shape: ModelShape) -> Adapter:
    """Returns the adapter of ``rollout.engine``. Raises ConfigError if the user's own cannot be loaded."""
    make = KNOWN.get(engine) or load_named(engine, "rollout.engine", "class", callable)
    adapter: Adapter = make(shape)
    return adapter


def engine_problems(
    config: RunConfig, adapter: Adapter, shape: ModelShape, environment: Mapping[str, str]
) -> list[str]:
    """Returns a line for each key that servers of the adapter's engine cannot follow for the model, and for each
    variable that they cannot have. The run starts them in ``environment``."""
    server, device = config.rollout.server, config.learner.device
    extra = normalize_options(server.options or "")
    out = [adapter.options_problem(extra), adapter.batch_problem(extra) if server.batch_invariant else ""]
    out += [] if server.addresses else refused_variables(environment, adapter.variables)
    sides = {one.name: one for one in adapter.hooks}
    for name, feature in features().items():
        if (serving := feature.serving) is None or not (given := serving.given(config)):
            continue
        lacks = serving.lacks and f"the adapter of {adapter.name} {serving.lacks}"
        if why := sides[name].problem(given, device, server.dp) if name in sides else lacks:
            out.append(f"{serving.named(given)}: {why}")
    if (limits := config.rollout.limits) and not (adapter.renormalizes_top_p or config.limits_are_shared):
        out.append(
            f"{limits}: {adapter.name} computes log-probs before it leaves tokens out, so importance ratios would be "
            "wrong; set rollout.top_p=1 and rollout.top_k=0"
        )
    least, most = adapter.temperatures
    temperatures = {"rollout.temperature": config.rollout.temperature, **config.eval.temperatures}
    for key, given in temperatures.items():
        if given and not least <= given <= most:
            out.append(
                f"{key}={given:g}: {adapter.name} {adapter.tested_version} samples at {least:g} to {most:g}, and "
                "greedily at 0"
                "; set that"
            )
    return [line for line in out if line]


def longest_sequence(config: RunConfig, shape: ModelShape) -> int:
    """Returns the number of tokens of the longest prompt and completion, including a probe's."""
    longest = max(config.rollout.max_prompt_tokens + config.longest_completion, PROBE_LENGTH)
    return min(longest, shape.max_positions)
