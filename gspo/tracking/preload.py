"""Imports the modules that wandb.init imports, before PyTorch is imported.

pydantic then searches fewer modules for the source of W&B's classes: wandb.init takes .2 s in place
of 1 s. Nothing is imported if the command line has tracking.wandb=disabled.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

if "tracking.wandb=disabled" not in sys.argv and find_spec("wandb"):
    import_module("wandb.sdk.launch.inputs.internal")
