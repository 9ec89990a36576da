"""Checks the files of models: the policy's weights, tokenizer and chat template, the files of a reference, a critic and
other models that score, and the weight file that servers read."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

from launcher.preflight.subject import Finding, PreflightContext, note, problem, run_check, unchecked
from launcher.servers.degrees import served_bytes
from rl_megatron.config.beside import (
    frozen_folders,
    longest_scored_row,
    scoring_roles,
    self_teachers,
    separate,
    with_role_keys,
)
from rl_megatron.config.learner_checks import refuse, sparse_problem
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, data_sources
from rl_megatron.config.sections.jobs import CHECKPOINT
from rl_megatron.config.sections.teachers import teacher_role
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.errors import ConfigError, RLMegatronError, download_hint, gigabytes
from rl_megatron.feature import active, load_side
from rl_megatron.files import parse
from rl_megatron.models.families.fields import CLASSIFIER
from rl_megatron.models.shape import ModelShape, length_problem
from rl_megatron.placement.files import address_hosts, weights_folder
from rl_megatron.weights.bytes.mapped import MappedFile, read_header
from rl_megatron.weights.checkpoints.megatron import is_megatron, raise_other_model
from rl_megatron.weights.formats.hf_folder import has_tokenizer, weight_files
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.learner import role_layout, role_shape


def check(subject: PreflightContext) -> Iterator[Finding]:
    """Yields a problem for each file that ``model.path`` lacks and each reason why a reference or a critic cannot score
    for it. A tiny model, which the run makes, cannot learn conversations, which is a problem too."""
    yield from run_check("model files", _policy(subject))
    if subject.config.kind.scores:
        yield from run_check("model files", _classifier(subject))
    for role, (folder, key) in frozen_folders(subject.config).items():
        if role in scoring_roles(subject.config):
            assert folder is not None
            yield from run_check("model files", _scoring(subject, role, folder, key))
        elif folder is not None:
            yield from run_check("model files", _frozen(subject, role, folder, key))
    algorithm = subject.config.algorithm
    needed = subject.config.kind.samples and algorithm.needs_critic and not _has_rl_checkpoint(subject.config)
    if needed and algorithm.critic.path is not None:
        yield from run_check("model files", _critic(subject, "algorithm.critic.path", algorithm.critic.path))
    for name, one in subject.config.algorithm.kl.teachers.items():
        if one.server is not None and one.path is not None:
            yield from _served(subject, name, one.path)
    yield from run_check("model files", _check_policy_teachers(subject))


def _has_rl_checkpoint(config: RunConfig) -> bool:
    """True if the run has a checkpoint of reinforcement learning, which includes its critic's."""
    found = (config.run.dir / str(config.run.name) / "checkpoints").glob("step_*")
    return any(CHECKPOINT.fullmatch(path.name) and path.is_dir() for path in found)


def _check_policy_teachers(subject: PreflightContext) -> Iterator[Finding]:
    """Yields each teacher that is the policy itself and reads more tokens than it has positions."""
    for role in self_teachers(subject.config):
        named, longest = longest_scored_row(subject.config, role)
        dense = sparse_problem(subject.config.role_learner(role), subject.shape)
        if too_long := length_problem(subject.shape, named, longest, dense):
            yield problem(too_long)


def _served(subject: PreflightContext, name: str, folder: Path) -> Iterator[Finding]:
    """Yields why a teacher served by a server cannot score the policy's tokens: its lengths, its vocabulary."""
    key = f"algorithm.kl.teachers.{name}.path"
    named, longest = longest_scored_row(subject.config, teacher_role(name))
    if not (folder / "config.json").is_file():
        what = f"give the Hugging Face folder of the model that the server serves{download_hint(folder)}"
        yield problem(f"{key}={folder}: it has no config.json; {what}")
        return
    try:
        most = read_shape(folder).max_positions
    except ConfigError:
        yield unchecked(f"the lengths of {key}={folder}: its model family is unknown here")
    else:
        if most <= longest:
            yield problem(
                f"{named} = {longest}, with one more token that the server samples, is "
                f"more than max_position_embeddings={most} of {key}={folder}; lower them"
            )
    yield from _same_tokens(subject.model_folder, folder, key)


def _policy(subject: PreflightContext) -> Iterator[Finding]:
    folder = subject.model_folder
    if folder is None:
        yield from _generated(subject.config)
        return
    if not (folder / "config.json").is_file():  # the check of sizes reports it
        return
    if not has_tokenizer(folder):
        yield problem(
            f"model.path={folder}: it has no tokenizer (tokenizer.json, tokenizer.model, ...); copy it from "
            "the base model"
        )
    else:
        yield from run_check("model files", _tokenizer(subject, folder))
    yield from _check_vocabulary_rows(folder, subject.shape.vocab_size)
    if subject.config.model.random_weights:
        return
    if is_megatron(folder):
        yield unchecked("the weights, in a megatron checkpoint (rl-megatron convert --verify reads them all)")
        return
    found = [*_weights(folder, "model.path")]
    yield from found
    checks = [load_side(one.check_files) for one in active(subject.config.learner) if one.check_files and not found]
    yield from (Finding(kind, text) for check in checks for kind, text in check(folder, subject.shape))


def _tokenizer(subject: PreflightContext, folder: Path) -> Iterator[Finding]:
    """Yields a problem if the run cannot use the tokenizer, its end tokens or its chat template. Yields a note if the
    template writes no generation prompt."""
    tokenizer = subject.tokenizer
    if tokenizer is None:
        yield unchecked("the tokenizer and its chat template, because torch is not installed here")
        return
    try:
        assert subject.stop_token_ids
    except RLMegatronError as error:
        yield problem(str(error))
    from rl_megatron.agents.conversation.rendering import ChatRenderer, unwritten_header
    from rl_megatron.agents.conversation.written import ChatTemplate  # transformers takes half a second to import

    keys = dict(_shown_by_template(subject.config))
    if not tokenizer.chat_template:
        for key, advice in keys.items():
            yield problem(f"{key}, but the tokenizer of model.path={folder} has no chat template; {advice}")
    elif keys:
        splices = any(not key.endswith("chat_template=true") for key in keys)
        template = ChatTemplate(tokenizer) if splices else ChatRenderer(tokenizer)
        if header := unwritten_header(template):
            yield note(
                f"{next(iter(keys))}: the chat template of model.path={folder} ignores add_generation_prompt, so a "
                f"prompt ends without {header!r:.60} and the policy samples it; give a template that writes it"
            )


def _check_vocabulary_rows(folder: Path, rows: int) -> Iterator[Finding]:
    """Yields that the tokenizer has tokens beyond the embedding's rows, as some published models have and never use."""
    beyond = {number: token for token, number in (_token_ids(folder) or {}).items() if number >= rows}
    if beyond:
        first = min(beyond)
        yield unchecked(
            f"whether the data uses tokens of model.path={folder} without a row in its embedding: the tokenizer has "
            f"{len(beyond)}, for example {beyond[first]!r:.40} ({first}), and the embedding {rows} rows. A text with "
            "one ends the run; give the model its own tokenizer, or resize its embedding (resize_token_embeddings)"
        )


def _generated(config: RunConfig) -> Iterator[Finding]:
    """Yields each source of turns to learn: the tiny model's chat template ends none with a token."""
    if config.kind.samples or config.kind.scores:
        return
    for key, data in data_sources(config.data).items():
        if isinstance(data, FileKeys) and data.fields["messages"] is not None:
            yield problem(
                f"{key}.fields.messages={data.fields['messages']!r}, but the chat template of the tiny model, which "
                "the run makes without model.path, ends no turn with a token. So the model would not learn to stop; "
                "set model.path to a model with a chat template that ends turns"
            )


def _shown_by_template(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields each setting that needs the tokenizer's chat template: key with value, and what to do without one."""
    for key, data in {**data_sources(config.data), **config.eval.data_of_sets}.items():
        if isinstance(data, FileKeys) and data.chat_template:
            yield f"{key}.chat_template=true", "set it to false"
        elif isinstance(data, FileKeys) and data.fields["messages"] is not None:
            yield f"{key}.fields.messages={data.fields['messages']!r}", "give the tokenizer a template"
    for key, one in config.environments.items():
        if one.template == "chat":
            yield f"{key}.template=chat", f"set {key}.template=plain, or give the tokenizer a template"


def _classifier(subject: PreflightContext) -> Iterator[Finding]:
    """Yields a problem if no class of transformers could load the reward model."""
    family = subject.shape.family
    spec = find_spec("transformers")  # its import takes seconds
    assert spec is not None
    assert spec.origin is not None
    code = Path(spec.origin).parent / "models" / family / f"modeling_{family}.py"
    if not code.is_file() or CLASSIFIER not in code.read_text(encoding="utf-8"):
        yield problem(
            f"job={subject.config.job}: transformers has no sequence classifier for model_type={family!r}, so nothing "
            "could load the model; start from another family, for example qwen3_moe, qwen3, llama or deepseek_v3"
        )


def _frozen(subject: PreflightContext, role: str, folder: Path, key: str) -> Iterator[Finding]:
    """Yields why a reference, or a teacher that ranks hold, cannot score the policy's tokens: its sizes, its files, its
    vocabulary."""
    config, own = subject.config, subject.shape
    shape, given = role_shape(config, own, role), f"{key}={folder}"
    if role not in separate(config) and (apart := _differing_sizes(shape, own)):
        yield problem(
            f"{given}: its {apart} differ from the policy's, but the same ranks hold both in "
            "turn; set roles.reference=separate, which gives it its own ranks"
        )
    elif shape.vocab_size < own.vocab_size:
        yield problem(
            f"{given} has {shape.vocab_size} tokens, fewer than the policy's {own.vocab_size}: it has no log-prob "
            "for the others; give a model with the same tokenizer"
        )
    elif too_long := length_problem(
        shape, *longest_scored_row(config, role), sparse_problem(config.role_learner(role), shape)
    ):
        yield problem(f"{given}: {too_long}")
    else:
        yield from _laid_out(config, own, shape, role, given)
    yield from _weights(folder, key)
    yield from _same_tokens(subject.model_folder, folder, key)


def _critic(subject: PreflightContext, key: str, folder: Path) -> Iterator[Finding]:
    """Yields why the critic, which has the policy's sizes but for the output layer, cannot start from its folder."""
    given, own, sharded = f"{key}={folder}", subject.shape, (folder / ".metadata").is_file()
    if not (folder / "config.json").is_file():
        if sharded:
            yield from _check_critic(folder, given, own)
        else:
            yield problem(
                f"{given}: it has neither config.json nor .metadata; give a Hugging Face folder of the policy's sizes, "
                "or the critic/ folder of a checkpoint"
            )
        return
    try:
        found = read_shape(folder, subject.config.learner.model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", f"{key}=")) from error
    if apart := _differing_sizes(
        replace(
            found,
            has_score_head=own.has_score_head,
            tie_embeddings=own.tie_embeddings,
            num_draft_layers=own.num_draft_layers,
        ),
        own,
    ):
        yield problem(
            f"{given}: its {apart} differ from the policy's, but a critic needs the same; give a model of the policy's "
            "sizes, for example a reward model that was trained from it"
        )
    if sharded:
        yield unchecked(f"the weights of {given}, a megatron checkpoint (rl-megatron convert --verify reads them all)")
    else:
        yield from _weights(folder, key)
    yield from _same_tokens(subject.model_folder, folder, key)


def _check_critic(shards: Path, given: str, own: ModelShape) -> Iterator[Finding]:
    """Yields a problem if a checkpoint is of a critic whose tensors have other sizes than those of the policy's."""
    try:
        raise_other_model(
            shards, replace(own, has_score_head=True, tie_embeddings=False, num_draft_layers=False), of_critic=True
        )
    except RLMegatronError as error:
        yield problem(f"{given} is not a checkpoint of a critic with the policy's sizes:\n{error}")


def _scoring(subject: PreflightContext, role: str, folder: Path, key: str) -> Iterator[Finding]:
    """Yields why ranks cannot score texts with a reward model: its sizes, its files, its own tokenizer."""
    config, own, given = subject.config, subject.shape, f"{key}={folder}"
    shape = role_shape(config, own, role)
    if not has_tokenizer(folder):
        yield problem(f"{given}: it has no tokenizer to read texts with; copy it from its base model")
    elif (ids := _token_ids(folder)) and (most := max(ids.values())) >= shape.vocab_size:
        yield problem(
            f"{given}: its tokenizer has a token {most}, but its embedding {shape.vocab_size} rows; give the "
            "tokenizer that it was trained with"
        )
    yield from _laid_out(config, own, shape, role, given)
    yield from _weights(folder, key)


def _laid_out(config: RunConfig, own: ModelShape, shape: ModelShape, role: str, given: str) -> Iterator[Finding]:
    """Yields why the ranks of a role cannot hold its model, whose key and folder are ``given``."""
    try:
        role_layout(config, own, role)
        refuse(shape, config.role_learner(role))
    except ConfigError as error:
        said = with_role_keys(config, role, str(error))
        yield problem("\n".join(f"{given}: {line}" for line in said.splitlines()))


_BESIDE_SIZES = {"family_at", "max_positions", "draft_layers", "stacked_drafts", "other_prefixes"}


def _differing_sizes(shape: ModelShape, own: ModelShape) -> str:
    """Returns the sizes of ``shape`` that differ from the policy's; empty if its weights fit in the policy's place."""
    sizes = _sizes(own)
    return ", ".join(sorted(name for name, size in _sizes(shape).items() if size != sizes[name]))


def _sizes(shape: ModelShape) -> dict[str, object]:
    """Returns the sizes that decide where a model's weights lie, by name."""
    named = {each.name: getattr(shape, each.name) for each in fields(shape)}
    return {name: size for name, size in named.items() if name not in _BESIDE_SIZES}


def _same_tokens(policy: Path | None, reference: Path, key: str) -> Iterator[Finding]:
    """Yields a problem if the two tokenizers give another id to some token."""
    read = [_token_ids(folder) for folder in (policy, reference)]
    mine, theirs = read
    if mine is None or theirs is None:
        yield unchecked(f"whether {key} has the policy's tokens: not both have a tokenizer.json")
    elif apart := sorted(token for token, number in mine.items() if theirs.get(token) != number):
        token = apart[0]
        yield problem(
            f"{key}={reference}: {len(apart)} of the policy's {len(mine)} tokens have other ids, like "
            f"{token!r:.40}, {mine[token]} and {theirs.get(token, 'none')}; give a model with the same tokenizer"
        )


def _token_ids(folder: Path | None) -> dict[str, int] | None:
    """Returns the id of each token of a folder's tokenizer.json; None if there is none that can be read."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        read = parse((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = read["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else ((token, at) for at, (token, _) in enumerate(vocab))
        return dict(pairs) | {one["content"]: one["id"] for one in read.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _weights(folder: Path, key: str) -> Iterator[Finding]:
    """Yields each safetensors file that is missing, or shorter or longer than its header says."""
    try:
        files, _ = weight_files(folder)
    except RLMegatronError as error:
        yield problem(f"{key}: {error}")
        return
    for name in files:
        try:
            read_header(MappedFile(folder / name))
        except (RLMegatronError, ValueError, OSError) as error:  # ValueError: nothing to map in an empty file
            yield problem(f"{key}: {folder / name}: {error}")


def fitting_problems(config: RunConfig, needed: int, when: str = "") -> Iterator[Finding]:
    """Yields a problem if the file of weights, of ``needed`` bytes in a node's memory, can never fit there."""
    has = shutil.disk_usage(NODE_MEMORY).total
    if 0 < has < needed:  # 0: without a limit
        size, room = gigabytes(needed, has)
        yield problem(
            f"weights.folder={weights_folder(config)} needs {size}{when} for the file of weights, but "
            f"{NODE_MEMORY} has {room} here; give the container more shared memory (docker run --shm-size="
            f"{math.ceil(needed / 2**30)}g; in Kubernetes a volume of memory at {NODE_MEMORY}), or set weights.folder "
            "to a folder on disk that all nodes see"
        )


def usable_problems(config: RunConfig, *, here: bool) -> Iterator[Finding]:
    """Yields a problem if the file of weights cannot be made in ``weights.folder``; ``here``: on this machine."""
    folder = config.weights.folder if config.rollout.served else None
    if folder is None:
        return
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir() or (here and not os.access(nearest, os.W_OK | os.X_OK)):
        what = "it cannot be written to" if nearest.is_dir() else "it is not a folder"
        yield problem(f"weights.folder={folder}: cannot create the file of weights in {nearest}: {what}; give another")


def seen_problems(config: RunConfig) -> Iterator[Finding]:
    """Yields a problem if servers by address on another machine are to read a file in this one's memory."""
    folder, addresses = weights_folder(config), config.rollout.server.addresses
    if not config.rollout.served or addresses is None or folder is None or not folder.is_relative_to(NODE_MEMORY):
        return
    if away := [host for host in address_hosts(addresses) if _is_remote(host)]:
        yield problem(
            f"weights.folder={folder} is in the memory of a node, which the servers of rollout.server.addresses at "
            f"{', '.join(dict.fromkeys(away))} do not see; give a folder that all see, or leave it out. A server on "
            f"this machine has the address 127.0.0.1 or {socket.gethostname()}"
        )


def _is_remote(host: str) -> bool:
    """True if the host has addresses, and all are another machine's. False if no address is found in a second."""
    found: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(str(address[0]) for *_, address in socket.getaddrinfo(host, None))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(1.0)
    own = {one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each}
    return bool(found) and not any(_is_own(ip_address(one.partition("%")[0]), own) for one in found)


def _is_own(address: IPv4Address | IPv6Address, own: set[str]) -> bool:
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified or str(address) in own


def raise_unread_files(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError if servers without a learner cannot read the file of a model of ``shape``. Raises it too if
    the file is in this machine's memory and can never fit there."""
    folder = weights_folder(config) if config.rollout.served else None
    needed = served_bytes(config, shape) if folder is not None and folder.is_relative_to(NODE_MEMORY) else 0
    found = *usable_problems(config, here=True), *seen_problems(config), *fitting_problems(config, needed)
    if found:
        raise ConfigError("\n".join(one.text for one in found))
