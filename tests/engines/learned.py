"""Tiny models of sizes that engines' CPU kernels have, and real learner ranks that push each on request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from launcher.controller.roles import WeightGroup
from launcher.runs.folder import mirror_path
from launcher.wire import Setup
from launcher.worker.learner_rank import LearnerRank
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.models.tiny import byte_tokenizer
from tests.distributed.ranks import LIMIT
from tests.family_models import BASE, DENSE, MODELS
from tests.forks import FORKS

SHARED = "qwen3_moe"  # the family of `conftest.models`
SIZES: Mapping[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 32,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
KERNELS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {**HEADS, "moe_intermediate_size": None},
    "olmoe": {**HEADS, "moe_intermediate_size": None, "intermediate_size": 32},
    "deepseek_v3": {  # a head's sizes are the model's own: vLLM's decoding kernel has no others
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-6,
        # Engines' tables end at this times the factor.
        "rope_parameters": {**MODELS["deepseek_v3"][1]["rope_parameters"], "original_max_position_embeddings": 128},
    },
}
KERNELS = {
    **KERNELS,
    "glm4_moe_lite": {**KERNELS["deepseek_v3"], "mlp_layer_types": ["dense", "sparse"]},
    "hy_v3": {"head_dim": 32, "mlp_layer_types": ["dense", "sparse"]},
}
"""What differs from `family_models.MODELS` beside `SIZES`."""
NOT_WRITTEN = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "glm4_moe_lite": {"topk_method": "noaux_tc", "first_k_dense_replace": 1},
    "hy_v3": {"expert_hidden_dim": 32, "first_k_dense_replace": 1, "route_norm": True, "qk_norm": True},
}
"""Keys of the published config.json that transformers does not write, and engines read."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of a learner, and which of a family's models it holds: each has another, so that pushes differ."""

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    seed: int


LAYOUTS: Mapping[str, Layout] = {
    "tp2-ep2": Layout(sparse=("learner.tp=2", "learner.ep=2"), dense=("learner.tp=2", "learner.ep=1"), seed=1),
    "pp2-ep2": Layout(sparse=("learner.pp=2", "learner.ep=2"), dense=("learner.pp=2", "learner.ep=1"), seed=2),
}
"""Name -> layout; the version of its push is the seed."""


def save_model(name: str, folder: Path, seed: int, **others: Any) -> Path:
    """The folder of a family's model, with weights so wide that a wrong bias or route shows; with ``others`` sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, differing = MODELS[name]
    sizes = {**BASE, **differing, **SIZES, **KERNELS[name], **others}
    config = AutoConfig.for_model(kind, **{key: value for key, value in sizes.items() if value is not None})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for key, value in model.state_dict().items():
            is_scale = key.endswith("norm.weight")
            value.normal_(1.0 if is_scale else 0.0, 0.1 if value.dim() == 1 else 0.5 * value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)  # vLLM does not start without
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **NOT_WRITTEN.get(name, {})}))
    return folder


def config_of(root: Path, name: str, layout: str) -> RunConfig:
    """A run whose learner has the layout, and whose servers read mirrors under ``root``."""
    chosen = LAYOUTS[layout]
    degrees = chosen.dense if name in DENSE else chosen.sparse
    return load_config(
        "tiny_cpu", [*degrees, "rollout=vllm", "learner.threads=1", f"weights.folder={root}", "weights.delta=false"]
    )


def mirror_of(root: Path, name: str, layout: str) -> Path:
    """The file that the learner's push wrote."""
    return mirror_path(config_of(root, name, layout), root / name / layout)


def folder_of(root: Path, name: str, seed: int) -> Path:
    """The folder of a family's model for a seed."""
    return root / name / f"model-{seed}"


class Ranks:
    """Learner ranks that hold one model in one layout at a time, for who has the ``turn``; see worker.Worker.CALLS.

    Each model gets processes of its own: megatron's gradient hooks keep a model and its thirty groups for as long as a
    process lives, and each group polls its sockets a hundred times a second.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self.world_size = 0  # of the layout that is held

    def hold(self, config: RunConfig, model: Path, run_folder: Path) -> None:
        """Hold another model, or in another layout."""
        self.close()
        run_folder.mkdir(parents=True)
        self.world_size = config.learner.dims.world_size
        rendezvous = f"file://{run_folder}/rendezvous"
        setup = Setup(config=config, model_folder=model, run_folder=run_folder, rendezvous=rendezvous)
        for rank in range(self.world_size):
            mine, theirs = FORKS.Pipe()
            process = FORKS.Process(target=_rank_main, args=(rank, setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Each rank's answer; fails if a rank ends."""
        for end in self._ends:
            end.send((name, arguments))
        answers = []
        for rank, end in enumerate(self._ends):
            assert end.poll(LIMIT), f"rank {rank} has not answered {name} in {LIMIT:g} s"
            answers.append(end.recv())
        return answers

    async def call_all(self, name: str, *arguments: Any) -> list[Any]:
        """Each rank's answer, as a WorkerGroup gives it."""
        return await asyncio.to_thread(self.call, name, *arguments)

    def close(self) -> None:
        """End all ranks that are running."""
        try:
            self.call("close")
        finally:  # also if a rank has died
            for end, process in zip(self._ends, self._processes, strict=True):
                end.close()
                process.join(LIMIT)
                process.kill()
            self._ends, self._processes = [], []


@dataclass(frozen=True, kw_only=True)
class Learners:
    """Ranks, and the folder under which what they have pushed lies (`mirror_of`)."""

    ranks: Ranks
    root: Path

    @contextmanager
    def holding(self, name: str, layout: str) -> Iterator[WeightGroup]:
        """The way out of ranks that hold a family's model, for nobody else meanwhile."""
        config, model = config_of(self.root, name, layout), folder_of(self.root, name, LAYOUTS[layout].seed)
        with self.ranks.turn:
            number = len(list(self.root.glob("live-*")))
            self.ranks.hold(config, model, self.root / f"live-{number}")
            yield WeightGroup(self.ranks)  # type: ignore[arg-type]

    def sent(self) -> Counter[int]:
        """Bytes of the version sent last, by number of the engine rank."""
        return sum((Counter(one) for one in self.ranks.call("sent")), Counter())


@contextmanager
def learners_of(root: Path, shared: Sequence[Path]) -> Iterator[Learners]:
    """Start ranks once; they hold each model (`folder_of`) in each layout in turn, and push it into its mirror."""
    for layout, folder in zip(LAYOUTS.values(), shared, strict=True):
        folder_of(root, SHARED, layout.seed).parent.mkdir(exist_ok=True)
        folder_of(root, SHARED, layout.seed).symlink_to(folder)
        for name in KERNELS:
            save_model(name, folder_of(root, name, layout.seed), layout.seed)
    ranks = Ranks()
    try:
        for name in (SHARED, *KERNELS):
            for layout, chosen in LAYOUTS.items():
                ranks.hold(config_of(root, name, layout), folder_of(root, name, chosen.seed), root / name / layout)
                for pushed in ranks.call("stage", chosen.seed):
                    assert not isinstance(pushed, Exception), pushed
                ranks.call("commit", chosen.seed)
        yield Learners(ranks=ranks, root=root)
    finally:
        ranks.close()


def _rank_main(rank: int, setup: Setup, orders: Connection) -> None:
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here: before its functions are bound

    worker = LearnerRank(setup, rank, None)
    while True:
        try:
            name, arguments = orders.recv()
        except EOFError:
            return
        own = {"sent": _sent, "live_apart": _live_apart}.get(name)
        orders.send(getattr(worker, name)(*arguments) if own is None else own(worker, *arguments))


def _sent(worker: LearnerRank) -> Mapping[int, int]:
    """Bytes that this rank sends of a version, by number of the receiver in the group of learner and engines."""
    assert worker._sender is not None
    return worker._sender._transport.ends.bytes_sent


def _live_apart(worker: LearnerRank, apart: bool) -> None:
    """Have this rank believe, or no more, that it is on another node than engine ranks."""
    from rl_megatron.weights.routes import rendezvous

    here = _PLACES.setdefault("own", rendezvous.own_place)
    rendezvous.own_place = (lambda tensors: here(tensors)._replace(node="another")) if apart else here


_PLACES: dict[str, Callable[..., Any]] = {}
