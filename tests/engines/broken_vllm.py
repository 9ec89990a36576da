"""vLLM's worker extension without the work-around for packed experts, as a test's server loads it."""

from __future__ import annotations

from rl_megatron.rollout import vllm_worker

vllm_worker.forget_packed_experts = lambda model: None


class WorkerExtension(vllm_worker.WorkerExtension):
    """See vllm_worker."""
