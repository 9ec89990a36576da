"""Conversations to train on, and a tiny model whose chat template ends their turns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_megatron.models.tiny import TinySizes, make_tiny_model
from tests.e2e.processes import Place

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}{{ sign }}{{ m['content'] }}"
    "{{ '<eos>' if m['role'] == 'assistant' else '' }}\n"
    "{% endfor %}{{ 'assistant' ~ sign if add_generation_prompt else '' }}"
)
SIGN = "model.template_variables.sign=':'"
"""The key of a run that has what stands between a role and its words."""


def prepared_with(place: Place, files: Mapping[str, Sequence[Mapping[str, object]]]) -> Path:
    """The model's folder, whose template ends turns with its end-of-sequence token; beside it a .jsonl file of the rows
    of each name."""
    folder = place.folder / "model"
    shutil.copytree(make_tiny_model(TinySizes(), place.cache, 0), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"split_special_tokens": False}))
    for name, rows in files.items():
        (place.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
