"""``rl-megatron scale``: searches layouts of a run on given GPUs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from launcher.programs.scale import Asked, asked_of, configuration_file
from tools.planner.constants import RANGE
from tools.planner.hardware import GB, GPUS
from tools.planner.layouts import described
from tools.planner.search import PlannedRun, SearchResult, explain_term, search

_SHOWN = 8  # rejected layouts
_ORDER = (
    "the order of layouts is a guess: of five pairs of published steps that were kept back one came in the predicted "
    "order; time the first few layouts (docs/scaling.md)"
)


def scale(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL KEYS",
            help="a folder with a config.json or a name as kimi-k2, gpus=N, gpu= one of "
            f"{', '.join(GPUS)} or a YAML file, then if wanted goal=tokens, memory or step, "
            "mean_tokens=N of a completion, and keys of the run as rollout.group_size=16",
        ),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="TERM", help="say what a term of memory or time is made of, as all-to-all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print layouts, terms and reasons as JSON")] = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="write the best layout as a configuration that train takes"),
    ] = None,
) -> None:
    """Plan a run: search layouts of learner and servers on given GPUs, with memory and seconds by term."""
    started = time.perf_counter()
    asked = asked_of(arguments or [])
    with Console(stderr=True).status("planning the memory of layouts, the fastest first"):
        found = search(asked.wanted)
    text = configuration_file(asked, found.plans[0])
    if write is not None:
        write.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps(as_tree(asked, found), indent=1))
        return
    console = Console(markup=False)
    show(console, asked, found, time.perf_counter() - started)
    if explain is not None:
        for line in explain_term(explain, found.plans[0]):
            console.print(line, soft_wrap=True, markup=False)
    if write is not None:
        name = "" if asked.wanted.base.model.name is None else " model.path=FOLDER"
        console.print(
            f"written: {write}; rl-megatron submit {shlex.quote(str(write))}{name} --dry-run checks it", soft_wrap=True
        )


def show(console: Console, asked: Asked, found: SearchResult, seconds: float) -> None:
    """Print the best layout with its terms, the next ones, and the rejected ones with their reasons."""
    wanted, best = asked.wanted, found.plans[0]
    console.print(
        f"{asked.model} on {wanted.gpus:,} {asked.gpu}, goal={wanted.goal}: {found.layouts:,} layouts timed and "
        f"{found.planned:,} plans of memory in {seconds:.1f} s",
        soft_wrap=True,
    )
    console.print(f"best: {described(best.keys)}", soft_wrap=True)
    console.print(
        "  " + " ".join(f"{key}={_said(value)}" for key, value in asked.changed(best).items()), soft_wrap=True
    )
    for line in _rates(asked, best):
        console.print(line, soft_wrap=True)
    console.print(_table("seconds of a step", best.step.parts, "s"))
    console.print(_table("seconds of training, by term", best.step.training, "s"))
    terms = {term: held / GB for term, held in best.footprint.terms.items()}
    title = f"GB on the fullest GPU (stage {best.footprint.stage}), of {wanted.gpu.memory:g}"
    console.print(_table(title, terms, "GB"))
    console.print(_ORDER, soft_wrap=True)
    for plan in found.plans[1:4]:
        more = plan.step.seconds / best.step.seconds
        console.print(
            f"next: {described(plan.keys)}: {plan.step.seconds:,.1f} s ({more:.2f} times), "
            f"{plan.footprint.total / GB:.0f} GB",
            soft_wrap=True,
        )
    for line in found.reasons()[:_SHOWN]:
        console.print(f"rejected: {line}", soft_wrap=True, markup=False)


def _rates(asked: Asked, best: PlannedRun) -> list[str]:
    step, gpus = best.step, asked.wanted.gpus
    rate, (low, high) = step.tokens_a_second, RANGE
    lines = [
        f"a step: {step.seconds:,.1f} s, {rate:,.0f} tokens/s, {rate / gpus:,.0f} a GPU; expect training at {low:g} to "
        f"{high:g} times its rate, whole steps less surely (docs/scaling.md)",
        f"completions of {asked.mean:,.0f} tokens in the mean, of at most {asked.most:,} (mean_tokens=), are assumed",
    ]
    if step.sampled.held_back:
        lines.append(
            f"rollout.server.concurrency={best.config.rollout.server.concurrency} holds the servers back: "
            f"{step.sampled.requests:,} requests, each of a group, fill their places"
        )
    if step.staleness:
        lines.append(
            f"train.max_staleness={step.staleness}: the longest completion takes {step.sampled.longest:,.0f} s; "
            f"{step.least} is the least at which no step waits for it"
        )
    if (dispatcher := best.keys.get("learner.dispatcher")) in ("deepep", "hybridep"):
        lines.append(f"learner.dispatcher={dispatcher} needs its package, and has not been run here")
    return lines


def _table(title: str, terms: Mapping[str, float], unit: str) -> Table:
    table = Table("", unit, "share", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    total = sum(terms.values())
    for term, value in terms.items():
        if value >= 0.001 * total:
            table.add_row(term, f"{value:,.2f}", f"{value / total:.0%}")
    return table


def _said(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_tree(asked: Asked, found: SearchResult) -> dict[str, object]:
    """Plans and rejected layouts as plain values: seconds, and bytes of the fullest GPU, by term."""
    return {
        "model": asked.model,
        "gpus": asked.wanted.gpus,
        "gpu": asked.gpu,
        "goal": asked.wanted.goal,
        "layouts": found.layouts,
        "plans": [
            {
                "keys": dict(plan.keys),
                "seconds": plan.step.seconds,
                "tokens_per_second": plan.step.tokens_a_second,
                "parts": dict(plan.step.parts),
                "training": dict(plan.step.training),
                "bytes": dict(plan.footprint.terms),
                "stage": plan.footprint.stage,
            }
            for plan in found.plans
        ],
        "rejected": [{"keys": dict(one.keys), "reason": one.reason} for one in found.rejected],
    }
