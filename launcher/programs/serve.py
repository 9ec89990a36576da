"""``rl-megatron serve``: serves a model to evaluation tools over HTTP, on loopback, without a learner."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from launcher.build.alone import engine_alone
from launcher.build.data import stop_token_ids
from launcher.build.tokenizer import read_tokenizer
from launcher.build.trained import TrainedModel, hugging_face, of_folder, shown_variables
from launcher.preflight import engine
from launcher.preflight.job_memory import raise_unread_files
from launcher.preflight.subject import Subject
from launcher.processes.parent import until_signalled
from launcher.processes.scratch import scratch
from launcher.runs.lock import lock
from rl_megatron.durable import append_private
from rl_megatron.errors import ConfigError
from rl_megatron.observability.log import run_log
from rl_megatron.rollout.endpoint.open_app import OpenApplication
from rl_megatron.rollout.endpoint.server import HttpServer
from rl_megatron.rollout.local.batched import InThisProcess
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.learner import job_shape

_LEAST_KEY = 16  # characters


async def serve_model(target: TrainedModel, port: int, key_file: Path | None) -> None:
    """Serve until SIGINT or SIGTERM. Raises RLMegatronError if the model or its engine cannot start."""
    problems = [found.text for found in engine.check(Subject(target.config, for_job=False)) if found.kind == "problem"]
    if problems:
        raise ConfigError("\n".join(problems))
    target.out.mkdir(parents=True, exist_ok=True)
    file = key_file or target.out / "serve.key"
    given = key_file is not None
    with _key(file, given=given) as key, scratch() as spare, run_log(target.out, role="serve"):
        folder = hugging_face(target, spare)
        config = of_folder(target.config, folder)
        shape, tokenizer = (
            job_shape(config, read_shape(folder, config.learner.model)),
            read_tokenizer(folder, config.model.template_variables),
        )
        raise_unread_files(config, shape)
        async with engine_alone(config, folder, shape, target.out) as sampling:
            app = OpenApplication(
                engine=sampling,
                scorer=sampling if isinstance(sampling, InThisProcess) else None,
                tokenizer=tokenizer,
                stop_token_ids=stop_token_ids(folder, tokenizer),
                max_length=min(
                    shape.max_positions if config.rollout.served else shape.longest, config.longest_sequence
                ),
                key=key,
            )
            server = HttpServer(app)
            try:
                url = server.listen(port)
            except OSError as error:
                raise ConfigError(f"--port {port}: {error.strerror}; give another, or 0 for a free one") from error
            async with until_signalled():
                print(f"{target.source}, by {config.rollout.engine}: {url}")
                most = f"most tokens of a prompt and its answer: {app.max_length}"
                print(f"key: {file}; tokenizer: {folder}; {most}{shown_variables(config)}")
                print("Ctrl-C ends it", flush=True)
            await server.stop()


@contextlib.contextmanager
def _key(file: Path, *, given: bool) -> Iterator[str]:
    """The key in ``file``, which is the user's own if it was ``given``, else a new one, which no other server replaces
    while the context is open. Raises ConfigError."""
    if given:
        yield _given_key(file)
        return
    with append_private(file) as own:
        if not lock(own):
            raise ConfigError(
                f"{file}: a server that still runs has its key there; end it, or give --key-file {file} to serve with "
                "the same key, or --key-file with a file of your own"
            )
        key = secrets.token_hex(32)
        own.truncate(0)
        own.write(f"{key}\n".encode())
        own.flush()
        yield key


def _given_key(file: Path) -> str:
    try:
        opened = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--key-file {file}: {error.strerror}") from error
    with open(opened, encoding="utf-8") as read:
        if os.fstat(opened).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"--key-file {file}: others may read it; chmod 600 it")
        key = read.read(4096).strip()
    if len(key) < _LEAST_KEY or not key.isascii() or any(letter.isspace() for letter in key):
        raise ConfigError(f"--key-file {file}: give one line of at least {_LEAST_KEY} characters of ASCII")
    return key
