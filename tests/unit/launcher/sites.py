"""Small inputs for a preflight: a model's folder, data, an engine's environment."""

from __future__ import annotations

import json
import sys
import tempfile
from functools import cache
from pathlib import Path

from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.mapped import header_bytes

ROW = {"question": "What is 2 + 3?", "answer": "It is 5.\n#### 5"}
HELD_OUT = {"question": "What is 4 + 3?", "answer": "It is 7.\n#### 7"}


def model_folder(folder: Path, config: dict[str, object]) -> Path:
    """A Hugging Face folder of such a model, whole but for all its tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in _tokenizer_files().items():
        (folder / name).write_bytes(text)
    (folder / "chat_template.jinja").write_text("{{ messages }}{{ add_generation_prompt }}")
    (folder / "model.safetensors").write_bytes(header_bytes([("x", DType.F32, (1,))]) + bytes(4))
    return folder


@cache
def _tokenizer_files() -> dict[str, bytes]:
    """The files of the tiny model's tokenizer, without its chat template."""
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).glob("*.json")}


def environment(folder: Path, module: str) -> Path:
    """The interpreter of an environment that holds ``module``."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    (folder / "lib" / "python3.11" / "site-packages" / module).mkdir(parents=True)
    return folder / "bin" / "python"


def answering(python: Path) -> Path:
    """The same interpreter, which is an empty file or none, as one that runs."""
    python.parent.mkdir(parents=True, exist_ok=True)
    python.unlink(missing_ok=True)
    python.symlink_to(sys.executable)
    return python


def data_file(path: Path, *rows: object) -> Path:
    """JSON lines; one good row if none are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or (ROW,)))
    return path


def site(folder: Path, config: dict[str, object], engine: str = "vllm") -> tuple[str, ...]:
    """The keys of a recipe that are its user's to give, and what they name."""
    return (
        f"model.path={model_folder(folder / 'model', config)}",
        f"data.train={data_file(folder / 'data' / 'train.jsonl')}",
        f"data.eval={data_file(folder / 'data' / 'eval.jsonl', HELD_OUT)}",
        f"rollout.python={environment(folder / engine, engine)}",
    )
