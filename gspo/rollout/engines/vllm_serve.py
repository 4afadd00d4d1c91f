"""The process of `gspo serve`: it runs `vllm serve`, and removes the server's folder at its end.

It takes the arguments of `vllm serve`. The console script `vllm` does not start with the builds for
the CPU. It asks for the version of the package "vllm", but their package has another name.
"""

import os
import shutil
import sys
from pathlib import Path

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gspo.rollout.engines.server_guard import DESCRIPTION_VARIABLE


def main() -> None:
    """Serve until a signal ends it."""
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    command.validate(arguments)
    try:
        command.cmd(arguments)
    finally:
        folder = Path(os.environ[DESCRIPTION_VARIABLE]).parent
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
