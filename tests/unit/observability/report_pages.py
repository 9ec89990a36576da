"""A run folder with figures to report, and a parsed page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from rl_megatron.config.run import RunConfig
from rl_megatron.observability.history import SampleRow, SamplesWriter
from rl_megatron.observability.recorder import MetricsWriter

EVIL = "</script><script>alert(1)</script>'\"><img src=http:x.test/ onerror=alert(2)>&amp;\u2028\ud800"


class Page(HTMLParser):
    """The parsed page: tags with attributes, and all visible text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def charts(self) -> dict[str, dict[str, Any]]:
        """What each chart is given by the start of its accessible name; each line has its x."""
        found = dict[str, dict[str, Any]]()
        for _, attributes in self.tags:
            if data := attributes.get("data-chart"):
                chart = found[re.split(r"[,.] ", attributes["aria-label"] or "")[0]] = json.loads(data)
                chart["series"] = [{"x": chart["series"][0]["x"], **line} for line in chart["series"]]
        return found

    def names(self, title: str) -> list[tuple[str, int]]:
        """The name and the style of each line of a chart."""
        return [(line["name"], line["style"]) for line in self.charts()[title]["series"]]

    def themes(self) -> list[dict[str, str]]:
        """The colors of the light and of the dark page by name."""
        themes = re.findall(r":root \{(.*?)\}", self.text, re.DOTALL)
        assert len(themes) == 2
        return [dict(re.findall(r"(--\w+): (#\w{6})", theme)) for theme in themes]


def a_run(folder: Path, *, steps: int = 6, warm: int = 2, scale: float = 1.0, **config: Any) -> Path:
    folder.mkdir(parents=True)
    resolved = RunConfig.model_validate({"train": {"steps": steps}, "run": {"name": "r"}, **config})
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved.model_dump(mode="json")))
    metrics, samples = MetricsWriter(folder), SamplesWriter(folder)
    for k in range(warm + 1 if warm else 0):
        metrics.write({"phase": "warm_start", "step": 0, "warm_start/step": 10 * k, "eval/accuracy": 0.1 * k})
    for s in range(1, steps + 1):
        row = {"phase": "rl", "step": s, "reward/mean": 0.1 * s * scale, "reward/std": 0.25, "loss": -0.5 * s}
        row |= {"seconds/step": 2.0, "seconds/rollout": 0.5, "seconds/train": 1.0, "tokens/rollout": 300}
        if s % 2 == 0:
            row["eval/accuracy"] = 0.15 * s * scale
        metrics.write(row)
        samples.write([SampleRow(step=s, prompt="1+1=", completion=f"said-{s};", answer="2", reward=float(s % 2))])
    return folder
