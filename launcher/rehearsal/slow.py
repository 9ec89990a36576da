"""Finds slow nodes in a survey, by comparing like with like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from launcher.controller.speeds import read_ranks
from launcher.rehearsal.survey import Surveyed
from rl_megatron.config.run import RunConfig

FACTOR = 2.0
"""How many times as slow as the upper quartile something is to be named."""
_CLOCK_SECONDS = 5.0
_IN_USE = 0.05  # of a GPU's memory, before anything of the rehearsal runs there

Key = TypeVar("Key")


def usual(rates: Sequence[float]) -> float:
    """The upper quartile of rates: what a sound one reaches though up to three quarters are held up."""
    return sorted(rates, reverse=True)[len(rates) // 4]


def below(rates: Mapping[Key, float]) -> dict[Key, float]:
    """The rates that are less than the usual one over `FACTOR`, and how many times less."""
    if len(rates) < 2:
        return {}
    like = usual(list(rates.values()))
    return {key: like / max(rate, 1e-9) for key, rate in rates.items() if rate * FACTOR < like}


def slow_nodes(found: Surveyed) -> dict[str, list[str]]:
    """By node, what is slow there, in words."""
    out: dict[str, list[str]] = {}
    for node, what in (*_links(found), *_inside(found), *_machines(found)):
        out.setdefault(node, []).append(what)
    return out


def _links(found: Surveyed) -> Iterator[tuple[str, str]]:
    """A node is slow if it is in both of its pairs: if one is, the other end may be. Two nodes are one pair, which
    does not say whose end is slow."""
    pairs = found.pairs()
    slow = below(pairs)
    for node in found.answers:
        own = [pair for pair in pairs if node in pair]
        if len(own) > 1 and all(pair in slow for pair in own):
            rate, times = min(pairs[pair] for pair in own) / 1e9, min(slow[pair] for pair in own)
            yield node, f"its network: {rate:.3g} GB/s to both neighbours, {times:.1f} times slower than usual"


def _inside(found: Surveyed) -> Iterator[tuple[str, str]]:
    """Groups inside one node, against those of other nodes."""
    for kind, groups in found.groups().items():
        near = {g: rate for g, rate in groups.items() if len({found.by_process[r] for r in g}) == 1}
        for group, times in below(near).items():
            ranks = f"{group[0]}-{group[-1]}"
            yield found.by_process[group[0]], f"its {kind} group of ranks {ranks}: {times:.1f} times slower than usual"


def _machines(found: Surveyed) -> Iterator[tuple[str, str]]:
    flops = {(node, i): f for node, a in found.answers.items() for i, f in enumerate(_flops(a))}
    for (node, i), times in below(flops).items():
        yield node, f"process {i}'s matrix products: {times:.1f} times slower than usual"
    for folder in {folder for answer in found.answers.values() for folder in answer["disks"]}:
        for how in ("write", "read"):
            rates = {n: float(a["disks"][folder][how]) for n, a in found.answers.items() if folder in a["disks"]}
            for node, times in below(rates).items():
                yield node, f"{how}s in {folder}: {rates[node] / 1e9:.3g} GB/s, {times:.1f} times slower than usual"


def _flops(answer: Mapping[str, Any]) -> list[float]:
    return [link["flops"] for link in answer.get("links", ()) if "flops" in link]


def slow_ranks(file: Path, config: RunConfig) -> dict[str, list[str]]:
    """By node, the ranks that the run's own comparison of steps found slow."""
    out: dict[str, list[str]] = {}
    for each in read_ranks(file):
        if each.times >= (config.run.slow_factor or float("inf")):
            what = (
                f"rank {each.rank}'s fixed computation in steps: {each.times:.1f} times slower than the median rank's"
            )
            out.setdefault(each.node, []).append(what)
    return out


def unlike(found: Surveyed) -> Iterator[str]:
    """Lines on what differs between nodes and should not, and on GPUs that are not sound."""
    for what in ("python", "torch", "megatron-core", "kernel"):
        values: dict[object, list[str]] = {}
        for node, answer in found.answers.items():
            values.setdefault(answer["machine"][what], []).append(node)
        if len(values) > 1:
            yield f"{what} differs: {'; '.join(f'{v} on {_some(nodes)}' for v, nodes in values.items())}"
    yield from _clocks(found)
    for node, answer in found.answers.items():
        for i, gpu in enumerate(answer.get("gpus", ())):
            yield from (f"GPU {i} of {node} ({gpu['name']}) {word}" for word in _unsound(gpu))


def _clocks(found: Surveyed) -> Iterator[str]:
    """Each node's time at the barrier of all, less the median node's."""
    times = {found.by_process[link["process"]]: float(link["time"]) for link in found.links() if "time" in link}
    middle = sorted(times.values())[len(times) // 2] if times else 0.0
    for node, moment in times.items():
        if abs(moment - middle) > _CLOCK_SECONDS:
            yield f"the clock of {node} is {moment - middle:+.0f} s from the others'"


def _unsound(gpu: Mapping[str, str]) -> Iterator[str]:
    memory = used, total = gpu["used_mb"], gpu["memory_mb"]
    if unknown := [text for text in dict.fromkeys(memory) if not text.isdecimal()]:  # as [GPU requires reset]
        yield f"does not say its memory: {', '.join(unknown)}"
    elif int(used) > _IN_USE * int(total):
        yield f"is in use: {used} of {total} MB are taken"
    if gpu["ecc_errors"].isdecimal() and int(gpu["ecc_errors"]):
        yield f"has {gpu['ecc_errors']} uncorrected memory errors"


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
