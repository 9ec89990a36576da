"""Makes a tiny Qwen3-MoE with random weights as a real Hugging Face folder: config, safetensors, a byte tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_megatron.errors import ConfigError
from rl_megatron.files import add_path_to_errors, publish_folder
from rl_megatron.models.shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rl_megatron.config.run import TinyModelSection

NUM_BYTES = 256
SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}  # ids 256, 257, 258
TOKENIZER_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORMAT = 3  # raise it when the same sizes and seed come to make another folder


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 32
    max_position_embeddings: int = 1024
    tie_embeddings: bool = False

    @classmethod
    def of(cls, section: TinyModelSection) -> TinySizes:
        """Returns the sizes that the keys ``model.tiny`` give."""
        return cls(**section.model_dump())


def make_tiny_model(spec: TinySizes, folder: Path, seed: int, *, vocab_size: int = TOKENIZER_SIZE) -> Path:
    """Makes the model, with float32 weights, unless the cache ``folder`` has it, and returns its folder there.

    Its name is a hash of the sizes and the seed. It is written aside, synced and renamed, so processes that make it at
    the same time all return the same complete folder. A ``vocab_size`` above the tokenizer's leaves ids unused.
    """
    if vocab_size < TOKENIZER_SIZE:
        raise ConfigError(f"vocab_size={vocab_size} is less than the tokenizer's {TOKENIZER_SIZE} tokens; raise it")
    recipe = {**asdict(spec), "vocab_size": vocab_size, "seed": seed, "format": FORMAT}
    name = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    target = folder / f"tiny-{name}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=folder))
    try:
        with add_path_to_errors(target):
            _save_model(spec, work, seed, vocab_size)
            byte_tokenizer().save_pretrained(work)
        _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def tiny_shape(spec: TinySizes) -> ModelShape:
    """Returns the shape of the model that `make_tiny_model` would make of ``spec``."""
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_experts=spec.num_experts,
        experts_per_token=spec.experts_per_token,
        expert_width=spec.expert_width,
        vocab_size=TOKENIZER_SIZE,
        rope_theta=1e4,
        norm_eps=1e-6,
        normalize_top_k=True,
        tie_embeddings=spec.tie_embeddings,
        max_positions=spec.max_position_embeddings,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of UTF-8 bytes (id = byte), then special tokens. Text that spells one of these stays text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_chars())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _save_model(spec: TinySizes, folder: Path, seed: int, vocab_size: int) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    special_ids = {f"{name}_id": NUM_BYTES + i for i, name in enumerate(SPECIAL_TOKENS)}
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_experts=spec.num_experts,
        num_experts_per_tok=spec.experts_per_token,
        moe_intermediate_size=spec.expert_width,
        intermediate_size=spec.expert_width,
        norm_topk_prob=True,
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_embeddings,
        dtype="float32",
        initializer_range=0.4 * spec.hidden_size**-0.5,  # the usual 0.02 is slow to learn at so small a width
        **special_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).to(torch.float32)
        with torch.no_grad():  # transformers zeroes this row: a norm makes 1 / sqrt(eps) of its first gradient
            model.model.embed_tokens.weight[config.pad_token_id].normal_(std=config.initializer_range)
    model.generation_config = GenerationConfig(**special_ids)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would run into the run's own display
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def _publish(work: Path, target: Path) -> None:
    """Renames ``work`` to ``target``; if another process was first, its folder stays."""
    work.chmod(0o755)
    try:
        publish_folder(work, target)
    except OSError:
        if not target.is_dir():
            raise
