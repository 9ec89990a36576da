"""A whole update in plain loops, in float64, as docs/algorithms.md says it: what Update is compared with.

Models are the tables of tests/toy_roles.py. One minibatch an epoch, so that no order matters. Of an algorithm it knows
what test_update_oracle.py asks; gradients are torch's, of a loss that is a sum over tokens written out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from rl_megatron.config.run import RunConfig
from rl_megatron.types import RolloutGroup


@dataclass(eq=False)
class Said:
    """One completion, and what is found out about it, a number for each of its tokens."""

    inputs: list[int]
    targets: list[int]
    engine: list[float]
    versions: list[int]
    cut: bool
    raw: float
    group: int
    reward: float = 0.0
    old: list[float] = field(default_factory=list)
    now: list[float] = field(default_factory=list)  # of the policy before this update
    entropy: list[float] = field(default_factory=list)  # likewise
    weights: list[float] = field(default_factory=list)  # of an optimal baseline
    held: list[bool] = field(default_factory=list)  # KL-Cov
    ref: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    after: float = 0.0  # the critic's value behind the last token
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    trained: bool = True
    shown: bool = False  # by the data: nobody sampled it


class PlainUpdate:
    """Tables of policy, reference [V, V] and critic [V], trained in place by ``step``."""

    def __init__(self, config: RunConfig, policy: Tensor, reference: Tensor, critic: Tensor) -> None:
        self.config, self.a = config, config.algorithm
        self.policy, self.reference, self.critic = policy.double(), reference.double(), critic.double()
        self.beta, self.baseline = self.a.kl.coefficient, None
        self.steps_made = 0

    @property
    def routed(self) -> bool:
        """Whether the policy takes given experts; engine and learner chose the same here."""
        return self.a.routing_replay != "off"

    def step(self, groups: Sequence[RolloutGroup], step: int) -> None:
        said = [
            Said(
                inputs=row.token_ids[turn.start - 1 : -1].tolist(),
                targets=row.token_ids[turn.start :].tolist(),
                engine=turn.logprobs.tolist(),
                versions=[[s.version for s in turn.spans if s.start <= t][-1] for t in range(len(turn.logprobs))]
                if turn.spans
                else [],
                shown=not turn.spans,
                cut=turn.finish_reason != "stop",
                raw=one.reward,
                group=number,
            )
            for number, group in enumerate(groups)
            for one in (*group.trajectories, *(group.demonstration.trajectories if group.demonstration else ()))
            for row in one.chains
            for turn in row.turns
        ]
        self._reward(said)
        if self.a.pairs:
            said = self._pairs(said)
        self._measure(said)
        self._credit(said)
        self._choose(said)
        goes_on, self.steps_made = not self.a.needs_critic or step > self.a.critic.only_steps, 0
        for _ in range(self.config.train.epochs):
            policy, critic = self.policy.clone().requires_grad_(), self.critic.clone().requires_grad_()
            goes_on = goes_on and (self.a.old_kl_limit is None or self._old_kl(said) <= self.a.old_kl_limit)
            if goes_on:
                self.steps_made += 1
                loss = self._preference(said, policy) if self.a.pairs else self._loss(said, policy, step)
                (gradient,) = torch.autograd.grad(loss, policy)
                self.policy = self.policy - self.config.train.learning_rate * gradient
            if self.a.needs_critic:
                (gradient,) = torch.autograd.grad(self._value_loss(said, critic), critic)
                self.critic = self.critic - self.config.train.learning_rate * gradient

    def _reward(self, said: list[Said]) -> None:
        a = self.a
        for s in said:
            s.reward = a.unfinished_reward if s.cut and a.unfinished_reward is not None else s.raw

    def _pairs(self, said: list[Said]) -> list[Said]:
        out = []
        for number in sorted({s.group for s in said}):
            members = [s for s in said if s.group == number]
            best, worst = max(members, key=lambda s: s.reward), min(members, key=lambda s: s.reward)
            out += [best, worst] if best.reward > worst.reward else []
        return out

    def _measure(self, said: list[Said]) -> None:
        for s in said:
            s.now = [float(x) for x in logprobs(self.policy, s, routed=self.routed)]
            s.entropy = entropies(self.policy, s, routed=self.routed)
            squares = _table(self.policy, s, self.routed).exp().square().sum(-1).tolist()
            s.weights = list(accumulate(1 - 2 * math.exp(x) + y for x, y in zip(s.now, squares, strict=True)))
            s.old = s.now if self.a.old_logprobs == "learner" else s.engine
            s.ref = [float(x) for x in logprobs(self.reference, s, routed=False)]
            s.values, s.after = [float(self.critic[x]) for x in s.inputs], float(self.critic[s.targets[-1]])

    def _credit(self, said: list[Said]) -> None:
        a, level = self.a, self.baseline
        for s in said:
            members = [o.reward for o in said if o.group == s.group]
            if a.advantage_mean == "moving" and level is None:
                level = statistics.fmean(o.reward for o in said)
            mean = {"group": statistics.fmean(members), "none": 0.0, "moving": level}[a.advantage_mean]
            equal = len(set(members)) == 1 and (a.advantage_mean == "group" or a.advantage_std == "group")
            spread = statistics.stdev if a.std_unbiased else statistics.pstdev
            std = spread(members) + 1e-6 if a.advantage_std == "group" and not equal else 1.0
            of_completion = 0.0 if equal else (s.reward - (mean or 0.0)) / std
            if a.credit == "completion":
                s.advantages = [of_completion] * len(s.targets)
            else:
                rewards = [
                    -self.beta * (old - ref) * (a.kl.placement == "token_reward")
                    for old, ref in zip(s.old, s.ref, strict=True)
                ]
                rewards[-1] += of_completion
                if a.credit in ("optimal", "discounted"):
                    s.returns = list(accumulate(reversed(rewards), lambda after, r: r + a.gamma * after))[::-1]
                    s.advantages = [*s.returns] if a.credit == "discounted" else []
                    continue
                s.advantages = self._gae(s, rewards, a.lam)
                of_critic = s.advantages if a.critic.lam is None else self._gae(s, rewards, a.critic.lam)
                s.returns = [adv + value for adv, value in zip(of_critic, s.values, strict=True)]
        for s in said if a.credit == "optimal" else ():
            for t, own in enumerate(s.returns):
                alike = [o for o in said if o.group == s.group and len(o.targets) > t]
                mean = statistics.fmean((o.returns[t] for o in alike), [o.weights[t] for o in alike])
                s.advantages.append(own - mean)
        if a.advantage_mean == "moving":
            mean = statistics.fmean(s.reward for s in said)
            before = mean if self.baseline is None else self.baseline
            self.baseline = a.baseline_decay * before + (1 - a.baseline_decay) * mean
        if a.whiten:
            self._whiten(said)
        for s in said:
            s.trained = not (a.drop_truncated and s.cut)

    def _whiten(self, said: list[Said]) -> None:
        every = [x for s in said for x in s.advantages]
        mean, std = statistics.fmean(every), statistics.stdev(every) + 1e-8
        for s in said:
            s.advantages = [(x - mean) / std for x in s.advantages]

    def _gae(self, s: Said, rewards: list[float], lam: float) -> list[float]:
        goes_on = s.cut and self.a.unfinished_reward is None
        running, following, out = 0.0, s.after if goes_on else 0.0, list[float]()
        for reward, value in zip(reversed(rewards), reversed(s.values), strict=True):
            running = reward + self.a.gamma * following - value + self.a.gamma * lam * running
            following = value
            out.insert(0, running)
        return out

    def _choose(self, said: list[Said]) -> None:
        """Tokens of most entropy or near the engine alone; of great covariance left out or held; all trained count."""
        tokens, numbers, every = (
            self.a.tokens,
            self.a.parameters,
            [(s, t) for s in said if s.trained for t in range(len(s.targets))],
        )
        for s in said:
            s.held = [False] * len(s.targets)
        if tokens.choose == "top_entropy":
            num = math.ceil(tokens.share * len(every))
            least = sorted((s.entropy[t] for s, t in every), reverse=True)[num - 1]
            for s, t in every:
                s.advantages[t] *= s.entropy[t] >= least - 1e-6
        elif tokens.choose == "second_moment":
            nearest = sorted(every, key=lambda one: (one[0].now[one[1]] - one[0].engine[one[1]]) ** 2)
            while statistics.fmean((s.now[t] - s.engine[t]) ** 2 for s, t in nearest) > numbers["second_moment"]:
                s, t = nearest.pop()
                s.advantages[t] = 0.0
        elif tokens.choose != "all":
            logp, adv = (
                statistics.fmean(x) for x in zip(*((s.now[t], s.advantages[t]) for s, t in every), strict=True)
            )
            cov = [(s.now[t] - logp) * (s.advantages[t] - adv) for s, t in every]
            order = sorted(range(len(every)), key=lambda i: -cov[i])
            for i, (s, t) in enumerate(every):
                if tokens.choose == "kl_cov":
                    s.held[t] = i in order[: max(int(tokens.share * len(every)), 1)]
                elif numbers["covariance_low"] <= cov[i] <= numbers["covariance_high"]:  # a share of 1 draws them all
                    s.advantages[t] = 0.0

    def _correction(self, s: Said, t: int, old: float) -> float:
        """The weight of a token."""
        c = self.a.correction
        gap = sum(s.old) - sum(s.engine) if c.level == "product" else old - s.engine[t]
        inside = c.low <= math.exp(gap) <= c.high
        return {"none": 1.0, "truncate": min(math.exp(gap), c.high), "band": float(inside)}[c.mode]

    def _loss(self, said: list[Said], policy: Tensor, step: int) -> Tensor:
        a, total = self.a, torch.zeros((), dtype=torch.float64)
        trained = [s for s in said if s.trained]
        tokens = sum(len(s.targets) for s in trained)
        if a.entropy_coefficient:
            of_tables = [_table(policy, s, self.routed) for s in trained]
            mean = sum((-(x.exp() * x).sum() for x in of_tables), start=total) / tokens
            total = total - a.entropy_coefficient * mean
        right = sum(len(s.targets) for s in trained if self._right(s))
        for s in trained:
            of_tables = _table(policy, s, self.routed)
            for t, logp in enumerate(logprobs(policy, s, routed=self.routed)):
                old, now = s.old[t], float(logp.detach())
                if a.old_logprobs == "interpolated":
                    old = s.engine[t] + ((step - 1 - s.versions[t]) / (step - s.versions[t])) * (now - s.engine[t])
                ratio, advantage = (logp - old).exp(), s.advantages[t]
                term = -ratio * advantage
                if a.objective == "clip":
                    term = torch.maximum(term, -ratio.clamp(1 - a.clip_low, 1 + a.clip_high) * advantage)
                    if a.dual_clip is not None and advantage < 0:
                        term = term.clamp(max=-a.dual_clip * advantage)
                term = term * self._correction(s, t, old)
                if s.shown:
                    term = -logp.exp() / (logp.exp() + a.demonstration_gamma) * advantage
                if s.held[t]:
                    term = term + a.parameters["kl_cov"] * (logp - old).abs()
                total = total + term / tokens
                if a.needs_top:
                    total = total + self.beta * self._taught(of_tables[t], s.inputs[t]) / tokens
                elif a.kl.placement == "loss" and self.beta:  # k1, weighted by who sampled
                    total = total + self.beta * (logp - s.engine[t]).exp() * (logp - s.ref[t]) / tokens
                if self._right(s):
                    total = total - a.nll_coefficient * logp / right
        return total

    def _taught(self, said: Tensor, before: int) -> Tensor:
        """The divergence to the reference behind one token, over the tokens that it names and all others as one."""
        kl, ref = self.a.kl, self.reference[before].softmax(-1)
        named = sorted(range(len(ref)), key=lambda v: -float(ref[v]))[: kl.top_k]
        p, q = (torch.stack([*(x[v] for v in named), 1 - sum(x[v] for v in named)]) for x in (said.exp(), ref))
        mixed = kl.beta * q + (1 - kl.beta) * p
        return kl.beta * (q * (q / mixed).log()).sum() + (1 - kl.beta) * (p * (p / mixed).log()).sum()

    def _right(self, s: Said) -> bool:
        """Whether a completion is imitated."""
        replaced = s.cut and self.a.unfinished_reward is not None
        return s.raw >= self.config.eval.success_reward and not replaced

    def _old_kl(self, said: list[Said]) -> float:
        """k3 of KL(old‖current), the mean over the tokens that are trained on."""
        moved = [
            float(now) - old
            for s in said
            if s.trained
            for now, old in zip(logprobs(self.policy, s, routed=self.routed), s.old, strict=True)
        ]
        return statistics.fmean(math.exp(d) - 1 - d for d in moved)

    def _preference(self, said: list[Said], policy: Tensor) -> Tensor:
        p, beta = self.a.preference, self.a.preference.beta
        assert beta is not None
        sums = [logprobs(policy, s, routed=False).sum() for s in said]
        nll = [-x / len(s.targets) for x, s in zip(sums, said, strict=True)][::2]
        if not p.reference_free:
            sums = [x - sum(s.ref) for x, s in zip(sums, said, strict=True)]
        if p.per_token:
            sums = [x / len(s.targets) for x, s in zip(sums, said, strict=True)]

        def of_pair(best: Tensor, worst: Tensor) -> Tensor:
            if p.loss == "ipo":
                return (best - worst - 0.5 / beta) ** 2
            if p.loss == "orpo":
                odds = [x.exp() / (1 - x.exp()) for x in (best, worst)]
                return -beta * (odds[0] / (odds[0] + odds[1])).log()
            return -(beta * (best - worst) - p.target_margin).sigmoid().log()

        both = [(of_pair(x, y), of_pair(y, x)) for x, y in zip(sums[::2], sums[1::2], strict=True)]
        wrong = p.label_smoothing
        losses = [(1 - wrong) * right + wrong * turned for right, turned in both]
        return torch.stack([one + p.nll * of for one, of in zip(losses, nll, strict=True)]).mean()

    def _value_loss(self, said: list[Said], critic: Tensor) -> Tensor:
        terms, clip = [], self.a.critic.clip or math.inf
        for s in (s for s in said if s.trained):
            for x, old, wanted in zip(s.inputs, s.values, s.returns, strict=True):
                near = critic[x].clamp(old - clip, old + clip)
                terms.append(torch.maximum((critic[x] - wanted) ** 2, (near - wanted) ** 2) / 2)
        return torch.stack(terms).mean()


def logprobs(weights: Tensor, s: Said, *, routed: bool) -> Tensor:
    """[tokens]; a policy whose routers get the experts of odd inputs has other logits there."""
    out: Tensor = _table(weights, s, routed)[torch.arange(len(s.targets)), s.targets]
    return out


def entropies(weights: Tensor, s: Said, *, routed: bool) -> list[float]:
    """Nats over the whole vocabulary, of each token."""
    return [-sum(math.exp(x) * x for x in row) for row in _table(weights, s, routed).tolist()]


def _table(weights: Tensor, s: Said, routed: bool) -> Tensor:
    scale = torch.tensor([1.0 + (x % 2 if routed else 0) for x in s.inputs], dtype=torch.float64)
    return (weights[s.inputs] * scale[:, None]).log_softmax(-1)
