"""A family and layers from outside this package: two files and a key, and every model of a run is theirs.

The oracle is transformers' own model, from whose weights and names the family's were made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from launcher.preflight import own_code, sizes
from launcher.preflight.subject import PreflightContext
from launcher.wire import Setup
from launcher.worker.models import RankModels
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import ForwardPass
from rl_megatron.types import ParallelDims, Samples
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from tests.family_models import save_model
from tests.samples import sequences_of, share_of
from tests.unit.launcher.commands import status_of

# A third party's model family: a package of two files, a module of layers, and a tiny model with its names.
FAMILY, LAYERS = "own_models.rows:FAMILY", "own_models_layers:skipping"
READER = """
from rl_megatron.models.families.common import decoder_fields, dense_fields, require_fixed_values
from rl_megatron.models.shape import ModelShape


def read(raw, path):
    require_fixed_values(raw, path, {"activation": "silu"})
    keys = {**raw, "num_hidden_layers": raw["depth"], "intermediate_size": raw["inner"]}
    return ModelShape(**decoder_fields(keys, path), **dense_fields(keys))
"""
ROWS = """
from dataclasses import replace

from own_models import reader
from rl_megatron.weights.layouts.layout import Family
from rl_megatron.weights.layouts.tables.grouped_query import QWEN3

NAMES = {"model.embed_tokens": "tokens", "model.layers.": "blocks.", "self_attn.": "mixer.", "lm_head": "out"}


def renamed(name):
    for theirs, own in NAMES.items():
        name = name.replace(theirs, own)
    return name


def own(row, name):
    def bands(shape, degree):
        return tuple(tuple(replace(p, hf=renamed(p.hf)) for p in band) for band in row.bands(shape, degree))

    return replace(row, name=name, bands=bands)


FAMILY = Family(
    model_types=("own_model",),
    read=reader.read,
    tables={
        "hf": [own(row, renamed(row.name)) for row in QWEN3.tables["hf"]],
        "megatron": [own(row, row.name) for row in QWEN3.tables["megatron"]],
    },
)
"""
LAYER_SPECS = """
from dataclasses import replace

from megatron.core.transformer.transformer_layer import TransformerLayer

from rl_megatron.learner.model.layers import torch_layer_spec


class Skipped(TransformerLayer):
    def forward(self, hidden_states, **_):
        return hidden_states, None


def skipping(shape, layer):
    spec = torch_layer_spec(shape, layer)
    return replace(spec, module=Skipped) if layer == 1 else spec


def nothing(shape, layer):
    return {"layer": layer}
"""
SKIPPED = 1


def write_package(folder: Path) -> None:
    """The family's package and the module of layers, to be found with ``folder`` on the path."""
    package = folder / "own_models"
    package.mkdir()
    (package / "reader.py").write_text(READER)
    (package / "rows.py").write_text(ROWS)
    (folder / "own_models_layers.py").write_text(LAYER_SPECS)


def save_own_model(folder: Path) -> Any:
    """A tiny Qwen3 of transformers', saved in ``folder`` with the family's names and keys."""
    model = save_model("qwen3", folder)
    names = {"model.embed_tokens": "tokens", "model.layers.": "blocks.", "self_attn.": "mixer.", "lm_head": "out"}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_model", "activation": config.pop("hidden_act")}
    config |= {"depth": config.pop("num_hidden_layers"), "inner": config.pop("intermediate_size")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")  # nobody reads it
    return model


TOKENS = torch.arange(1, 23)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the package is, and on the path."""
    root, before = tmp_path_factory.mktemp("own"), {*sys.modules}
    write_package(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield root
    for name in {*sys.modules} - before:
        if name.startswith("own_models"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def model(place: Path) -> Any:
    """Transformers' model; what it was saved as is in ``hf``."""
    return save_own_model(place / "hf")


def config_of(folder: Path, *more: str) -> RunConfig:
    return load_config("tiny_cpu", [f"model.path={folder}", f"learner.model={FAMILY}", "learner.ep=1", *more])


def samples() -> Samples:
    return sequences_of([len(TOKENS) - 1], input_ids=TOKENS[:-1], targets=TOKENS[1:])


def theirs(model: Any) -> Tensor:
    with torch.no_grad():
        logprobs = model(TOKENS[None, :-1], use_cache=False).logits[0].log_softmax(-1)
    return logprobs.gather(1, TOKENS[1:, None]).squeeze(1)


@pytest.mark.parametrize("role", ["learner", "reference"])
def test_every_model_of_a_run_reads_and_has_its_layers(role: str, place: Path, model: Any, tmp_path: Path) -> None:
    kept, threads = [*model.model.layers], torch.get_num_threads()
    for own in (False, True):
        roles = ("algorithm=ppo", "algorithm.kl.coefficient=0.1")
        config = config_of(place / "hf", *roles, f"learner.layers={LAYERS if own else 'auto'}")
        model.model.layers = torch.nn.ModuleList([x for i, x in enumerate(kept) if not own or i != SKIPPED])
        rendezvous = f"file://{tmp_path}/rendezvous-{own}"
        setup = Setup(config=config, model_folder=place / "hf", run_folder=tmp_path, rendezvous=rendezvous, role=role)
        rank = RankModels(setup, 0, None)
        try:
            policy = "policy" if role == "learner" else "reference"
            rank.load_weights(policy, place / "hf")
            share = share_of([samples()], ParallelDims(), 0, to_score=True)
            ((found, _),) = rank.score([ForwardPass(role=policy, outputs=frozenset({"logprobs"}))], share)
            assert found is not None
            assert float((found["logprobs"][0] - theirs(model)).abs().max()) < 1e-4
            if role == "learner":
                rank.load_weights("critic", place / "hf")
                mine, other = (rank._learners[name].tensors for name in ("policy", "critic"))
                assert mine.keys() - other.keys() == {"output_layer.weight"}
                assert all(torch.equal(mine[name], tensor) for name, tensor in other.items())
        finally:
            rank.close()
            model.model.layers = torch.nn.ModuleList(kept)
            torch.set_num_threads(threads)


@pytest.mark.usefixtures("model")
def test_the_tools_read_by_it(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, megatron, back, given = place / "hf", tmp_path / "megatron", tmp_path / "back", ("--family", FAMILY)
    assert status_of("convert", hf, megatron, *given) == 0
    assert f"--family {FAMILY}" in (said := capsys.readouterr().out)
    assert f"learner.model={FAMILY}" in said
    assert status_of("convert", megatron, back, *given) == 0
    found, original = (load_file(folder / "model.safetensors") for folder in (back, hf))
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
    assert "blocks.3.mixer.q_proj.weight" in found
    for folder in (megatron, back):
        assert status_of("convert", "--verify", folder, "--against", hf, *given) == 0
    assert status_of("convert", "--inspect", hf, "--layout", "megatron,tp=2", *given) == 0
    assert status_of("plan", hf, "src=megatron,tp=2", "dst=hf,dp=1", *given) == 0
    for command in (("convert", "--verify", hf), ("plan", hf, "src=megatron,tp=2", "dst=hf,dp=1")):
        assert status_of(*command) == 1
        assert "model_type='own_model' is not supported; allowed: 'qwen2'" in capsys.readouterr().err


@pytest.mark.usefixtures("model")
def test_the_preflight_reads_by_it(place: Path) -> None:
    subject = PreflightContext(config_of(place / "hf", "rollout=vllm", f"learner.layers={LAYERS}"), False)
    assert [found.text for found in sizes.check(subject)] == []
    expected = [("unchecked", f"learner.layers={LAYERS}, which ranks import")]
    assert [(found.kind, found.text) for found in own_code.check_modules(subject)] == expected
    (found,) = sizes.check(PreflightContext(config_of(place / "hf"), False))
    assert found.text.startswith("model_type='own_model': the in-process engine does not support it; allowed: 'qwen")
    for own in ("not_there_at_all.x:f", "__main__:f"):
        (found,) = own_code.check_modules(PreflightContext(config_of(place / "hf", f"learner.layers={own}"), False))
        assert found.kind == "problem"
        assert "install it or put its folder on PYTHONPATH" in found.text


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("not_there_at_all:F", r"learner\.model .*='not_there_at_all:F': no module 'not_there_at_all'; install it or"),
        ("own_models.rows:FAMILYX", r"'FAMILYX' of own_models\.rows is not there; did you mean 'FAMILY'\?"),
        ("own_models.rows:NAMES", r"'NAMES' of own_models\.rows is not a Family"),
        ("own_models_half:FAMILY", r"model_type 'own_model' has no table for megatron; give tables for hf and"),
        ("rl_megatron.weights.layouts.tables.grouped_query:QWEN3", r"'own_model' is not supported; allowed: 'qwen3'"),
    ],
)
@pytest.mark.usefixtures("model")
def test_what_is_no_family_of_the_folder_is_refused(family: str, message: str, place: Path) -> None:
    half = 'import dataclasses, own_models.rows as r\nFAMILY = dataclasses.replace(r.FAMILY, tables={"hf": []})\n'
    (place / "own_models_half.py").write_text(half)
    with pytest.raises(ConfigError, match=message):
        read_shape(place / "hf", family)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("changed", "said"), [({"hidden_size": "16"}, "valid integer"), ({"vocab_size": None}, "no vo")]
)
def test_keys_of_a_wrong_type_are_refused(changed: dict[str, object], said: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((place / "hf/config.json").read_text()) | changed))
    with pytest.raises(ConfigError, match=said):
        read_shape(tmp_path, FAMILY)


@pytest.mark.usefixtures("model")
def test_a_shape_finds_its_rows_wherever_it_goes(place: Path) -> None:
    shape = read_shape(place / "hf", FAMILY)
    assert (shape.family, shape.family_at, shape.num_layers, shape.dense_width) == ("own_model", FAMILY, 4, 48)
    assert hf_layout(shape).local_shapes(0)["blocks.0.mixer.o_proj.weight"] == (32, 64)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("own_models_layers:nothing", r"returned \{'layer': 0\} for layer 0; it must return a ModuleSpec"),
        ("own_models_layers:Skippedx", r"learner\.layers='own_models_layers:Skippedx': .* did you mean 'Skipped'"),
    ],
)
@pytest.mark.usefixtures("model")
def test_what_is_no_layer_is_refused(own: str, message: str, place: Path) -> None:
    from rl_megatron.learner.model.layers import own_layer_spec

    with pytest.raises(ConfigError, match=message):
        own_layer_spec(own, read_shape(place / "hf", FAMILY), 0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.model=qwen3", "learner.model='qwen3': must be package.module:name of your own code"),
        ("learner.layers=toch", "learner.layers='toch': must be 'auto', 'torch' or 'transformer_engine' (did you m"),
        ("learner.model=a.b:C", "learner.model=a.b:C with model.path=null: it reads the config.json of model.path"),
    ],
)
def test_what_no_name_of_own_code_is_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", [override])
    assert str(caught.value).startswith(message)
