"""What commands report about folders: convert, with --inspect and --verify, and status; and the command line itself."""

from __future__ import annotations

import json
import math
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from launcher.__main__ import app
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.observability.metrics import STEPS
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from rl_megatron.weights.layouts.families import read_shape
from tests.draft_models import save_with_drafts
from tests.family_models import save_model
from tests.saved_adapters import save_adapters
from tests.savings import Shards
from tests.unit.launcher.commands import status_of
from tools.convert.verify import differences

LAYERS = """
from pathlib import Path

from rl_megatron.learner.model.latent import latent_attention_spec
from rl_megatron.learner.model.layers import torch_layer_spec


def spec(shape, layer):
    with Path(__file__).with_name("seen.txt").open("a") as file:
        file.write(str(layer))
    return torch_layer_spec(shape, layer, latent_attention_spec(shape))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 without a tokenizer, and a Megatron checkpoint of it."""
    root = tmp_path_factory.mktemp("folders")
    save_model("deepseek_v3", root / "hf")
    status_of("convert", root / "hf", root / "megatron")
    return root


@pytest.mark.parametrize(
    ("name", "changed"),
    [("glm4_moe", {}), ("glm4_moe_lite", {}), ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared", "full"]})],
)
def test_draft_layers_are_named(
    name: str, changed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = save_with_drafts(name, tmp_path / "hf", count=2, **changed)
    status_of("convert", tmp_path / "hf", tmp_path / "megatron")
    drafts = {name: tensor.numel() for name, tensor in tensors.items() if re.match(r"model\.layers\.[45]\.", name)}
    copies = sum(size for name, size in drafts.items() if name.endswith(("embed_tokens.weight", "head.weight")))
    of_kinds = {"hf": ("model.layers.4, model.layers.5", 0), "megatron": ("mtp.layers.0, mtp.layers.1", copies)}
    for folder, (names, left) in of_kinds.items():
        assert status_of("convert", "--inspect", tmp_path / folder) == 0
        said = capsys.readouterr().out
        assert f"draft layers: {names}" in said
        (row,) = (line for line in said.splitlines() if "model: draft layers" in line)
        assert int(row.split("│")[4].replace(",", "")) == sum(drafts.values()) - left
    save_model("deepseek_v3", tmp_path / "plain")
    status_of("convert", "--inspect", tmp_path / "plain")
    assert "draft layers" not in capsys.readouterr().out


def test_adapters_of_peft_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and keys are those that peft 0.21.2 writes."""
    layer = "base_model.model.model.layers.0."
    names = [f"{layer}{linear}.lora_{x}.weight" for linear in ("self_attn.q_proj", "mlp.down_proj") for x in "AB"]
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/model", "r": 8, "lora_alpha": 16})
    )
    assert status_of("convert", "--inspect", tmp_path) == 1
    assert "adapter_model.safetensors is not; fetch it again" in capsys.readouterr().err
    save_file({name: torch.ones(8, 4) for name in names}, tmp_path / "adapter_model.safetensors")
    assert status_of("convert", "--inspect", tmp_path) == 0
    said = capsys.readouterr().out
    for line in ("adapters (LORA, peft)", "base model: some/model", "rank and alpha: 8 and 16"):
        assert line in said
    assert "linears: down_proj, q_proj" in said
    rows = [line.split("│")[1].strip() for line in said.splitlines() if "float32" in line]
    assert rows == ["adapter: lora_A", "adapter: lora_B"]


def test_names_of_folders_are_no_markup(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a[red]", "{a}["):
        shutil.copytree(folders / "hf", name)
        capsys.readouterr()
        assert status_of("convert", "--inspect", name) == 0
        assert capsys.readouterr().out.startswith(f"{name}: Hugging Face\n")
        assert status_of("convert", name, f"megatron {name}") == 0
        assert status_of("convert", "--verify", f"megatron {name}", "--against", name) == 0


def test_what_a_folder_holds_is_told(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = sum(tensor.numel() for tensor in load_file(folders / "hf" / "model.safetensors").values())
    for folder, kind in (("hf", "Hugging Face"), ("megatron", "megatron torch_dist")):
        assert status_of("convert", "--inspect", folders / folder) == 0
        said = capsys.readouterr().out
        assert f"{folder}: {kind}" in said
        assert "deepseek_v3: 4 layers, hidden size 32, 8 experts" in said
        assert "tokenizer: none" in said
        counts = [int(line.split("│")[4].replace(",", "")) for line in said.splitlines() if "float32" in line]
        padding = 2 * 3 * 32 if folder == "megatron" else 0  # 61 rows of vocabulary on 64, twice
        assert sum(counts) == parameters + padding


@pytest.mark.parametrize("steps", [(2, 10), (999999, 1000000)])
def test_the_newest_checkpoint_is_told_with_its_step(
    steps: tuple[int, int], folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number, not by the name's letters."""
    for step in steps:
        shards = shutil.copytree(folders / "megatron", tmp_path / f"checkpoints/step_{step:06d}/learner")
        (shards.parent / "trainer.json").write_text(json.dumps({"step": step}))
    assert status_of("convert", "--inspect", tmp_path) == 0
    assert capsys.readouterr().out.startswith(f"{shards}: megatron torch_dist, of step {steps[-1]}\n")


def test_a_run_names_the_model_of_its_configuration(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = shutil.copytree(folders / "megatron", tmp_path / "checkpoints/step_000002/learner")
    (shards / "config.json").unlink()
    (tmp_path / "checkpoints/step_000002/trainer.json").write_text('{"step": 2}')
    for keys, model, tokenizer in (
        ([], "qwen3_moe: 2 layers, hidden size 64, 8 experts", "from the tiny model"),
        (["model.path=/away", "warm_start.steps=0"], "unknown: there is no config.json", "none"),
    ):
        save_resolved(load_config("tiny_cpu", keys), tmp_path / "config.yaml")
        assert status_of("convert", "--inspect", tmp_path) == 0
        told = capsys.readouterr().out
        assert f"model: {model}\n" in told
        assert f"tokenizer: {tokenizer}\n" in told


def test_who_holds_what_of_a_layout_is_told_by_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("convert", "--inspect", "qwen3-30b-a3b", "--layout", "megatron,tp=2,ep=2") == 0
    told = capsys.readouterr().out
    assert "15,272,458,240" in told
    assert {"ep", "etp", "experts"} <= {*told.split()}
    assert status_of("convert", "--inspect", "qwen3-8b", "--layout", "megatron,tp=2") == 0
    assert not {"ep", "etp", "experts"} & {*capsys.readouterr().out.split()}  # a dense model
    assert status_of("convert", "--inspect", "qwen3-30b-a3b", "--layout", "megatron,tp=2,ep=2", "--rank", "2") == 1
    assert "--rank 2: the layout megatron,tp=2,ep=2 has 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3-30b", "qwen3-30b (did you mean 'qwen3-30b-a3b'?): no such folder; give a Hugging Face folder, a meg"),
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B (did you mean 'qwen3-30b-a3b'?): no such folder"),
        ("gpt-oss", "gpt-oss (did you mean 'gpt-oss-20b' or 'gpt-oss-120b'?): no such folder"),
        ("kimi-k2", "kimi-k2 (a known model): no such folder"),
        ("away/x", "away/x: no such folder; give a Hugging Face or a megatron torch_dist checkpoint"),
    ],
)
def test_a_name_to_inspect(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("convert", "--inspect", name) == 1
    assert f"error: {said}" in capsys.readouterr().err


def test_an_option_without_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in {
        "x --inspect --rank 2": "--rank goes with --inspect --layout, and --inspect does not read it",
        "x y --texts 8": "--texts goes with --verify --logprobs, and a conversion does not read it",
        "x --verify --tolerance 1": "--tolerance goes with --verify --logprobs, and --verify does not read it",
        "x y --verify": "OUT goes with a conversion, and --verify does not read it; leave it out",
        "x y --against z": "--against goes with --verify or --verify --logprobs, and a conversion does not",
        "x --verify --inspect": "--verify and --inspect are two commands; give one of them",
        "x": "give OUT, a new folder for the checkpoint of the other kind, or --verify, or --inspect",
    }.items():
        assert status_of("convert", *words.split()) == 1
        assert f"error: {said}" in capsys.readouterr().err


def test_verify_compares_to_the_bit_and_with_transformers(
    folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts a learner's process (6 s): the only test of the command's own forward."""
    (tmp_path / "layers_of_own.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert status_of("convert", "--verify", folders / "megatron", "--against", folders / "hf") == 0
    assert "no problems, compared with" in capfd.readouterr().out
    bent = shutil.copytree(folders / "hf", tmp_path / "bent")
    tensors = load_file(bent / "model.safetensors")
    tensors["model.norm.weight"][3] *= 1.5
    save_file(tensors, bent / "model.safetensors", metadata={"format": "pt"})
    assert status_of("convert", "--verify", bent, "--against", folders / "hf") == 1
    assert "model.norm.weight: " in capfd.readouterr().out

    given, threads = ("--logprobs", "--against", bent, "--texts", "2"), torch.get_num_threads()
    assert status_of("convert", "--verify", folders / "megatron", *given, "--layers", "layers_of_own:spec") == 1
    assert torch.get_num_threads() == threads
    assert (tmp_path / "seen.txt").read_text() == "0123"
    said = capfd.readouterr()
    assert said.out.count("DIFFERENT") == 2
    assert "Warning" not in said.err
    assert status_of("convert", "--verify", folders / "megatron", *given, "--layers", "mine") == 1
    assert "--layers='mine': it must be auto, torch or your own package.module:name" in capfd.readouterr().err
    assert status_of("convert", "--verify", folders / "megatron", "--logprobs") == 1
    assert "which transformers cannot read; give --against" in capfd.readouterr().err


def test_an_unknown_model_is_refused_early(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kimi = shutil.copytree(folders / "hf", tmp_path / "kimi")
    config = json.loads((kimi / "config.json").read_text())
    (kimi / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    assert status_of("convert", "--verify", kimi, "--logprobs", "--texts", "2") == 1
    assert "give --against a folder of the same weights whose model_type it knows" in capsys.readouterr().err


def test_errors_of_checkpoints_name_readers(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their shards, which have no config.json, are in ``learner`` of checkpoints/step_N."""
    step, out = tmp_path / "step_000002", tmp_path / "out"
    shards = shutil.copytree(folders / "megatron", step / "learner")
    (shards / "config.json").unlink()
    for command in (("convert", "--verify"), ("convert", "--verify", folders / "hf", "--against"), ("convert",)):
        more = (out,) if command == ("convert",) else ()
        assert status_of(*command, step, *more) == 1
        assert f"config.json (Hugging Face); give {shards}\n" in capsys.readouterr().err
        assert status_of(*command, shards, *more) == 1
        assert f"error: {shards} has no config.json; give --config with the Hugging" in capsys.readouterr().err
    assert status_of("convert", "--verify", shards, "--config", folders / "hf", "--against", folders / "hf") == 0


def test_verify_reads_adapters_and_models(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a run with learner.lora saves them: they have no config.json, and no matrix of the model."""
    base = ("--config", folders / "hf")
    ones, other = (save_adapters(tmp_path / name, read_shape(folders / "hf")) for name in ("ones", "other"))
    assert status_of("convert", "--verify", ones, *base) == 0
    shards = other / "__0_0.distcp"
    content = bytearray(shards.read_bytes())
    at = content.index(np.float32(1).tobytes() * 8)
    content[at : at + 4] = np.float32("nan").tobytes()
    shards.write_bytes(content)
    assert status_of("convert", "--verify", other, *base, "--against", ones) == 1
    said = capsys.readouterr().out
    assert "values are NaN or infinite" in said
    assert "bytes differ" in said
    assert f"{shards}, " in said  # the chunk's checksum
    assert status_of("convert", "--verify", ones) == 1
    assert f"{ones} holds adapters alone (learner.lora); give --config with" in capsys.readouterr().err
    assert status_of("convert", "--verify", ones, *base, "--against", folders / "hf") == 1
    assert f"one of {ones} and {folders / 'hf'} holds adapters alone" in capsys.readouterr().err
    assert status_of("convert", "--verify", ones, *base, "--logprobs", "--against", folders / "hf") == 1
    assert f"{ones} holds adapters alone (learner.lora); merge them" in capsys.readouterr().err


async def test_verify_of_a_runs_shards_finds_what_has_changed_in_any_file_of_the_checkpoint(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of which the weights' own format has no checksum, and the controller's: without them it is not resumed."""
    content = {p.name: p.read_bytes() for p in (folders / "megatron").iterdir() if p.name != "config.json"}
    learner: Any = Shards(content)
    store = CheckpointStore(tmp_path, keep=1, config={})
    begun = await store.save(TrainerState(step=2, prompts={}, stream=None), {"learner": learner})
    step = (await begun.finish()).folder
    command = ("convert", "--verify", step / "learner", "--config", folders / "hf")
    assert status_of(*command) == 0
    for path in [step / "trainer.json", step / "manifest.json", *(step / "learner" / name for name in content)]:
        sound = path.read_bytes()
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        assert status_of(*command) == 1
        said = capsys.readouterr()
        assert str(path) in said.out + said.err
        path.write_bytes(sound)
    (step / "trainer.json").unlink()
    assert status_of(*command) == 1
    assert f"{step}/trainer.json is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "theirs", "worst"),
    [
        ([[-1.0, -2.0]], [[-1.0, -2.5]], 0.5),
        ([[math.nan]], [[-1.0]], math.inf),
        ([[-math.inf]], [[-math.inf]], math.inf),
    ],
)
def test_differences_of_log_probs(ours: list[list[float]], theirs: list[list[float]], worst: float) -> None:
    assert differences(ours, theirs, 0.1)[1] == worst


def test_convert_says_what_it_made_and_lacks(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("convert", folders / "hf", tmp_path / "made") == 0
    said = capsys.readouterr()
    assert "made: megatron torch_dist, " in said.out
    assert f"check it: rl-megatron convert {tmp_path / 'made'} --verify --against {folders / 'hf'}" in said.out
    assert "has no tokenizer" in said.out
    assert "draft layers" not in said.err  # its config speaks of such a layer, but there are no tensors of one
    assert status_of("convert", folders / "hf", tmp_path / "made") == 1
    assert capsys.readouterr().err.strip().endswith("made exists; remove it or give another name")


@pytest.mark.parametrize("phase", STEPS)
def test_the_status_without_job_is_a_step(phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study" / "cells").mkdir(parents=True)
    for folder, advice in ((tmp_path, "give a run's folder\n"), (tmp_path / "study", "experiment status STUDY.yaml")):
        assert status_of("status", folder) == 1
        said = capsys.readouterr().err
        assert "not a run's folder, and no job was submitted from it" in said
        assert advice in said
    at = "2026-11-24 08:16:18,508"
    ours = f"{at} INFO    [rank 1] launcher.worker: the last words\n"
    (tmp_path / "config.yaml").touch()
    (tmp_path / "log.txt").write_text(f"{ours}{at} WARNING [rank 1] megatron.core.x: Mismatched keys\n\n")
    (tmp_path / "metrics.jsonl").write_text(f'{{"phase": "{phase}", "step": 7}}\n')
    assert status_of("status", tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == [
        f"step 7/{RunConfig().train.steps}",
        "08:16:18 rank 1: the last words",
    ]


def test_version_short_help_and_completion_are_there() -> None:
    """The version is the one that the environment was installed from: `make` installs a new one again."""
    repo = Path(__file__).resolve().parents[3]
    version = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["version"]
    assert CliRunner().invoke(app, ["--version"]).output == f"rl-megatron {version}\n"
    named = re.findall(r"rl_megatron-([\d.]+)-py3", "".join(path.read_text() for path in repo.glob("docs/*.md")))
    assert set(named) == {version}
    assert re.search(r"^## (\S+) ", (repo / "CHANGELOG.md").read_text(), re.M)[1] == version
    pins = "".join((repo / path).read_text() for path in ("constraints.txt", "tests/engines/vllm.txt"))
    assert re.findall(r"^vllm(?:-cpu)?==(.*)$", pins, re.M) == ["0.32.0"] * 2, "the extra's is the tested one"
    for arguments in (["-h"], ["train", "-h"]):
        said = CliRunner().invoke(app, arguments)
        assert said.exit_code == 0
        assert "Usage: " in said.output
    assert "--install-completion" in CliRunner().invoke(app, ["-h"]).output


def test_a_link_that_leads_to_itself_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for command in (("report",), ("convert", "--inspect"), ("status",)):
        assert status_of(*command, loop) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert str(loop) in said
