"""No library that is used here reports on its use: set before any of them is imported, for this process and its own."""

import os

SILENT = {
    "WANDB_ERROR_REPORTING": "false",  # wandb and its core: errors and measurements go to their makers, offline too
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
os.environ |= SILENT
