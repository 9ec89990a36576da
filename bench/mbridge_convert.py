"""Convert a Qwen3-MoE as users of mbridge do, through a model in memory: the baseline of bench.convert.

    python -m bench.mbridge_convert to_megatron|to_hf SOURCE OUT

mbridge fills and empties a model; megatron's dist_checkpointing writes and reads it. One process, all threads.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from mbridge.core import auto_bridge
from megatron.core import dist_checkpointing
from transformers import AutoConfig

import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here, before others bind its functions
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner import world
from rl_megatron.learner.checkpoint import loading
from rl_megatron.learner.model.build import build_chunks, make_config
from rl_megatron.weights.formats.hf_folder import companions
from rl_megatron.weights.layouts.families import read_shape


def main() -> None:
    """Convert, leave OUT."""
    direction, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    learner = LearnerSection(dtype="bfloat16")
    with tempfile.TemporaryDirectory() as scratch:
        world.init_process_groups(learner, rank=0, rendezvous=f"file://{scratch}/rendezvous", seed=1)
        shape = read_shape(source)
        (model,) = build_chunks(shape, learner, make_config(shape, learner))
        config = AutoConfig.from_pretrained(source)
        config.rope_theta = config.rope_parameters["rope_theta"]
        bridge = auto_bridge._MODEL_REGISTRY["qwen3_moe"](config, dtype=torch.bfloat16)
        with torch.no_grad():
            if direction == "to_megatron":
                bridge.load_weights([model], str(source))
                out.mkdir()
                dist_checkpointing.save(model.sharded_state_dict(), str(out))
            else:
                loading.load_weights(source, [model])
                bridge.safetensor_io = bridge._get_safetensor_io(str(source))
                bridge.save_weights([model], str(out))
        for path in {*companions(source), source / "config.json"}:
            (out / path.name).write_bytes(path.read_bytes())
        world.destroy_process_groups()


if __name__ == "__main__":
    main()
