"""The configuration of a run's model. The planner needs no weights.

The configuration is read from a folder or looked up on the hub. gspo.model.public_models stores the
configurations of some public models, so plans for these models need no network.
"""

import transformers
from transformers import PretrainedConfig

from gspo.model.loading import load_config, reading_model
from gspo.model.public_models import PUBLIC_MODELS, known_config, with_architecture
from gspo.model.settings import ModelSettings


def config_of(model: ModelSettings) -> PretrainedConfig:
    """Return a model's configuration. Raises ValueError, with a single line, if there is none."""
    source = model.source()
    if not source:
        return with_architecture(model.make()[0].config)
    if source in PUBLIC_MODELS:
        config = known_config(source)
        config._attn_implementation = model.attention
        return config
    with reading_model(source):
        return load_config(source, model.attention)


def class_of(config: PretrainedConfig) -> type[transformers.PreTrainedModel]:
    """Return the transformers class for a configuration. Raises ValueError if it names none."""
    if not config.architectures:
        raise ValueError("the model's configuration has no entry `architectures`")
    return getattr(transformers, config.architectures[0])
