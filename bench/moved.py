"""Print, by a model of events, what a step gains where completions move from busy servers to less busy ones.

    python -m bench.moved [--seeds 2] [--json FILE]

A token of a server's rows takes the seconds of `token_seconds`: more with more rows. Each completion is sent to the
server with the fewest; groups are admitted and taken as in rl_megatron/rollout/stream.py; training takes as long as a
step's tokens do at a full server. A completion that moves is asked again: its new server computes its prompt and
tokens, while its other rows wait. *stay*: none moves. *gathered*: one that is alone on its server joins others, so that
its server is free. *levelled*: the project's rule (`rollout.servers.places.surplus`), five seconds after one ended.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bench.results import parse, write
from rl_megatron.engines.requests import surplus
from rl_megatron.models.named import NAMED
from tools.planner.hardware import GPUS
from tools.planner.rl_step import COMPUTED, ServerShape, token_seconds

BAR = 0.02  # gain in a step, for which the rule is worth its lines
GPU, PROMPT = GPUS["h200"], 512
STEPS, WARM = 6, 2
AGAIN, WAIT = 0.05, 5.0  # seconds to abort a request and send its rest; from an end until others may move
RULES = ("stay", "gathered", "levelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run on H200. ``slow``: how much longer a token of the first server takes. Lengths are lognormal and cut."""

    model: str = "qwen3-30b-a3b"
    ranks: int = 1  # of a server
    servers: int = 4
    groups: int = 32
    k: int = 0
    slow: float = 1.0
    group: int = 16
    mean: float = 4096
    most: float = 32768
    spread: float = 1.0

    @property
    def token(self) -> tuple[ServerShape, float]:
        """The server, and seconds to compute a token of a prompt."""
        flops = 2 * NAMED[self.model].active_parameters
        server = ServerShape(tp=self.ranks, dp=1, cache=math.inf)
        return server, flops / (self.ranks * GPU.peak.bfloat16 * 1e12 * COMPUTED)

    def seconds(self, rows: float, context: float) -> float:
        """Of a token of all rows."""
        return token_seconds(NAMED[self.model], self.token[0], GPU, rows, context)


SETTINGS = (
    Setting(servers=4),
    Setting(servers=16),
    Setting(servers=8, slow=1.5),
    Setting(servers=8, mean=1024, most=8192, spread=0.6),
    Setting(model="qwen3-235b-a22b", ranks=8, servers=8),
)


@dataclass(slots=True)
class Row:
    """A completion at a server."""

    group: int
    length: float
    done: float = 0.0
    start: float = 0.0  # what its server had made when its first token would have been


@dataclass(slots=True)
class Server:
    """Its rows advance together; ``token_counts`` counts the tokens that a row would have that was always here."""

    setting: Setting
    slow: float
    token_counts: float = 0.0
    stalled: float = 0.0  # seconds of prompts to compute
    starts: float = 0.0
    numbers: int = 0
    rows: list[tuple[float, int, Row]] = field(default_factory=list)

    def add(self, row: Row, prefill: float = 0.0) -> None:
        """Go on with the row after ``prefill`` seconds."""
        row.start = self.token_counts - row.done
        self.starts, self.stalled, self.numbers = self.starts + row.start, self.stalled + prefill, self.numbers + 1
        heapq.heappush(self.rows, (row.start + row.length, self.numbers, row))

    def remove(self, entry: tuple[float, int, Row]) -> Row:
        """Take a row away."""
        self.rows.remove(entry)
        heapq.heapify(self.rows)
        row = entry[2]
        self.starts, row.done = self.starts - row.start, self.token_counts - row.start
        return row

    def token(self) -> float:
        """Seconds of a token."""
        count = len(self.rows)
        return self.slow * self.setting.seconds(count, PROMPT + self.token_counts - self.starts / count)

    def ends(self) -> float:
        """Seconds until the next row ends."""
        return self.stalled + max(0.0, self.rows[0][0] - self.token_counts) * self.token() if self.rows else math.inf

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        waited = min(self.stalled, seconds)
        self.stalled -= waited
        if self.rows and seconds > waited:
            self.token_counts += (seconds - waited) / self.token()


@dataclass(slots=True)
class Fleet:
    """All servers, and the groups that steps take."""

    setting: Setting
    rule: str
    lengths: NDArray[np.float64]  # [groups, completions]
    train: float
    servers: list[Server] = field(init=False)
    now: float = 0.0
    drawn: int = 0
    version: int = 0
    moves: int = 0
    check: float = math.inf  # when completions may move
    left: dict[int, int] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.servers = [Server(self.setting, self.setting.slow if n == 0 else 1.0) for n in range(self.setting.servers)]

    def admit(self, ahead: int) -> None:
        """Draw what the rule of the stream allows."""
        while self.drawn < (self.version + ahead + 1) * self.setting.groups:
            group, self.drawn = self.drawn, self.drawn + 1
            self.left[group], self.due[group] = self.setting.group, self.version + self.setting.k + 1
            for length in self.lengths[group]:
                min(self.servers, key=lambda server: len(server.rows)).add(Row(group, float(length)))

    def move(self) -> None:
        """Have rows go elsewhere by the rule."""
        counts = [len(server.rows) for server in self.servers]
        if self.rule == "gathered":
            away = [int(count == 1 and max(counts) > 1) for count in counts]
            targets = [server for server in self.servers if len(server.rows) > 1]
        else:
            away, targets = surplus(counts), self.servers
        moved = [  # those sent last
            server.remove(max(server.rows, key=lambda entry: entry[2].start))
            for server, count in zip(self.servers, away, strict=True)
            for _ in range(count)
        ]
        for row in moved:
            prefill = AGAIN + (PROMPT + row.done) * self.setting.token[1]
            min(targets, key=lambda server: len(server.rows)).add(row, prefill)
        self.moves += len(moved)

    def until(self, when: float) -> bool:
        """Let time pass until ``when``, or until a completion ends; whether one did."""
        while True:
            wait, number = min((server.ends(), n) for n, server in enumerate(self.servers))
            seconds = min(wait, when - self.now, self.check - self.now)
            for server in self.servers:
                server.advance(seconds)
            self.now += seconds
            if seconds == wait:
                server = self.servers[number]
                self.left[server.remove(server.rows[0]).group] -= 1
                if self.rule != "stay" and self.check == math.inf:
                    self.check = self.now + WAIT
                return True
            if self.now < self.check:
                return False
            self.check = math.inf
            self.move()

    def batch(self) -> list[int] | None:
        """The groups of the step after ``version``; None if it waits."""
        size = self.setting.groups
        ready = sorted((self.due[g], g) for g, left in self.left.items() if not left)[:size]
        rest = self.due.keys() - {group for _, group in ready}
        late = any(
            sum(self.due[g] <= step for g in rest) > (step - self.version - 1) * size
            for step in range(self.version + 1, self.version + self.setting.k + 2)
        )
        return None if len(ready) < size or late else [group for _, group in ready]

    def seconds(self) -> float:
        """Mean seconds of a step."""
        k, last, calm, began = self.setting.k, 0.0, 0, 0.0
        ahead = min(1, k)
        for version in range(WARM + k + STEPS):
            self.version, asked = version, self.now
            began = self.now if version == WARM + k else began
            self.admit(ahead)
            while (batch := self.batch()) is None:
                self.until(math.inf)
            for group in batch:
                del self.left[group], self.due[group]
            if version and k:
                calm = 0 if self.now - asked > 0.02 * (self.now - last) else calm + 1
                ahead = min(k, ahead + 1) if not calm else ahead
            last = self.now
            while self.until(last + self.train):
                pass
        return (self.now - began) / STEPS


def lengths_of(setting: Setting, seed: int, groups: int) -> NDArray[np.float64]:
    """Tokens of the completions of so many groups."""
    drawn = np.exp(setting.spread * np.random.default_rng(seed).standard_normal((groups, setting.group)))
    for _ in range(20):
        drawn *= setting.mean / np.minimum(drawn, setting.most).mean()
    return np.clip(drawn, 16, setting.most)


def measure(setting: Setting, seeds: Sequence[int]) -> dict[str, object]:
    """One row."""
    full = setting.groups * setting.group / setting.servers
    train = setting.mean * setting.seconds(full, PROMPT + setting.mean / 2)
    taken, moves = dict.fromkeys(RULES, 0.0), 0
    for seed in seeds:
        lengths = lengths_of(setting, seed, (WARM + 2 * setting.k + STEPS + 2) * setting.groups)
        for rule in RULES:
            fleet = Fleet(setting, rule, lengths, train)
            taken[rule] += fleet.seconds() / len(seeds)
            moves += fleet.moves if rule == "levelled" else 0
    return {
        "model": setting.model,
        "servers": f"{setting.servers} x {setting.ranks} GPUs",
        "slow": setting.slow,
        "mean_length": setting.mean,
        "k": setting.k,
        "seconds": round(taken["stay"], 1),
        "gathered_gain": round(taken["stay"] / taken["gathered"] - 1, 3),
        "levelled_gain": round(taken["stay"] / taken["levelled"] - 1, 3),
        "moves_a_step": round(moves / len(seeds) / (WARM + setting.k + STEPS), 1),
        "bar": BAR,
    }


def main() -> None:
    """Print a row for each setting and k."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="draws of lengths")
    args = parse(parser)
    rows = []
    for setting in SETTINGS:
        for k in (1, 2, 4):
            rows.append(measure(replace(setting, k=k), range(args.seeds)))
            print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    write(args, rows)


if __name__ == "__main__":
    main()
