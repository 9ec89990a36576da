"""What a cell must see: transformers' model, AdamW and Muon of torch, and losses and adapters by their formulas."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.algorithms.segments import sequence_ids
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Batch, LossInputs, Samples
from rl_megatron.weights.layouts.families import read_shape
from tests.draft_models import WrittenDraft
from tests.family_models import write_model
from tests.matrix.cells import BALANCE, Cell, has_values, named
from tests.matrix.probes import (
    CLIP,
    COEFFICIENT,
    LOSS,
    TEMPERATURE,
    VALUE_LAYER,
    Drawn,
    first_values,
    layouts_of,
    make_samples,
    of_adapters,
    packed,
    prompt_of,
    rate,
    texts,
)
from tests.samples import values


@dataclass(kw_only=True)
class Wanted:
    """Of two steps what a rank says, and the tensors of files after them."""

    logits: Sequence[Tensor] = ()  # of each text [L - 1, V], at temperature 1, before the first step
    values: Sequence[Tensor] = ()  # of each text [L - 1], with a value layer
    routes: Sequence[Tensor] = ()  # of each text [L - 1, MoE layers, top_k], sorted
    steps: list[dict[str, float]] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    merged: Mapping[str, Tensor] = field(default_factory=dict)  # with adapters


class Routers:
    """The routers of transformers' model: what they were given and chose in each pass over the texts."""

    def __init__(self, model: Any, folder: Path, samples: Samples) -> None:
        self.shape, self.samples = read_shape(folder), samples
        names = [n for n, m in model.named_modules() if hasattr(m, "top_k") and getattr(m, "weight", None) is not None]
        self.modules = [model.get_submodule(name) for name in names]
        self.logits: list[list[Tensor]] = [[] for _ in self.modules]
        self.chosen: list[list[Tensor]] = [[] for _ in self.modules]
        self._rerouted: list[Tensor] = []
        self.text, self.records = 0, True
        for number, module in enumerate(self.modules):
            module.register_forward_hook(lambda one, _, said, number=number: self._seen(number, one, said))

    def _seen(self, number: int, module: Any, said: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, own = said
        chosen = own
        if "routes" in self.samples.extra:
            first, stop = self.samples.cu_seqlens[self.text : self.text + 2].tolist()
            chosen = self.samples.extra["routes"][first:stop, number].long()
            weights = self._weights(module, logits, chosen)
        if self.records:
            self.logits[number].append(logits)
            self.chosen[number].append(chosen)
            self._rerouted.append((own.sort(-1).values != chosen.sort(-1).values).any(-1))
        return logits, weights, chosen

    def _weights(self, module: Any, logits: Tensor, chosen: Tensor) -> Tensor:
        if self.shape.router.logit_bias:  # gpt-oss
            return logits.gather(1, chosen).softmax(-1)
        scores = self._scores(logits).gather(1, chosen)
        if self.shape.normalize_top_k:
            scores = scores / scores.sum(-1, keepdim=True)
        return scores * self.shape.router.scaling

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.shape.router.score == "sigmoid" else logits.softmax(-1)

    def pass_over(self, model: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The logits of each text."""
        for kept in (*self.logits, *self.chosen, self._rerouted):
            kept.clear()
        found = []
        for self.text, text in enumerate(texts()):
            found.append(model(text[None, :-1]))
        return found

    def routes(self) -> list[Tensor]:
        """What was chosen in each text [L - 1, MoE layers, top_k], sorted."""
        return [torch.stack(text, 1).sort(-1).values for text in zip(*self.chosen, strict=True)]

    def load(self) -> dict[str, float]:
        """What routers' observers say: of all positions, not those of padding, and of layers once."""
        every = [torch.cat(chosen).flatten() for chosen in self.chosen]
        load = torch.stack([one.bincount(minlength=self.shape.num_experts) for one in every]).float()
        rerouted = {"moe/rerouted_fraction": float(torch.cat(self._rerouted).double().mean())}
        return {
            **(rerouted if "routes" in self.samples.extra else {}),
            "moe/load_imbalance": float((load.amax(1) / load.mean(1)).max()),
            "moe/dead_experts": float((load == 0).float().mean()),
        }

    def balance(self, batch: Batch) -> dict[str, Tensor]:
        """Each loss that balances experts, as a sum over layers."""
        rows = [[self._tokens(ids.tolist()) for ids in row] for row in batch.sequences]
        found = [self._of_layer(torch.cat(logits), rows) for logits in self.logits]
        return {kind: torch.stack([of_layer[kind] for of_layer in found]).sum() for kind in BALANCE}

    def _tokens(self, sequences: Sequence[int]) -> Tensor:
        """The trained tokens of the sequences."""
        cu = self.samples.cu_seqlens.tolist()
        found = torch.cat([torch.arange(cu[i], cu[i + 1]) for i in sequences])
        return found[self.samples.mask[found]]

    def _of_layer(self, logits: Tensor, rows: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        p = self._scores(logits) / self._scores(logits).sum(1, keepdim=True)
        top_k, experts, total = self.shape.experts_per_token, p.shape[1], int(self.samples.mask.sum())
        hot = torch.zeros_like(p).scatter_(1, p.topk(top_k).indices, 1.0)

        def loss(mine: Tensor, load: Tensor) -> Tensor:
            """Switch's of the tokens ``mine``, with the load of ``load``, weighted by its tokens."""
            return experts * (hot[load].mean(0) / top_k * p[mine].mean(0)).sum() * len(mine) / total

        so_far = [torch.cat([x for row in rows for x in row[: m + 1]]) for m in range(len(rows[0]))]
        each = [self._tokens([i]) for i in range(self.samples.num_sequences)]
        return {
            "aux_loss": torch.stack([loss(x, x) for row in rows for x in row]).sum(),
            "seq_aux_loss": torch.stack([loss(x, x) for x in each]).sum(),
            "global_aux_loss": torch.stack(
                [loss(x, so_far[m]) for row in rows for m, x in enumerate(row) if len(x)]
            ).sum(),
            "z_loss": logits.logsumexp(1).square()[self.samples.mask].mean(),
        }

    @torch.no_grad()
    def move_biases(self, rate: float) -> None:
        """Against the load of the trained tokens."""
        for module, chosen in zip(self.modules, self.chosen, strict=True):
            load = torch.cat(chosen)[self.samples.mask].flatten().bincount(minlength=self.shape.num_experts).float()
            module.e_score_correction_bias += rate * (load.mean() - load).sign()


class Adapters:
    """Adapters by the names of files, and the model's weights with them merged."""

    def __init__(self, folder: Path, learner: LearnerSection) -> None:
        ranks, hf = layouts_of(folder, LearnerSection.model_validate({"lora": learner.lora.model_dump()}))
        shapes = of_adapters(ranks, hf, learner)[1].local_shapes(0)
        source, self._scale = Drawn(folder, shapes, 3), learner.lora.alpha
        self.held = {
            n: source.read(n, tuple((0, size) for size in shape)).requires_grad_() for n, shape in shapes.items()
        }
        self._files = load_file(folder / "model.safetensors")

    def merged(self) -> dict[str, Tensor]:
        """The tensors of files with alpha / rank * B A added."""
        out = dict(self._files)
        for name, a in self.held.items():
            if ".lora_A." in name:
                weight = name.replace(".lora_A.", ".")
                out[weight] = out[weight] + self._scale / len(a) * self.held[name.replace("lora_A", "lora_B")] @ a
        return out


def as_modules(files: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Under the names of transformers' modules, which hold the experts of a layer in one tensor."""
    experts: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    out = {}
    for name, tensor in files.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            experts[found[1], found[3]][int(found[2])] = tensor
        else:
            out[name] = tensor
    stacks = {key: torch.stack([held[e] for e in range(len(held))]) for key, held in experts.items()}
    for (place, part), stack in stacks.items():
        if part == "gate":
            out[f"{place}.gate_up_proj"] = torch.cat([stack, stacks[place, "up"]], 1)
        elif part == "down":
            out[f"{place}.down_proj"] = stack
    known = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    return {name: tensor for name, tensor in out.items() if name in known}


def adamw(named: Mapping[str, Tensor], learner: LearnerSection) -> torch.optim.AdamW:
    """Only matrices decay."""
    section = learner.optimizer
    decays = {name: p.dim() > 1 and not name.endswith("bias") for name, p in named.items()}
    groups = [
        {
            "params": [p for name, p in named.items() if decays[name] is kind],
            "weight_decay": kind * section.weight_decay,
        }
        for kind in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], rate(learner), (section.beta1, section.beta2), section.eps
    )


class Muon:
    """torch.optim.Muon, in the learner's precision, for the matrices of layers, and AdamW for the rest."""

    def __init__(self, named: Mapping[str, Tensor], learner: LearnerSection, shape: ModelShape) -> None:
        parts = {name: matrices(name, p.detach(), shape) for name, p in named.items()}
        self._adamw = adamw({name: p for name, p in named.items() if not parts[name]}, learner)
        self._views = [(views, p) for name, p in named.items() if (views := parts[name])]
        self._stepped = [[torch.nn.Parameter(view.flatten(0, -2)) for view in views] for views, _ in self._views]
        each, section = [p for parts in self._stepped for p in parts], learner.optimizer
        self._muon = torch.optim.Muon(
            each, rate(learner), weight_decay=section.weight_decay, adjust_lr_fn=section.muon.scale
        )
        self._named, self._shape = {id(p): name for name, p in named.items()}, shape

    def zero_grad(self) -> None:
        self._adamw.zero_grad()
        for _, p in self._views:
            p.grad = None

    def step(self) -> None:
        for (_, p), stepped in zip(self._views, self._stepped, strict=True):
            assert p.grad is not None
            for one, grad in zip(stepped, matrices(self._named[id(p)], p.grad, self._shape), strict=True):
                one.grad = grad.flatten(0, -2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            self._muon.step()
        self._adamw.step()
        for (views, _), stepped in zip(self._views, self._stepped, strict=True):
            for view, one in zip(views, stepped, strict=True):
                view.copy_(one.detach().view_as(view))


def matrices(name: str, p: Tensor, shape: ModelShape) -> list[Tensor]:
    """Views of the matrices that Muon steps in a parameter of transformers, of each all but the last dimension are
    rows; none where AdamW steps it. Experts' are [E, 2f, h], gate above up, and [E, h, f]; gpt-oss' are transposed,
    with gate and up interleaved. A delta net's, and queries with gates, have a group of rows for each head."""
    if ".layers." not in name or p.dim() < 2 or "bias" in name or "conv1d" in name or min(p.shape) == 1:
        return []
    if p.dim() == 3 and shape.expert_bias:
        cuts = (slice(0, None, 2), slice(1, None, 2)) if "gate_up" in name else (slice(None),)
        return [expert[:, cut].T for expert in p for cut in cuts]
    if p.dim() == 3:
        return [half for expert in p for half in expert.chunk(2 if "gate_up" in name else 1)]
    if name.endswith("q_proj.weight") and shape.output_gate:
        return list(p.unflatten(0, (-1, 2, shape.head_dim)).unbind(1))
    m = shape.delta
    sizes = {
        "in_proj_qkvz": m and (m.key_dim, m.key_dim, m.ratio * m.value_dim, m.ratio * m.value_dim),
        "in_proj_ba": m and (m.ratio, m.ratio),
    }
    if rows := sizes.get(name.split(".")[-2]):
        return list(p.unflatten(0, (-1, sum(rows))).split(rows, 1))
    if m and name.endswith("in_proj_qkv.weight"):
        return list(p.split((m.key_heads * m.key_dim, m.key_heads * m.key_dim, m.value_heads * m.value_dim)))
    return [p]


def loss_of(logits: Sequence[Tensor], samples: Samples, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss of all texts at once, and its metrics."""
    said = (torch.cat(list(logits)) / TEMPERATURE).log_softmax(-1)
    ids = sequence_ids(samples.cu_seqlens)
    output = LOSS(
        LossInputs(
            logprobs=said.gather(1, samples.targets[:, None])[:, 0],
            entropy=-(said.exp() * said).sum(-1),
            old_logprobs=samples.old_logprobs,
            rollout_logprobs=samples.rollout_logprobs,
            advantages=samples.advantages,
            mask=samples.mask,
            segment_ids=ids,
            segment_sum=lambda x: x.new_zeros(samples.num_sequences).index_add(0, ids, x),
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
        )
    )
    return output.loss, values(output)


def as_held(tensor: Tensor, learner: LearnerSection) -> Tensor:
    """Weights as the learner starts from them."""
    return tensor if learner.dtype == "float32" else rounded(tensor)


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def clipped(tensors: Sequence[Tensor], most: float) -> float:
    return float(torch.nn.utils.clip_grad_norm_([t for t in tensors if t.grad is not None], most or math.inf))


def wanted(cell: Cell, folder: Path, model: Any, to: Path, last: LearnerSection) -> Wanted:
    """Two steps of ``model``, which has the folder's weights and changes; it writes files under ``to``. ``last`` says
    how the second one is packed."""
    learner, shape, found = cell.learner, read_shape(folder), Wanted()
    samples = make_samples(shape, cell.features)
    start = {name: as_held(tensor, learner) for name, tensor in load_file(folder / "model.safetensors").items()}
    for p in model.parameters():
        p.data = as_held(p.data, learner)
    routers = Routers(model, folder, samples)
    adapters = Adapters(folder, learner) if learner.lora.rank is not None else None
    draft = Draft(folder, learner) if learner.draft.train else None
    values = Values(model, cell.features) if has_values(cell.features) else None
    for name, p in model.named_parameters():
        p.requires_grad_(adapters is None and not (learner.router.frozen and is_router(name)))
    if values and values.alone and not shape.tie_embeddings:
        model.get_output_embeddings().requires_grad_(False)
    trained = adapters.held if adapters else {n: p for n, p in model.named_parameters() if p.requires_grad}
    trained |= values.held if values else {}
    beside = {name: t for one in (adapters, draft, values) if one for name, t in one.held.items()}
    muon = learner.optimizer.name == "muon"
    optimizer = Muon(trained, learner, shape) if muon else adamw(trained, learner)
    found.start = start | {n: t.detach().clone() for n, t in beside.items()}
    for batch in (packed(samples, learner), packed(samples, last)):
        given = as_modules(adapters.merged(), model) if adapters else {}
        logits = routers.pass_over(lambda ids, given=given: torch.func.functional_call(model, given, (ids,)).logits[0])
        loss, metrics = values.loss_of(logits, samples, batch) if values else loss_of(logits, samples, batch)
        said = {name: float(value.detach()) for name, value in metrics.items() if value.dim() == 0}
        said["loss"] = loss.item()
        if routers.modules:
            said |= routers.load()
        if "balance" in cell.features:
            of_balance = routers.balance(batch)
            loss = loss + sum(BALANCE[kind] * value for kind, value in of_balance.items())
            said |= {f"moe/{kind}": value.item() / len(routers.modules) for kind, value in of_balance.items()}
        said |= draft.step(model, routers, batch) if draft else {}
        optimizer.zero_grad()  # the draft layer's loss had some through the head
        loss.backward()  # type: ignore[no-untyped-call]
        said["norm"] = clipped([*trained.values()], learner.optimizer.clip_grad)
        optimizer.step()
        if "biases" in cell.features:
            routers.move_biases(learner.router.bias_update_rate)
        found.steps.append(said)
        found.logits = found.logits or [one.detach() for one in logits]
        found.values = found.values or (values.first if values else ())
        found.routes = found.routes or routers.routes()
    write_model(named(cell.model)[0], model, to)
    found.tensors = load_file(to / "model.safetensors") | {name: t.detach() for name, t in beside.items()}
    found.merged = {name: t.detach() for name, t in adapters.merged().items()} if adapters else {}
    return found


def is_router(name: str) -> bool:
    return ".mlp.gate." in name or ".mlp.router." in name


class Values:
    """A linear layer on the hidden states that the output layer reads: in its place, or beside it."""

    def __init__(self, model: Any, features: Sequence[str]) -> None:
        self.alone, head = "critic" in features, model.get_output_embeddings()
        weight, bias = ("score.weight", "output_layer.bias") if self.alone else VALUE_LAYER
        shapes = {weight: (1, head.in_features), bias: (1,)}
        self.held = {name: first_values(shape).requires_grad_() for name, shape in shapes.items()}
        self._layer, self._hidden = [self.held[weight], self.held[bias]], list[Tensor]()
        self.first: Sequence[Tensor] = ()
        head.register_forward_pre_hook(lambda _, inputs: self._hidden.append(inputs[0][0]))

    def loss_of(self, logits: Sequence[Tensor], samples: Samples, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Half the larger of two squares, by the value and by one near the old (PPO's); beside it the policy's."""
        each = [torch.nn.functional.linear(hidden, *self._layer)[:, 0] for hidden in self._hidden]
        self._hidden.clear()
        self.first = self.first or [one.detach() for one in each]
        values, old, returns = (
            column[samples.mask] for column in (torch.cat(each), samples.old_values, samples.returns)
        )
        free, near = (values - returns) ** 2, (values.clamp(old - CLIP, old + CLIP) - returns) ** 2
        loss = torch.maximum(free, near).sum() / 2 / batch.num_tokens
        means = {"critic/value_mean": values.mean(), "critic/clip_fraction": (near > free).float().mean()}
        if self.alone:
            return loss, means
        of_policy, metrics = loss_of(logits, samples, batch)
        return of_policy + COEFFICIENT * loss, {**metrics, **means, "critic/loss": loss}


class Draft:
    """The draft layer beside a policy, by its formula, under the names of files."""

    def __init__(self, folder: Path, learner: LearnerSection) -> None:
        self._folder, self._learner = folder, learner
        first = WrittenDraft(folder)
        self.held = {first.file_name(n): t.detach().clone().requires_grad_() for n, t in first.held.items()}
        frozen = [name for name in self.held if learner.router.frozen and is_router(name)]
        for name in (*frozen, *(name for name in self.held if "e_score_correction_bias" in name)):
            self.held[name].requires_grad_(False)
        self.optimizer = adamw({n: t for n, t in self.held.items() if t.requires_grad}, learner)

    def step(self, model: Any, routers: Routers, batch: Batch) -> dict[str, float]:
        """A step beside the policy as it is before its own."""
        written = WrittenDraft(self._folder)
        written.model, routers.records = model, False
        written.held = {name: self.held[written.file_name(name)] for name in written.held}
        loss = torch.zeros(())
        for i, text in enumerate(texts()):
            routers.text = i
            said = (written.logits(text) / TEMPERATURE).log_softmax(-1)
            trained = torch.arange(2, len(text)) >= prompt_of(i)
            loss = loss - (said.gather(1, text[2:, None])[:, 0] * trained).sum() / batch.num_tokens
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        routers.records = True
        norm = clipped([*self.held.values()], self._learner.optimizer.clip_grad)
        self.optimizer.step()
        return {"draft/loss": loss.item(), "draft/grad_norm": norm}
