"""What the planner's terms of time and memory are made of, and what makes each smaller, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rl_megatron.config.sections.teachers import TEACHER
from rl_megatron.errors import ConfigError
from rl_megatron.options import table as options
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.planner.fitting import PlannedRun
from rl_megatron.scaling.planner.layouts import CHANGES_TOGETHER

SECONDS: Mapping[str, str] = {
    "linears": "products of attention's projections, dense and shared MLPs and routers, forward and twice backward; "
    "fewer with a larger tp, which makes each narrower and slower for its size",
    "experts": "grouped products of the experts, whose rows are a micro-batch's tokens times the experts of a token "
    "over those of a rank; faster with a larger ep or max_tokens_per_micro_batch, which give an expert more rows",
    "attention": "scores and values of causal attention, 2.5 times the forward pass in the backward pass; grows with "
    "the length of sequences",
    "between products": "norms, residuals, rotary embeddings, activations and permuted rows, which pass over the GPU's "
    "memory",
    "all-to-all": "tokens to the ranks of their experts and back, forward and backward, over the slower of NVLink and "
    "the network; less with ep inside NVLink's domain, or with learner.dispatcher=deepep between nodes",
    "tensor parallel": "all-gathers and reduce-scatters of hidden states over NVLink; none with tp=1",
    "context parallel": "keys and values that ranks hand on to one another; none with cp=1",
    "computed again": "forward passes of what learner.recompute does not keep",
    "output layer": "logits, log-probs and their gradients, on the last stage; shown where that is the slowest",
    "draft layers": "the draft layer that is trained on the last stage (learner.draft.train), forward and backward",
    "host": "launches of kernels where they take longer than the kernels; less with longer micro-batches",
    "activations on the host": "what copies of activations to the host's memory and back take longer than their layer "
    "(learner.offload.activations); less with longer micro-batches",
    "between stages": "hidden states from stage to stage, and their gradients back",
    "bubble": "stages that wait while the pipeline fills and drains; less with fewer stages, a larger vpp, or more "
    "micro-batches: a smaller dp or fewer minibatches",
    "gradients, parameters": "reduce-scatter of gradients and all-gather of parameters after the last micro-batch; "
    "less with learner.overlap, or learner.gradient_dtype=bfloat16",
    "optimizer": "AdamW's passes over its share of the state",
    "orthogonalisation": "products of Muon's iteration, over its share of the matrices (learner.optimizer.name=muon); "
    "less with a larger dp",
    "optimizer on the host": "copies over PCIe and AdamW on the host's cores (learner.offload.optimizer)",
    "fixed": "what a step costs whatever it does: clipping, counting, logging",
    "training": "forward and backward passes of all minibatches and epochs, with the optimizer's steps",
    "log-probs": "one forward pass of the policy over the batch before it is trained on (algorithm.old_logprobs)",
    "reference": "one forward pass of the reference, for the KL term",
    "critic": "training of the critic, counted as the policy's, and one forward pass for its values",
    "push": "weights over the slowest link of the busiest rank, and a pause of the servers",
    "turns": "the optimizer's state to the host's memory and back, while servers sample on the same GPUs",
    "rollout": "prompts, then a token after the other for all rows that are left: each reads the weights that some row "
    "uses and the rows' cache; the longest completions end nearly alone",
    "reward models": "what the slowest reward model on ranks takes for the batch beyond the rollout's seconds; less "
    "with more ranks for it (roles.layouts.reward_NAME)",
    "waiting for the longest": "what the longest completion takes over train.max_staleness steps; less with more "
    "staleness, or a smaller rollout.max_new_tokens",
}
TEACHER_SECONDS = "one forward pass of the teacher over the batch, as if it judged all that is sampled"
"""What the role of each teacher on ranks takes; its name is the user's."""


def explain_term(term: str, plan: PlannedRun) -> Iterator[str]:
    """Lines about a term: its number in a plan, what it is, what makes it smaller. Raises ConfigError for others."""
    changes = {**CHANGES_TOGETHER, **options.changes()}
    in_memory = plan.footprint.terms
    known = {**SECONDS, **{role: TEACHER_SECONDS for role in plan.step.parts if role.startswith(TEACHER)}}
    if term not in known and term not in in_memory:
        raise ConfigError(f"--explain {term}: no such term; terms: {', '.join([*known, *in_memory])}")
    for of, terms in (("a step", plan.step.parts), ("training in a step", plan.step.training)):
        if term in terms:
            yield f"{term}: {terms[term]:,.2f} s of {of}"
    if term in known:
        yield f"{term}: {known[term]}"
    if term in in_memory:
        held, rank = plan.footprint, f"rank {plan.footprint.rank}, stage {plan.footprint.stage}"
        change = changes.get(term, "choose other degrees")
        yield f"{term}: {in_memory[term] / GB:,.2f} GB of {held.total / GB:,.1f} on {rank}; to lower it, {change}"
