"""A learner that is transformers' forward, and two engines into which causes of a mismatch are planted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from rl_megatron.columns import Ragged
from rl_megatron.data.problems.prompts import Prompt
from rl_megatron.engines.local.engine import InProcessEngine, LocalEngine
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Batch, Completion, GenerationRequest, ParallelDims, Samples, Scores, Want
from rl_megatron.weights.layouts.families import read_shape
from tests.completions import completion
from tools.lab.mismatch.causes import Finding, Setting, TokenizerCheck, WeightCheck, judge
from tools.lab.mismatch.experiments import Bench, Outcomes, Parameters, run_experiments

VOCABULARY = 41
BOS, EOS = 39, 40
MAX_PROMPT, MAX_NEW = 24, 12


def make_model(seed: int = 7, **changes: Any) -> Qwen3MoeForCausalLM:
    """A tiny Qwen3-MoE with every weight random and large enough that distributions are uneven."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


@dataclass(kw_only=True)
class Learner:
    """Transformers' forward of all sequences."""

    model: Qwen3MoeForCausalLM
    temperature: float = 1.0

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        says: dict[Want, Callable[[Samples], Tensor]] = {
            "logprobs": self._logprobs,
            "routes": self._routes,
            "logits": lambda m: self._forward(m)[m.mask],
        }
        return {what: [[says[what](m) for m in row] for row in batch.micro_batches] for what in want}

    def _logprobs(self, samples: Samples) -> Tensor:
        logits = self._forward(samples) / self.temperature
        if isinstance(kept := samples.extra.get("kept"), Ragged):
            out = (kept.counts > 0)[:, None].repeat(1, VOCABULARY)
            out[torch.arange(len(kept)).repeat_interleave(kept.counts), kept.values.long()] = False
            logits = logits.masked_fill(out, -torch.inf)
        return logits.log_softmax(-1).gather(1, samples.targets[:, None])[:, 0]

    @torch.no_grad()
    def _forward(self, samples: Samples) -> Tensor:
        """Padding behind a sequence is seen by none of its positions."""
        sequences = samples.input_ids.split(samples.cu_seqlens.diff().tolist())
        padded = pad_sequence(list(sequences), batch_first=True)
        with taking(self.model, samples):
            logits = self.model(padded).logits.float()
        return torch.cat([row[: len(ids)] for row, ids in zip(logits, sequences, strict=True)])

    def _routes(self, samples: Samples) -> Tensor:
        """[N, L, k] by hooks on the routers."""
        seen: list[Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _m, _i, output: seen.append(output[2]))
            for layer in self.model.model.layers
        ]
        self._forward(samples)
        for hook in hooks:
            hook.remove()
        lengths = samples.cu_seqlens.diff()
        inside = torch.arange(int(lengths.max())) < lengths[:, None]
        return torch.stack(seen, 1)[inside.view(-1)].to(torch.uint8)


@contextlib.contextmanager
def taking(model: Qwen3MoeForCausalLM, samples: Samples) -> Iterator[None]:
    """The routers take the samples' routes, where there are any; padded as the sequences are."""
    hooks = []
    if "routes" in samples.extra:
        routes = list(samples.extra["routes"].long().split(samples.cu_seqlens.diff().tolist()))
        padded = pad_sequence(routes, batch_first=True).flatten(0, 1)
        for index, layer in enumerate(model.model.layers):

            def replace_choice(_m: Any, _i: Any, output: Any, chosen: Tensor = padded[:, index]) -> Any:
                logits = output[0]
                return logits, logits.gather(1, chosen).softmax(-1), chosen  # renormalized over the chosen

            hooks.append(layer.mlp.gate.register_forward_hook(replace_choice))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(kw_only=True)
class Embedded:
    """The embedded engine; ``change`` is made to requests, ``twist`` to completions."""

    engine: LocalEngine
    change: Callable[[GenerationRequest], GenerationRequest] = lambda request: request
    twist: Callable[[Completion], Completion] = lambda completion: completion

    def __post_init__(self) -> None:
        self._batched = InProcessEngine(self.engine)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return [self.twist(c) for c in await self._batched.generate(self.change(request))]


@dataclass(kw_only=True)
class Transformers:
    """Transformers' own ``generate`` with its own processors, its scores as log-probs."""

    model: Qwen3MoeForCausalLM
    options: dict[str, Any] = field(default_factory=dict)
    processor: Callable[[int], LogitsProcessor] | None = None
    raw: bool = False  # report what comes before the processors

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        p, prompt = request.params, torch.tensor([request.token_ids] * request.num_completions)
        torch.manual_seed(p.seed + 1)
        sampling = {"do_sample": True, "temperature": p.temperature, "top_p": p.top_p, "top_k": 0, **self.options}
        if p.temperature == 0:
            sampling = {"do_sample": False}
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=p.max_new_tokens,
            min_new_tokens=p.max_new_tokens,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([self.processor(prompt.shape[1])] if self.processor else []),
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **sampling,
        )
        tokens = out.sequences[:, prompt.shape[1] :]
        scores = torch.stack(out.logits if self.raw else out.scores, 1).float().log_softmax(-1)
        logprobs = scores.gather(2, tokens[:, :, None])[:, :, 0]
        pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return [completion(t, lp, finish="length", spans=((0, 1),)) for t, lp in pairs]


class SampledBefore(LogitsProcessor):
    """OpenAI's presence and frequency penalties, by a loop over what was sampled."""

    def __init__(self, prompt_length: int, *, presence: float = 0.0, frequency: float = 0.0) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self._prompt_length :].tolist()):
            for token in set(ids):
                scores[row, token] -= self._presence + self._frequency * ids.count(token)
        return scores


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model in all the forms that tests need."""

    model: Qwen3MoeForCausalLM
    shape: ModelShape
    tensors: dict[str, Tensor]  # of its checkpoint

    @classmethod
    def make(cls, folder: Path, **changes: Any) -> Policy:
        model = make_model(**changes)
        model.save_pretrained(folder)
        return cls(model=model, shape=read_shape(folder), tensors=load_file(folder / "model.safetensors"))

    def engine(self, dtype: torch.dtype = torch.float32, **changes: Any) -> Embedded:
        """A fresh embedded engine, of another shape where ``changes`` say so."""
        shape = replace(self.shape, **changes)
        engine = LocalEngine(shape, slots=64, dtype=dtype, device="cpu", max_length=MAX_PROMPT + MAX_NEW + 8)
        for name, tensor in engine.tensors.items():
            tensor.copy_(self.tensors[name])
        return Embedded(engine=engine)

    def check(self, engine: Embedded) -> WeightCheck:
        """What the engine holds against the checkpoint, to the bit."""
        held = engine.engine.tensors
        differing = tuple(n for n, t in held.items() if not torch.equal(t, self.tensors[n].to(t.dtype)))
        return WeightCheck(compared=len(held), total=len(held), differing=differing, how="to the bit")


def prompts(count: int = 10) -> list[Prompt]:
    chosen = torch.Generator().manual_seed(3)
    lengths = [1 + (5 * i) % MAX_PROMPT for i in range(count)]
    ids = [tuple(torch.randint(1, BOS, (length,), generator=chosen).tolist()) for length in lengths]
    return [Prompt(id=f"p{i}", text="", token_ids=x, answer="") for i, x in enumerate(ids)]


UNREAD = WeightCheck(compared=0, total=1, differing=(), how="(it gives none)")
UNTOLD = TokenizerCheck(compared=0, differing=(), how="the engine has no tokenizer")


def diagnose(
    learner: Any, engine: Any, *, weights: WeightCheck = UNREAD, tokenizer: TokenizerCheck = UNTOLD, **changes: Any
) -> dict[str, Finding]:
    """Findings by cause."""
    dtypes = {key: changes.pop(key, "float32") for key in ("learner_dtype", "engine_dtype")}
    replays, head_dtype = changes.pop("replays", False), changes.pop("head_dtype", None)
    served, planted = changes.pop("served", False), changes.pop("planted", {})
    bench = replace(
        Bench(
            learner=learner,
            engine=engine,
            dims=ParallelDims(),
            max_tokens=4096,
            vocab_size=VOCABULARY,
            temperature=learner.temperature,
            top_p=1.0,
            max_prompt_tokens=MAX_PROMPT,
            max_new_tokens=MAX_NEW,
            special_token_ids={"bos_token": BOS, "eos_token": EOS},
            columns=("routes",) if isinstance(engine, Embedded) else (),
        ),
        **changes,
    )
    configured = Parameters(temperature=bench.temperature, top_p=bench.top_p)
    setting = Setting(**dtypes, configured=configured, served=served, replays=replays, head_dtype=head_dtype)
    outcomes = replace(found_by(bench, worth=setting.noise), **planted)
    return {f.cause: f for f in judge(outcomes, setting, weights, tokenizer)}


def found_by(bench: Bench, *, worth: float) -> Outcomes:
    """Not as the loop's result: at its end ``asyncio.run`` writes that out, all tensors too, and drops the text."""
    outcomes: list[Outcomes] = []

    async def run() -> None:
        outcomes.append(await run_experiments(bench, prompts(), completions=3, worth=worth))

    asyncio.run(run())
    return outcomes[0]


def guilty(found: dict[str, Finding]) -> list[str]:
    return [cause for cause, finding in found.items() if finding.verdict == "guilty"]


def told(found: dict[str, Finding]) -> str:
    """The text that a failed assertion shows."""
    return "\n".join(f"{f.cause}: {f.verdict}: {f.evidence}" for f in found.values())


def requests_with(**changes: Any) -> Callable[[GenerationRequest], GenerationRequest]:
    """Send requests with other sampling parameters than the run's; greedy requests stay greedy."""

    def change(request: GenerationRequest) -> GenerationRequest:
        if request.params.temperature == 0:
            return request
        return replace(request, params=replace(request.params, **changes))

    return change
