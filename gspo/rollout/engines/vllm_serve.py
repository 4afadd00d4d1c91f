"""Runs `vllm serve` with the arguments of the command line, for `gspo serve`, whose folder it
removes at its end.

The console script `vllm` asks for the version of an installed package of the name "vllm". The
builds for the CPU have another name, so there it does not start.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gspo.rollout.engines.server_guard import DESCRIPTION


def main() -> None:
    """Serve until a signal ends it."""
    cli_env_setup()
    parser, command = FlexibleArgumentParser(prog="vllm"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    command.validate(arguments)
    try:
        command.cmd(arguments)
    finally:
        shutil.rmtree(Path(os.environ[DESCRIPTION]).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
