"""Starts a vLLM server that the runs of `rollout=vllm_server` sample with.

    gspo serve experiment=tiny_moe model.heads=2 rollout=vllm_server
    gspo serve model=hf model.path=Qwen/Qwen3-30B-A3B rollout=vllm_server -- --data-parallel-size 4

The server has random weights until a run sends it the run's weights. It listens at rollout.url. The
default is an address that only this machine reaches. The server only answers trainers that can read
the key in its folder: trainers of the user who started it.

== Options (key=value) ==

  KEY=VALUE    a setting of `gspo train`; model and rollout must equal the run's
  -- WORD ...  words for `vllm serve`, passed on unchanged
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gspo.cli.option_files import composed_settings
from gspo.config.settings import Settings
from gspo.data.lazy_torch import torch
from gspo.io.arguments import HELP
from gspo.io.errors import SettingError
from gspo.io.files import replace_text
from gspo.rollout.engines.server_guard import (
    DESCRIPTION_VARIABLE,
    SERVER_PID_VARIABLE,
    Guard,
    write_key,
)
from gspo.run.entry_point import command_line

if TYPE_CHECKING:
    from gspo.rollout.engines.weights_folder import EngineFolder


def main() -> None:
    """Start the server that the command line describes, in place of this process."""
    command_line(serve)


def serve() -> None:
    """Write the model's folder, without weights, and become `vllm serve`."""
    words, vllm_words = split_words(sys.argv[1:])
    if not words or HELP & set(words):
        print(__doc__.strip())
        sys.exit(0 if words else 2)
    settings = composed_settings(words)
    rollout = settings.rollout
    if rollout.name != "vllm_server":
        raise SettingError(
            "rollout",
            rollout.name,
            "`gspo serve` starts the server of rollout=vllm_server",
            remedy="set rollout=vllm_server",
        )
    # these import PyTorch, which takes seconds
    from gspo.rollout.engines.vllm import check_installed
    from gspo.rollout.engines.vllm_base import PIECE_BYTES
    from gspo.rollout.engines.vllm_environment import own_environment, set_environment
    from gspo.rollout.engines.weights_folder import EngineFolder

    check_installed()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    set_environment(rollout.routes, not torch.cuda.is_available())
    folder = EngineFolder(PIECE_BYTES, rollout.folder)
    options = prepared(settings, folder)
    os.set_inheritable(folder.lock, True)  # the server holds the lock until its end
    environment = own_environment([]) | {
        "TMPDIR": str(folder.path),
        "VLLM_SERVER_DEV_MODE": "1",  # for the requests that load weights
        DESCRIPTION_VARIABLE: str(folder.path / "description.json"),
        # this process becomes the server, and vLLM's workers end with it
        SERVER_PID_VARIABLE: str(os.getpid()),
    }
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server has a process for its engine
    command = [
        sys.executable,
        "-P",
        "-m",
        "gspo.rollout.engines.vllm_serve",
        str(folder.path / "model"),
    ]
    print(
        f"vLLM starts at {rollout.url}; it is ready when {rollout.url}/health answers", flush=True
    )
    os.execve(command[0], [*command, *as_words(options), *vllm_words], environment)


def split_words(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the run's settings, and the words after "--", which go to `vllm serve`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def prepared(settings: Settings, folder: EngineFolder) -> dict[str, Any]:
    """Write the model's configuration and the server's description, and return vLLM's options."""
    from gspo.model.cost import uniform_head_dim
    from gspo.model.loading import positions, save_configuration
    from gspo.rollout.engines.vllm import check_heads, logprobs_mode, vllm_options
    from gspo.rollout.engines.vllm_kept import max_logprobs

    model, tokenizer = settings.model.outline()
    on_cpu = not torch.cuda.is_available()
    rollout = settings.rollout
    check_heads(uniform_head_dim(model.config), on_cpu)
    max_model_len = rollout.max_model_len or positions(model.config)
    if max_model_len is None:
        raise ValueError(
            "rollout.max_model_len=null: this model sets no limit; set the maximum number of "
            "tokens of prompt and response together"
        )
    save_configuration(model, tokenizer, folder.path / "model")
    description = {
        "url": rollout.url,
        "on_cpu": on_cpu,
        "dtype": rollout.dtype,
        "head_dtype": settings.policy.head_dtype,
        "routes": rollout.routes,
        "logprobs_mode": logprobs_mode(rollout),
        "max_logprobs": max_logprobs(rollout) if rollout.keep_mask else 0,
        "max_model_len": max_model_len,
        "shapes": {name: list(tensor.shape) for name, tensor in model.state_dict().items()},
    }
    write_key(folder.path)
    replace_text(folder.path / "description.json", json.dumps(description))
    address = urlsplit(rollout.url)
    return vllm_options(rollout, settings.policy.head_dtype, max_model_len, on_cpu) | {
        "load_format": "dummy",
        "tokens_only": True,
        "disable_uvicorn_access_log": True,
        "middleware": f"{Guard.__module__}.{Guard.__name__}",
        "host": address.hostname,
        "port": address.port,
    }


def as_words(options: dict[str, Any]) -> list[str]:
    """Return options as words of the command line.

    For example, {"seed": 0, "eager": False} becomes --seed=0 --no-eager."""
    words = []
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, dict):
            words.append(f"--{dashed}={json.dumps(value)}")
        elif isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            words.append(f"--{dashed}={value}")
    return words
