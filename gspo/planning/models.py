"""The configuration of the model that a run will load, of which the planner needs no weights.

A folder is read, and a name on the hub is looked up there. For some public models the configuration
is known here (gspo.model.public_models), so that a laptop without network can plan for them.
"""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig

from gspo.model.loading import load_config, one_line
from gspo.model.public_models import KNOWN, known_config, with_architecture
from gspo.model.settings import ModelSettings


def config_of(model: ModelSettings) -> PretrainedConfig:
    """Return a model's configuration. Raises ValueError, in one line, if there is none to be had."""
    source = model.source()
    if not source:
        return with_architecture(model.make()[0].config)
    if source in KNOWN:
        config = known_config(source)
        config._attn_implementation = model.attention
        return config
    with one_line(source):
        return load_config(source, model.attention)


def class_of(config: PretrainedConfig) -> type[transformers.PreTrainedModel]:
    """Return the class of models of this configuration."""
    return getattr(transformers, config.architectures[0])
