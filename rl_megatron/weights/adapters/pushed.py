"""The writer's side of pushes of adapters: a folder of peft for each version, in each node's memory or a shared one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron.config.run import RunConfig
from rl_megatron.files import naming, publish_folder, remove_folder
from rl_megatron.weights.adapters.files import PREFIX, peft_config
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.lora import hf_adapters, learner_adapters, ranks_of_parts
from rl_megatron.weights.plans.plan import plan_into_copies
from rl_megatron.weights.push.beside import ADAPTERS, adapters_folder
from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging


class AdapterFolders:
    """Writes ``tensors``, by peft's names without its prefix, for servers that find their model at ``mirror``.

    They are in host memory, whatever the learner runs on.
    """

    def __init__(
        self, mirror: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, config: Mapping[str, object]
    ) -> None:
        self._mirror, self._config = mirror, json.dumps(config, indent=2) + "\n"
        self.tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self.name = ""
        """Of the next folder."""

    def withdraw(self) -> None:
        """Nothing: a folder that is there stays as it is."""

    def serve(self, version: int) -> None:
        """Write the folder of ``name``, whole or not at all."""
        final = adapters_folder(self._mirror, self.name)
        work = final.with_name(f".{final.name}.partial")
        for left in (work, final):  # of a push that failed
            remove_folder(left)
        work.parent.mkdir(exist_ok=True)
        work.mkdir()
        with naming(final):
            save_file({PREFIX + name: tensor for name, tensor in self.tensors.items()}, work / ADAPTERS)
        (work / "adapter_config.json").write_text(self._config)
        publish_folder(work, final)

    def keep(self, names: Collection[str]) -> None:
        """Remove all other folders."""
        beside = adapters_folder(self._mirror, "any").parent
        for folder in beside.iterdir() if beside.is_dir() else ():
            if folder.name not in names:
                remove_folder(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEnds:
    """A rank's ends of the moves of adapters; ``folders`` on the ranks that write them."""

    staging: Staging
    folders: AdapterFolders | None


def adapter_ends(
    config: RunConfig,
    learner: Layout,
    hf: Layout,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    writers: Sequence[Sequence[int]],
    mirror: Path,
    model: Path,
) -> AdapterEnds:
    """The ends of this ``rank`` of the ``learner``, whose adapters are ``tensors``. Collective.

    One of ``writers`` writes the folder beside each file at ``mirror``. ``model`` is the folder of the model.
    """
    lora, shape = config.learner.lora, learner.shape
    src, dst = learner_adapters(learner, lora), hf_adapters(hf, ranks_of_parts(learner, lora))
    folders = None
    if any(rank in group for group in writers):
        dtype = getattr(torch, config.learner.dtype)
        folders = AdapterFolders(mirror, dst.local_shapes(0), dtype, peft_config(lora, shape, model))
    transport = ProcessGroupTransport(
        plan_into_copies(src, dst, writers),
        src=dict(tensors),
        dst={} if folders is None else folders.tensors,
        bucket_bytes=config.weights.bucket_mb * 2**20,
    )
    return AdapterEnds(staging=Staging(transport, folders), folders=folders)
