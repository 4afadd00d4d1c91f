"""Keeps the libraries that we use from reporting anything to their makers.

Some libraries read these environment variables when they are imported, so `gspo/cli/__init__.py`
sets them first.
"""

import logging
import os

TELEMETRY_OFF = {
    "DO_NOT_TRACK": "1",  # vLLM, Hugging Face and others
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    # transformers asks a public service to convert other people's weights
    "DISABLE_SAFETENSORS_CONVERSION": "1",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
}


def turn_off_telemetry() -> None:
    """Turn reports off in this process and its child processes, whatever the environment says."""
    os.environ |= TELEMETRY_OFF
    # on some CPUs it warns, when it is imported, that kernels which it would fetch are missing;
    # nothing here uses them
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
