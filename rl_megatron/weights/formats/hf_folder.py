"""Reads and writes what a Hugging Face folder holds besides tensors: index, config.json, tokenizer. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from pydantic import Field

from rl_megatron.chat_templates import TemplateValue, setting
from rl_megatron.errors import CheckpointError, WeightError, quote_start
from rl_megatron.files import write_atomically
from rl_megatron.models.families.fields import CLASSIFIER, read_config
from rl_megatron.models.json_files import MAX_BYTES, JsonFields, read_json
from rl_megatron.models.shape import STACKED, ModelShape
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.mapped import Entry, MappedFile, read_header
from rl_megatron.weights.formats.schemes import Quantized, find_quantized, read_scheme
from rl_megatron.weights.layouts.families import adapter_folder_hint, find_family
from rl_megatron.weights.layouts.layout import Layout

if TYPE_CHECKING:
    from rl_megatron.feature import Encoding

Stored = Mapping[str, tuple[DType, Shape]]
"""The tensors of a file by name."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".distcp", ".h5", ".msgpack", ".ot", ".onnx"),
    *(".onnx_data", ".pkl", ".npz", ".index.json", ".pyc"),  # files that belong to them
)
PREFIX = "base_model.model."  # starts every tensor's name in a folder of adapters, by peft
_OWN_FILES = {"config.json", "metadata.json", "lora.json"}  # the new folder gets these by other ways
_TEMPLATE = "chat_template.jinja"
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "spiece.model", "tekken.json"),
    "sentencepiece.bpe.model",
)
_DRAFT_KEYS = {"num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"}  # DeepSeek's, MiniMax's, Qwen's
_DTYPE_KEYS = {"dtype", "torch_dtype"}
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight", ".shared_head.weight")
"""Ends of names in a draft layer: the copy of the embedding, and of the output matrix by two names."""
_ANGLES = ".rotary_emb.inv_freq"  # a buffer in folders of old versions of transformers, computed from config.json
_CACHE_SCALE = re.compile(r"\.self_attn\.(\w+_proj\.|attn\.)?((k|v|kv|q|prob|prob_output)_scale|output_scale)$")
_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
_NAME_BYTES = 255  # the longest file name
_MAX_LINES = 20  # the lines of one error message; a wrong folder lacks thousands of tensors


def stored(
    shapes: Mapping[str, Shape], dtype: DType, encoding: Encoding | None, float32: Collection[str] = frozenset()
) -> Stored:
    """The tensors of a file that holds a model of ``shapes``, the widest first, so that each is aligned.

    They are in ``dtype`` but for those named in ``float32`` and those that ``encoding`` changes. Raises ConfigError for
    a model that it cannot encode.
    """
    plain = {name: (DType.F32 if name in float32 else dtype, shape) for name, shape in shapes.items()}
    found = plain if encoding is None else encoding.stored(plain)
    return dict(sorted(found.items(), key=lambda item: -item[1][0].itemsize))


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """The contents of the headers of a folder's files, by tensor."""

    entries: Mapping[str, tuple[str, Entry]]  # the tensor's file, and where in it the tensor lies
    quantized: Mapping[str, Quantized]  # key: the weight's name
    parts: Set[str]  # the tensors that belong to these

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every weight."""
        plain = {name: entry.shape for name, (_, entry) in self.entries.items() if name not in self.parts}
        return plain | {name: weight.shape for name, weight in self.quantized.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedHead:
    """The names of the embedding, and of an output matrix that is stored, too, though both are one."""

    embedding: str
    head: str

    def refuse(self, folder: Path) -> NoReturn:
        """Raises WeightError: the two differ."""
        raise WeightError(
            f"{folder}: config.json has tie_word_embeddings=true, but the stored {self.head} is no copy of "
            f"{self.embedding}; set tie_word_embeddings=false there to keep it as an output matrix of its own"
        )


class _TokenizerConfig(JsonFields):
    chat_template: object = None


class _Index(JsonFields):
    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def read_headers(folder: Path) -> Headers:
    """Reads the headers of all files, which must hold what the index places in them.

    Raises CheckpointError naming every file that is missing, or the first that is torn, and ConfigError like
    `read_scheme`. Raises WeightError naming every tensor that lies elsewhere or in two files, has scales that do not
    fit or has a dtype that no weight has."""
    names, placed = weight_files(folder)
    entries, twice = dict[str, tuple[str, Entry]](), list[str]()
    for name in names:
        for tensor, entry in read_header(MappedFile(folder / name)).items():
            if tensor in entries:
                twice.append(f"{tensor} is in {entries[tensor][0]} and in {name}")
            entries[tensor] = name, entry
    raise_lines(f"{folder}: a tensor has one file, where the index places it; write no second copy", twice)
    wrong = [f"{file} has no tensor {one}" for one, file in placed.items() if entries.get(one, ("",))[0] != file]
    raise_lines(f"{folder}: {INDEX} does not match its files", wrong)
    held = {name: (entry.dtype, entry.shape) for name, (_, entry) in entries.items()}
    quantized, parts, wrong = find_quantized(held, read_scheme(folder))
    raise_lines(f"{folder} does not match the quantization_config of its config.json", wrong)
    return Headers(entries=entries, quantized=quantized, parts=parts)


def weight_files(folder: Path) -> tuple[list[str], Mapping[str, str]]:
    """The folder's safetensors files, and the file in which the index places each tensor (empty without an index).

    Raises CheckpointError that names each missing file, and where there are two sets of weights.
    """
    index = folder / INDEX
    if not index.is_file() and not (folder / SINGLE).is_file():
        advice = adapter_folder_hint(folder) or "give a safetensors checkpoint"
        raise CheckpointError(f"{folder}: it has neither {INDEX} nor {SINGLE}; {advice}")
    placed = read_json(index, _Index, CheckpointError).weight_map if index.is_file() else {}
    files = sorted(set(placed.values())) or [SINGLE]
    if SINGLE not in files and (folder / SINGLE).is_file():
        raise CheckpointError(
            f"{folder}: it has two sets of weights, {SINGLE}, for transformers, and the files of {INDEX}, for "
            "engines; remove one of them"
        )
    outside = [quote_start(name) for name in files if not is_plain(name)]
    if outside:
        raise CheckpointError(f"{folder}: {INDEX} names files outside of the folder: {', '.join(_some(outside))}")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: files that {INDEX} names are missing: {', '.join(_some(missing))}")
    return files, placed


def is_plain(name: str) -> bool:
    """True if a name read from a file is a plain file name; no other path may be read."""
    return name == Path(name).name and 0 < len(name.encode(errors="replace")) <= _NAME_BYTES and name.isprintable()


def _some(names: Sequence[str]) -> list[str]:
    """The first names, and how many more there are."""
    more = [f"and {len(names) - _MAX_LINES} more"] if len(names) > _MAX_LINES else []
    return [*names[:_MAX_LINES], *more]


def file_names(count: int) -> list[str]:
    """The names of the files of a checkpoint of ``count`` files."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_text(weight_map: Mapping[str, str], total_bytes: int) -> str:
    """The index of a checkpoint of more than one file."""
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2) + "\n"


def companions(folder: Path) -> set[Path]:
    """All files in a checkpoint's folder and in folders of it, such as tokenizers, their code and chat templates.

    Left out are weights and their index, config.json, hidden files, files above `MAX_BYTES`, and folders of other
    checkpoints and of runs.
    """
    found, left = set[Path](), {folder / name for name in _OWN_FILES}
    for name, folders, files in os.walk(folder):
        here, weights = Path(name), {file for file in files if file.endswith(_WEIGHTS)}
        other = ".metadata" in files or {"lock", "config.yaml"} <= {*files} or (weights and "config.json" in files)
        if here != folder and other:
            folders.clear()
            continue
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        found |= {here / file for file in files if not file.startswith(".") and file not in weights}
    return {path for path in found - left if path.is_file() and path.stat().st_size <= MAX_BYTES}


def copy_companions(source: Path, folder: Path, variables: Mapping[str, TemplateValue] | None = None) -> None:
    """Copies the `companions` of ``source``; the chat template, if there is one, sets ``variables`` in the copy, unless
    who applies it does."""
    for path in companions(source):
        relative = path.relative_to(source)
        for above in reversed(relative.parents[:-1]):  # leaves out ``folder``, which another part may have renamed
            (folder / above).mkdir(exist_ok=True)
        write_atomically(folder / relative, path.read_bytes())
    if variables and (template := chat_template(source)) is not None:
        write_atomically(folder / _TEMPLATE, setting(variables, template, unless_given=True).encode())


def chat_template(folder: Path) -> str | None:
    """The template as transformers finds it, in its own file or in tokenizer_config.json; None if there is none, or
    several by name."""
    if (own := folder / _TEMPLATE).is_file():
        return own.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    found = read_json(settings, _TokenizerConfig).chat_template if settings.is_file() else None
    return found if isinstance(found, str) else None


def has_tokenizer(folder: Path) -> bool:
    """True if the folder holds the vocabulary of a tokenizer of any kind."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def config_text(
    source_folder: Path,
    dtypes: set[str],
    quantization: Mapping[str, object] | None = None,
    *,
    drafts: bool = False,
    scores: bool = False,
    stacked: Sequence[str] = (),
) -> str:
    """The source's config.json, changed only so that it describes the written weights.

    ``dtypes`` are torch's names; ``quantization`` is the ``quantization_config`` of what is written: None for plain
    weights. Without ``drafts`` it has no draft layers. With ``scores`` it is that of a sequence classifier with one
    label, which reads a text's last token. Its ``pad_token_id``, which it would pass over, is null where that ends
    texts. ``stacked`` are of `STACKED`: a megatron checkpoint's config.json says which experts are one tensor a layer.
    """
    old = (source_folder / "config.json").read_text()
    read_config(source_folder)  # raises if it is torn
    config: dict[str, object] = json.loads(old)
    new = {key: value for key, value in config.items() if key not in ("quantization_config", *STACKED)}
    if isinstance(text := config.get("text_config"), dict):
        inner = {key: value for key, value in text.items() if key != "quantization_config"}
        new["text_config"] = inner if drafts else inner | dict.fromkeys(_DRAFT_KEYS & inner.keys(), 0)
    new.update(dict.fromkeys(stacked, True))
    if not drafts:
        new.update(dict.fromkeys(_DRAFT_KEYS & config.keys(), 0))
    for part in (new, new.get("text_config")) if len(dtypes) == 1 else ():
        if isinstance(part, dict):
            part.update(dict.fromkeys(_DTYPE_KEYS & part.keys(), str(*dtypes)))
    if quantization is not None:
        new["quantization_config"] = quantization
    if scores:
        known = config.get("architectures")
        of_family = str(known[0] if isinstance(known, list) and known else "").removesuffix("ForCausalLM")
        new["architectures"] = [of_family.removesuffix(CLASSIFIER) + CLASSIFIER]
        new |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        pad, ends = config.get("pad_token_id"), config.get("eos_token_id")
        if pad is not None and pad in (ends if isinstance(ends, list) else [ends]):
            new["pad_token_id"] = None
    return old if new == config else json.dumps(new, indent=2) + "\n"


def is_draft(name: str, shape: ModelShape) -> bool:
    """True if a folder's tensor belongs to draft layers, which the model of ``shape`` may have, or to a tower."""
    layers = range(shape.num_layers, shape.num_layers + shape.draft_layers)
    numbered = (f"model.layers.{layer}." for layer in layers)
    return name.startswith((*shape.other_prefixes, "mtp.", *numbered))


def model_tensors(
    folder: Path, stored: Mapping[str, Shape], shape: ModelShape
) -> tuple[dict[str, Shape], TiedHead | None]:
    """Returns the model's tensors among the ``stored`` ones, and the tied pair, which the caller must compare.

    Leaves out draft layers that the model lacks, a draft layer's copy of the embedding or the output matrix,
    frequencies of rotary angles and scales of a quantized KV cache. It also leaves out the output matrix of a tied
    model, which is in the pair. Raises WeightError if its shape is not the embedding's.
    """
    tied = _tied_head(stored, shape)
    if tied is not None and stored[tied.head] != stored[tied.embedding]:
        tied.refuse(folder)

    def aside(name: str) -> bool:
        if name.endswith(_ANGLES) or is_cache_scale(name) or (tied is not None and name == tied.head):
            return True
        return is_draft(name, shape) and (
            not shape.num_draft_layers or name.startswith(shape.other_prefixes) or name.endswith(_COPIES)
        )

    return {name: size for name, size in stored.items() if not aside(name)}, tied


def is_cache_scale(name: str) -> bool:
    """True if a tensor is a scale of a quantized KV cache, which only engines read."""
    return _CACHE_SCALE.search(name) is not None


def draft_copies(stored: Iterable[str], shape: ModelShape) -> dict[str, str]:
    """The matrices of draft layers in a folder that stand for its embedding or its output matrix, and which of the
    two."""
    names = find_family(shape).decoder
    embedding = f"{names.prefix}embed_tokens.weight"
    output = embedding if shape.tie_embeddings else f"{names.head}.weight"
    return {
        name: embedding if name.endswith(_COPIES[0]) else output
        for name in stored
        if is_draft(name, shape) and not name.startswith(shape.other_prefixes) and name.endswith(_COPIES)
    }


def _tied_head(stored: Mapping[str, Shape], shape: ModelShape) -> TiedHead | None:
    if not shape.tie_embeddings:
        return None
    names = find_family(shape).decoder
    tied = TiedHead(embedding=f"{names.prefix}embed_tokens.weight", head=f"{names.head}.weight")
    return tied if tied.head in stored and tied.embedding in stored else None


def raise_uncounted(where: Path, given: int, layout: Layout) -> None:
    """Raises WeightError if config.json describes so many more tensors that it must belong to another model."""
    wanted = layout.num_parameters(0)
    if wanted > 10 * given + 10_000:
        raise WeightError(f"{where} has {given} tensors, but its config.json describes {wanted}; it is another model's")


def raise_misfits(where: str, given: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raises WeightError that names each tensor that is missing, unknown or misshapen."""
    raise_lines(f"{where} do not fit the model", list(_misfits(given, wanted)))


def _misfits(given: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> Iterator[str]:
    for name, shape in wanted.items():
        head = name.endswith("lm_head.weight")
        if name not in given:
            tied = "; if it is the embedding, set tie_word_embeddings=true in config.json" if head else ""
            yield f"{name} is missing; it should have shape {shape}{tied}"
        elif (held := given[name]) != shape:
            rows = (head or name.endswith("embed_tokens.weight")) and held[1:] == shape[1:]
            fix = f"; set vocab_size={held[0]} in config.json to keep all rows" if rows else ""
            yield f"{name} has shape {held}; it should have {shape}{fix}"
    layers = {layer[0] for name in wanted if (layer := _LAYER.match(name))}
    for name in given.keys() - wanted.keys():
        beyond = name.startswith("mtp.") or ((layer := _LAYER.match(name)) and layer[0] not in layers)
        keys = ", ".join(sorted(_DRAFT_KEYS))
        draft = f"; for a draft layer, config.json has a number of them above 0 ({keys})" if beyond else ""
        yield f"{name} is unknown; the model has no such tensor{draft}"


def raise_lines(title: str, lines: list[str]) -> None:
    """Raises WeightError with ``title`` and ``lines``, if there are any."""
    if lines:
        raise WeightError("\n  ".join([f"{title}:", *_some(lines)]))
