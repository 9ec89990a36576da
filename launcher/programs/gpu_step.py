"""A learner's step on one device, in a process of its own: ``python -m launcher.programs.gpu_step PARENT``.

Standard input is the device, the number of a GPU and whether sizes are small; the answer is a line of JSON, of two
steps on one batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.processes.environment import inherited
from launcher.processes.parent import die_with
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.device import GPU

if TYPE_CHECKING:
    from torch import Tensor

    from rl_megatron.types import Samples

_SECONDS = {"cpu": 300.0, GPU: 120.0}
_SHOWN = 1500  # characters
_STEPS, _RATE = 2, 1e-3
LENGTH, SEQUENCES = 64, 8
TF32 = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
"""Variables that turn TF32 on, for torch and for cuBLAS, whatever a program sets; NVIDIA's containers set the first."""


def learner_of(device: str) -> LearnerSection:
    """Torch's layers in float32, which both devices compute alike."""
    return LearnerSection.model_validate(
        {"device": device, "layers": "torch", "max_tokens_per_micro_batch": LENGTH * SEQUENCES}
    )


def shape_of(small: bool) -> ModelShape:
    """A Qwen3-MoE of 180 million parameters; a small one has 0.1."""
    return ModelShape(
        num_layers=2 if small else 4,
        hidden_size=64 if small else 1024,
        num_heads=4 if small else 16,
        num_kv_heads=2 if small else 4,
        head_dim=16 if small else 64,
        num_experts=8 if small else 16,
        experts_per_token=2,
        expert_width=32 if small else 512,
        vocab_size=256 if small else 32768,
        rope_theta=1e4,
        norm_eps=1e-6,
        normalize_top_k=True,
        tie_embeddings=False,
        max_positions=LENGTH,
    )


def ask(device: str, number: int = 0, *, small: bool = False) -> dict[str, Any]:
    """The answer of a process, which sees GPUs only for ``device`` cuda and computes on the ``number``-th of those.

    It takes 300 seconds at most on the CPU, 120 on a GPU. Raises RLMegatronError with the process's last words.
    """
    with inherited(threads=max(1, len(os.sched_getaffinity(0)) // 2), device=device):
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "launcher.programs.gpu_step", str(os.getpid())],
                input=json.dumps({"device": device, "number": number, "small": small}),
                capture_output=True,
                text=True,
                env={**os.environ, **dict.fromkeys(TF32, "0")},
                timeout=_SECONDS[device],
            )
        except subprocess.TimeoutExpired as error:
            raise RLMegatronError(
                f"a step with learner.device={device} has not ended in {_SECONDS[device]:g} s:\n{_last(error.stderr)}"
            ) from error
    if done.returncode:
        raise RLMegatronError(f"a step with learner.device={device} failed:\n{_last(done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _last(said: str | bytes | None) -> str:
    """Words of a process; bytes are of one that was ended."""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said or ""
    return text.strip()[-_SHOWN:]


def steps(device: str, number: int = 0, *, small: bool) -> dict[str, Any]:
    """In this process: losses and gradient norms, the most bytes that the GPU held, its device and its name."""
    import torch

    from rl_megatron.algorithms.losses import CrossEntropy
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.types import StepResult

    learner, shape = learner_of(device), shape_of(small)
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        on = world.join(learner, rank=0, rendezvous=f"file://{folder}/rendezvous", seed=0, gpu=number)
        policy = make_policy(shape, learner, on, temperature=1.0)
        _fill(policy.tensors)
        policy.adopt()
        samples = _samples(shape.vocab_size)
        counts = {"num_tokens": LENGTH * SEQUENCES, "num_sequences": SEQUENCES}
        out: dict[str, Any] = {"losses": [], "norms": []}
        for _ in range(_STEPS):
            said = policy.backward([samples], CrossEntropy(), **counts)
            made = policy.step(_RATE)
            assert said is not None
            assert isinstance(made, StepResult)
            out["losses"].append(said["loss"].value)
            out["norms"].append(made.grad_norm)
        out["bytes"] = 0 if on.type == "cpu" else torch.cuda.max_memory_allocated(on)
        out["device"] = str(on)
        out["gpu"] = "" if on.type == "cpu" else torch.cuda.get_device_name(on)
        world.leave()
    return out


def _fill(tensors: Mapping[str, Tensor]) -> None:
    """Weights that are the same on every device.

    Rounding decides the sign of AdamW's first step where a gradient is almost 0, and so moves a weight by `_RATE`:
    routers have larger weights, so that this changes no token's experts.
    """
    import torch

    for number, name in enumerate(sorted(tensors)):
        shape = tensors[name].shape
        scale = 0.5 if "router" in name else 0.02
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * scale
        tensors[name].copy_(torch.ones(shape) if "norm" in name else drawn)


def _samples(vocabulary: int) -> Samples:
    import torch

    from rl_megatron.types import Samples

    count = LENGTH * SEQUENCES
    ids, targets = torch.randint(0, vocabulary, (2, count), generator=torch.Generator().manual_seed(1))
    zeros = torch.zeros(count)
    return Samples(
        input_ids=ids,
        targets=targets,
        mask=torch.ones(count, dtype=torch.bool),
        advantages=zeros,
        rollout_logprobs=zeros,
        old_logprobs=zeros,
        cu_seqlens=torch.arange(0, count + 1, LENGTH),
    )


def main() -> None:
    """Read what is asked, make the steps and print the answer."""
    die_with(int(sys.argv[1]))
    asked = json.load(sys.stdin)
    own = os.dup(1)
    os.dup2(2, 1)  # what libraries print, as NCCL its version, goes to the last words
    with os.fdopen(own, "w") as answer:
        json.dump(steps(asked["device"], asked["number"], small=asked["small"]), answer)


if __name__ == "__main__":
    main()
