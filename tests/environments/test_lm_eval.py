"""lm-eval's own command asks ``rl-megatron serve``: its figures are those of transformers' forward pass."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_megatron.config.run import TinyModelSection
from rl_megatron.models.tiny import make_tiny_model
from tests.e2e.processes import Place
from tests.environments.served import interpreter

pytestmark = pytest.mark.slow
TASKS: dict[str, dict[str, Any]] = {
    "likelihood": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{[answer, greedy]}}",
        "doc_to_target": 0,
    },
    "greedy": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match"}],
    },
}


class Oracle:
    """transformers' forward pass of a folder's model."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(self, question: str, tokens: int) -> str:
        """The text of as many greedy tokens."""
        ids = torch.tensor([self.tokenizer.encode(question)])
        made = self.model.generate(ids, do_sample=False, max_new_tokens=tokens, eos_token_id=None)
        text: str = self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    def likelihood(self, question: str, answer: str) -> tuple[float, bool]:
        """The answer's log-probability behind the question, in nats, and whether each token of it is the likeliest."""
        asked, ids = self.tokenizer.encode(question), self.tokenizer.encode(question + answer)
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, len(asked) - 1 : -1]
        said = torch.tensor(ids[len(asked) :])
        found = logits.log_softmax(-1)[range(len(said)), said]
        return found.sum().item(), bool((logits.argmax(-1) == said).all())


def write_tasks(folder: Path, oracle: Oracle) -> None:
    """Two tasks of a user on 40 sums, whose second choice is the likeliest token where that is a text."""
    drawn, rows = random.Random(0), list[dict[str, str]]()
    for _ in range(40):
        a, b = drawn.randrange(50), drawn.randrange(50)
        likeliest = oracle.answer(question := f"{a}+{b}=", 1)
        rows.append(
            {
                "question": question,
                "answer": str(a + b),
                "greedy": likeliest if likeliest.isascii() and likeliest.isprintable() else "no",
            }
        )
    folder.mkdir()
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, keys in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            "target_delimiter": "",
            **keys,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def ask(place: Place, python: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval recorded of each task's samples."""
    try:
        served = place.begin("serve", str(folder), "--port", "0", "rollout.max_new_tokens=8")
        served.until(lambda: "Ctrl-C ends it" in served.text(), "the server")
        url = next(word for word in served.text().split() if word.startswith("http://"))
        command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", *TASKS]
        command += ["--model_args", f"model=policy,base_url={url}/completions,tokenizer={folder},num_concurrent=4"]
        command += ["--include_path", "tasks", "--output_path", "found", "--log_samples"]
        key = (place.folder / "eval" / "serve.key").read_text().strip()
        environment = {**os.environ, "OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(place.folder / "hub")}
        ended = subprocess.run(command, cwd=place.folder, env=environment, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
    finally:
        place.clear()
    files = {name: next(place.folder.glob(f"found/*/samples_{name}_*.jsonl")) for name in TASKS}
    return {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}


def test_likelihoods_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    """80 log-likelihoods within 1e-4 nats, whether each is greedy, and 40 greedy answers; half a minute."""
    python = interpreter("lm-eval")
    folder = make_tiny_model(TinyModelSection(), tmp_path / "models", 0)
    write_tasks(tmp_path / "tasks", oracle := Oracle(folder))
    found = ask(Place(folder=tmp_path, cache=tmp_path / "models"), python, folder)
    assert [len(samples) for samples in found.values()] == [40, 40]
    greedy = set()
    for sample in found["likelihood"]:
        for name, ((likelihood, is_greedy),) in zip(("answer", "greedy"), sample["resps"], strict=True):
            wanted = oracle.likelihood(sample["doc"]["question"], sample["doc"][name])
            assert float(likelihood) == pytest.approx(wanted[0], abs=1e-4)
            assert is_greedy == str(wanted[1])
            greedy.add(is_greedy)
    assert greedy == {"True", "False"}
    for sample in found["greedy"]:
        assert sample["resps"] == [[oracle.answer(sample["doc"]["question"], 4).split("\n")[0]]]
