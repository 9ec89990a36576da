"""Starts vLLM's server for a run, on one of its nodes: ``python -m rl_megatron.engines.vllm.server <options>``.

``vllm serve`` is its command for several nodes, where all except the first run ``--headless``. That program does not
start without a distribution named vllm, as in builds for CPUs. The API server's module has no headless mode.
Runs in vLLM's interpreter. Written against vLLM 0.32.0 (entrypoints/cli/serve.py).
"""

from __future__ import annotations

from pathlib import Path

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

from rl_megatron.user_code import add_import_folder


def main() -> None:
    """Serves until a signal ends it."""
    add_import_folder(Path.cwd())
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM's server for a run"))
    arguments, serve = parser.parse_args(), ServeSubcommand()
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    main()
