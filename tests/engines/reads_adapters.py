"""Run by vLLM's interpreter: log-probs of a text by a model alone, and with an adapter's folder. Writes them as JSON.

``python reads_adapters.py MODEL ADAPTER RANK OUT``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

TEXT = list(range(30, 50))


def main(model: str, adapter: str, rank: int, out: Path) -> None:
    """Start vLLM in this process and its children, and ask it twice."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(
        model=model,
        enable_lora=True,
        max_lora_rank=rank,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
    )
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for lora in (None, LoRARequest("adapter", 1, adapter)):
        (answer,) = engine.generate({"prompt_token_ids": TEXT}, wanted, lora_request=lora)
        found.append([next(iter(token.values())).logprob for token in answer.prompt_logprobs[1:]])
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
