"""Environment variables that keep our libraries from reporting anything to their makers.

Some libraries read them on import, so `gspo/cli/__init__.py` sets them first.
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
    """Turn telemetry off in this process and its children, and override the environment."""
    os.environ |= TELEMETRY_OFF
    # On some CPUs, bitsandbytes warns on import that kernels are missing. Nothing here uses them.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
