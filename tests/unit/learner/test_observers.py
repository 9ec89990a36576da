"""An observer of an installed package: one file outside of this one, which sees every step of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.learner import world
from rl_megatron.learner.megatron import make_policy
from rl_megatron.learner.observers.table import installed_observers
from rl_megatron.learner.trained import MegatronLearner
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability.metrics.table import documented
from rl_megatron.types import Metric, Samples, StepResult
from rl_megatron.weights.layouts.families import read_shape
from tests.samples import sequences_of

SECTION = LearnerSection()
OBSERVER = """
import contextlib
from rl_megatron.types import Metric

class Passes:
    def __init__(self, models, shape, device):
        self.count = 0
        for model in models:
            model.register_forward_pre_hook(self.one_more)

    def one_more(self, *_):
        self.count += 1

    @contextlib.contextmanager
    def unseen(self):
        kept = self.count
        yield
        self.count = kept

    def read(self):
        seen, self.count = self.count, 0
        return {"NAME": Metric(value=float(seen), over="sum")}
"""


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    world.join(SECTION, rank=0, rendezvous=f"file://{tmp_path_factory.mktemp('world')}/rendezvous", seed=1)
    yield
    world.leave()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TinySizes(), tmp_path_factory.mktemp("models"), seed=3)


@pytest.fixture(autouse=True)
def own_packages() -> Iterator[None]:
    """Those that a test installs, and no other."""
    installed_observers.cache_clear()
    yield
    installed_observers.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str) -> None:
    """As pip leaves a package that has the entry point."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rl_megatron.observers]\npasses = {module}:Passes\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


def policy(hf: Path) -> MegatronLearner:
    learner = make_policy(read_shape(hf), SECTION, torch.device("cpu"), temperature=1.0)
    for tensor in learner.tensors.values():
        tensor.normal_(0, 0.1)
    learner.adopt()
    return learner


def samples() -> Samples:
    return sequences_of([6], input_ids=torch.arange(6), targets=torch.arange(6))


def test_it_sees_steps_alone_and_its_number_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    install(tmp_path, monkeypatch, "my_observer", OBSERVER.replace("NAME", "observer/passes"))
    learner = policy(hf)
    for _ in range(2):
        learner.backward([samples()] * 2, CrossEntropy(), num_tokens=12, num_sequences=2)
        learner.score([samples()], frozenset({"logprobs"}))
    result = learner.step(1e-3)
    assert isinstance(result, StepResult)
    assert result.metrics["observer/passes"] == Metric(value=4.0, over="sum")
    assert "moe/load_imbalance" in result.metrics
    assert documented("observer/passes") is not None


def test_experts_without_tokens_are_those_of_the_routes(hf: Path) -> None:
    learner = policy(hf)
    said = learner.score([samples()], frozenset({"routes"}))
    assert said is not None
    (routes,) = said["routes"]  # [N, layers, k]
    learner.backward([samples()], CrossEntropy(), num_tokens=6, num_sequences=1)
    result = learner.step(0.0)
    assert isinstance(result, StepResult)
    experts = read_shape(hf).num_experts
    alive = [len(routes[:, layer].unique()) / experts for layer in range(routes.shape[1])]
    assert 0 < result.metrics["moe/dead_experts"].value == pytest.approx(1 - sum(alive) / len(alive))


def test_a_name_that_is_not_an_observers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    install(tmp_path, monkeypatch, "my_liar", OBSERVER.replace("NAME", "grad_norm"))
    learner = policy(hf)
    learner.backward([samples()], CrossEntropy(), num_tokens=6, num_sequences=1)
    with pytest.raises(RLMegatronError, match=r"'passes' of an installed package returned 'grad_norm'.*'observer/'"):
        learner.step(1e-3)


def test_one_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Path) -> None:
    install(tmp_path, monkeypatch, "my_broken", "raise OSError('no libfoo')")
    with pytest.raises(ConfigError, match=r"'passes' \(my_broken:Passes\).*OSError: no libfoo"):
        policy(hf)


def test_a_step_without_a_backward_pass_is_refused(hf: Path) -> None:
    with pytest.raises(RLMegatronError, match="call backward before step"):
        policy(hf).step(1e-3)


def test_a_model_is_asked_for_what_it_can_say(hf: Path) -> None:
    said = r"\['entropy', 'logit_norms', 'logits', 'logprobs', 'top'\] of a position, not \['values'\]"
    with pytest.raises(RLMegatronError, match=said):
        policy(hf).score([samples()], frozenset({"values", "logprobs"}))
