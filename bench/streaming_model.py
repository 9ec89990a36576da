"""A model of events of `bench.streaming`: steps of servers that sleep for each token, and of a learner that sleeps.

It knows slots, lengths, the seconds of a push and the rule of admission (rl_megatron/rollout/stream.py), and
nothing of the code.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import NormalDist

PROMPTS, GROUP, SERVERS, SLOTS = 8, 4, 2, 8
MEAN, MOST, TOKEN_SECONDS = 50, 8, 0.01  # tokens, times the mean, of a token in a slot
TRAIN_TOKEN = TOKEN_SECONDS / (SERVERS * SLOTS)  # seconds of a token in a backward pass
WARM = 8  # steps that no figure counts


def length(kind: str, seed: int, number: int) -> int:
    """Tokens of a completion: a function of its request's seed and its number."""
    if kind == "equal":
        return MEAN
    uniform = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8], "little") / 2**64
    drawn = math.exp(NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9)) - 0.5) * MEAN * 1.02
    return round(min(max(drawn, 4), MOST * MEAN))


@dataclass(slots=True)
class Model:
    """The same run as events on a clock of its own. Letters as in rl_megatron/rollout/stream.py."""

    kind: str
    k: int
    seeds: list[int]  # of the request of each prompt, in the order drawn
    alone: bool | None = None  # whether each completion is a request; None: with staleness
    seeded: bool = True  # whether each such request has a seed of its own
    train: float | None = None  # seconds of a step's training; None: by its tokens
    push: float = 0.0  # seconds of a push, in which nobody samples or trains
    now: float = 0.0
    drawn: int = 0
    version: int = 0
    ahead: int = 0
    events: list[tuple[float, int, int]] = field(default_factory=list)  # when a completion ends, its group, server
    queues: list[list[tuple[float, int]]] = field(default_factory=lambda: [[] for _ in range(SERVERS)])
    busy: list[int] = field(default_factory=lambda: [0] * SERVERS)
    left: dict[int, int] = field(default_factory=dict)  # completions that groups wait for
    due: dict[int, int] = field(default_factory=dict)

    @property
    def by_completion(self) -> bool:
        """Whether each completion is a request."""
        return self.k > 0 if self.alone is None else self.alone

    def tokens(self, group: int) -> list[int]:
        """Of each completion."""
        seed = self.seeds[group]
        if not (self.seeded and self.by_completion):
            return [length(self.kind, seed, n) for n in range(GROUP)]
        digests = [hashlib.sha256(f"{seed} {n}".encode()).digest() for n in range(GROUP)]
        return [length(self.kind, int.from_bytes(one[:8], "little") >> 1, 0) for one in digests]

    def admit(self) -> None:
        """Draw what the rule allows. Each request goes to the server with the fewest completions."""
        while self.drawn < (self.version + self.ahead + 1) * PROMPTS:
            group, self.drawn = self.drawn, self.drawn + 1
            self.left[group], self.due[group] = GROUP, self.version + self.k + 1
            tokens = self.tokens(group)
            for request in [[one] for one in tokens] if self.by_completion else [tokens]:
                server = min(range(SERVERS), key=lambda s: self.busy[s] + len(self.queues[s]))
                self.queues[server] += [(one * TOKEN_SECONDS, group) for one in request]
                self.start(server)

    def start(self, server: int) -> None:
        """Give free slots to those that wait."""
        while self.queues[server] and self.busy[server] < SLOTS:
            seconds, group = self.queues[server].pop(0)
            self.busy[server] += 1
            heapq.heappush(self.events, (self.now + seconds, group, server))

    def until(self, when: float) -> None:
        """Let everything happen that ends by ``when``."""
        while self.events and self.events[0][0] <= when:
            self.now, group, server = heapq.heappop(self.events)
            self.busy[server] -= 1
            self.left[group] -= 1
            self.start(server)
        self.now = max(self.now, when)

    def chosen(self) -> list[int]:
        """The groups of a step, the finished ones that are due first; none if the step waits: they would leave more
        groups than later steps have places for by their due."""
        ready = sorted((self.due[g], g) for g, left in self.left.items() if not left)[:PROMPTS]
        rest, left = Counter(self.due.values()) - Counter(due for due, _ in ready), 0
        for due in sorted(rest):
            left += rest[due]
            if left > (due - self.version - 1) * PROMPTS:
                return []
        return [group for _, group in ready] if len(ready) == PROMPTS else []

    def on_push(self) -> None:
        """Let `push` seconds pass; completions go on where they were."""
        self.now += self.push
        self.events = [(ends + self.push, group, server) for ends, group, server in self.events]

    def step(self) -> float:
        """Take the groups of the step after ``version``, and train on them. Returns the seconds of waiting."""
        began = self.now
        while not (chosen := self.chosen()):
            self.until(self.events[0][0])
        waited, tokens = self.now - began, sum(sum(self.tokens(group)) for group in chosen)
        for group in chosen:
            del self.left[group], self.due[group]
        self.until(self.now + (tokens * TRAIN_TOKEN if self.train is None else self.train))
        return waited

    def seconds(self, steps: int) -> float:
        """Mean seconds of a step after `WARM`."""
        self.ahead, began, last, calm = min(1, self.k), 0.0, 0.0, 0
        for version in range(WARM + steps):
            self.version = version
            began = self.now if version == WARM else began
            self.on_push()
            self.admit()
            waited = self.step()
            if version and self.k:
                calm = 0 if waited > 0.02 * (self.now - last) else calm + 1
                self.ahead = min(self.k, self.ahead + 1) if not calm else self.ahead
            last = self.now
        return (self.now - began) / steps
