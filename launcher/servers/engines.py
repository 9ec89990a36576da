"""The table of engines that are servers, the adapter of the configured one, and what its servers have room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rl_megatron.config.run import RunConfig
from rl_megatron.engines.adapter import Adapter, AdapterPlaces, refused_variables, words_of
from rl_megatron.engines.local.adapter import EmbeddedAdapter
from rl_megatron.engines.sglang.adapter import SGLangAdapter
from rl_megatron.engines.vllm.adapter import VLLMAdapter
from rl_megatron.feature import adapter_layouts, features
from rl_megatron.models.shape import ModelShape
from rl_megatron.user_code import load_named
from rl_megatron.weights.layouts.families import megatron_layout
from rl_megatron.weights.push.trust import PROBE_LENGTH

SERVERS: Mapping[str, Callable[[ModelShape], Adapter]] = {"sglang": SGLangAdapter, "vllm": VLLMAdapter}
"""Engines of others, whose interpreters are theirs."""
KNOWN: Mapping[str, Callable[[ModelShape], Adapter]] = {"local": EmbeddedAdapter, **SERVERS}
"""Engines whose adapters are the project's own."""


_SPARE = 2  # the version that is loaded, and one more than the sampling that waits for its step names


def adapter_of(engine: str, shape: ModelShape) -> Adapter:
    """The adapter of ``rollout.engine``. Raises ConfigError if the user's own cannot be loaded."""
    make = KNOWN.get(engine) or load_named(engine, "rollout.engine", "class", callable)
    adapter: Adapter = make(shape)
    return adapter


def engine_problems(
    config: RunConfig, adapter: Adapter, shape: ModelShape, environment: Mapping[str, str]
) -> list[str]:
    """A line for each key that servers of the adapter's engine cannot follow for the model, and for each variable of
    the ``environment`` in which the run starts them that they cannot have."""
    server, device = config.rollout.server, config.learner.device
    extra = words_of(server.options or "")
    out = [adapter.options_problem(extra), adapter.batch_problem(extra) if server.batch_invariant else ""]
    out += [] if server.addresses else refused_variables(environment, adapter.variables)
    places = adapter_places(config, shape)
    if places and places.ranks and (why := adapter.adapter_problem(places, device, server.dp)):
        out.append(f"weights.push=adapters: {why}; or set weights.push=merged")
    for feature in features().values():
        serving = feature.serving
        if serving is None or serving.lacks is None or feature.name in {one.name for one in adapter.hooks}:
            continue
        if given := serving.given(config):
            out.append(f"{serving.named(given)}: the adapter of {adapter.name} {serving.lacks}")
    if config.rollout.top_p < 1 and not adapter.renormalises_top_p:
        out.append(
            f"rollout.top_p={config.rollout.top_p:g}: {adapter.name} computes log-probs before top_p is applied, so "
            "importance ratios would be wrong; set rollout.top_p=1"
        )
    least, most = adapter.temperatures
    temperatures = {"rollout.temperature": config.rollout.temperature, **config.eval.temperatures}
    for key, given in temperatures.items():
        if given and not least <= given <= most:
            out.append(
                f"{key}={given:g}: {adapter.name} {adapter.tested} samples at {least:g} to {most:g}, and greedily at 0"
                "; set that"
            )
    return [line for line in out if line]


def longest_sequence(config: RunConfig, shape: ModelShape) -> int:
    """Tokens of the longest prompt and completion, including a probe's."""
    longest = max(config.rollout.max_prompt_tokens + config.longest_completion, PROBE_LENGTH)
    return min(longest, shape.max_positions)


def adapter_places(config: RunConfig, shape: ModelShape) -> AdapterPlaces | None:
    """What ``weights.push=adapters`` needs; None without it.

    Completions that are trained on name one of ``train.max_staleness`` versions, and what begins the newest.
    """
    if config.weights.push != "adapters":
        return None
    layouts = adapter_layouts(config.learner)
    assert layouts is not None, "the rows of weights.push say so"
    ranks = layouts.ranks(megatron_layout(shape))
    return AdapterPlaces(
        count=config.train.max_staleness + _SPARE,
        modules=tuple(sorted({part.removesuffix(".weight").rpartition(".")[2] for part in ranks})),
        ranks=frozenset(ranks.values()),
        experts=any("{expert}" in part for part in ranks),
        section=layouts.section,
    )
