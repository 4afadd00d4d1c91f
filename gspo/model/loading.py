"""Loads a model and its tokenizer from a folder or the hub, and writes them as a model folder.

Any engine can load such a folder.
"""

import copy
import itertools
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from gspo.io.errors import SettingError, first_line
from gspo.io.files import SETTINGS_FILE, errors_of_the_disk
from gspo.model.chat.template_trial import check_template
from gspo.model.claimed_size import check_claimed_size, check_stated_sizes
from gspo.model.folder_checks import (
    check_complete,
    check_generation_config,
    check_not_quantized,
    check_tied_head,
    check_tokenizer_files,
)
from gspo.model.hub import check_source, nearest_model
from gspo.model.sharding.dtensors import architecture
from gspo.model.weights import Loaded, input_embedding

ALIGNMENT = 64  # bytes, to which PyTorch aligns its tensors on a CPU
# weights of up to so many bytes are written as a trial before a run
MAX_TRIAL_BYTES = 2**28
# a text on which tokenizers are compared
SAMPLE_TEXT = "The 12 cats\n\tsaid: naïve <b> 日本 x**2."

# Otherwise every checkpoint would draw a progress bar over the run's own.
logging.disable_progress_bar()


def load(path: str, attention: str = "sdpa") -> Loaded:
    """Load model and tokenizer from a folder or by a hub name.

    Raises ValueError with a single-line message if that fails."""
    check_tokenizer_files(path)
    with reading_model(path):
        tokenizer = load_tokenizer(path)
        config = load_config(path, attention)
    check_not_quantized(config, path)
    check_claimed_size(config, path)
    with reading_model(path):
        # a pair, which the annotation of from_pretrained leaves out
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            # other weight files are pickles, which can run code
            use_safetensors=True,
            output_loading_info=True,
        )
    model, report = loaded
    align(model)
    untie_config(model)
    check_complete(report["missing_keys"], path)
    check_not_quantized(model.config, path, allowed=())
    # a model that cannot generate has none
    if model.generation_config is not None:
        model.generation_config = writable(model.generation_config)
    return model, usable(tokenizer, path)


def align(model: transformers.PreTrainedModel) -> None:
    """Move the model's tensors to addresses that PyTorch's own tensors have.

    Tensors of a mapped file lie at any address, and matrix products round by address. A resumed run
    would differ from one that made its weights itself."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def untie_config(model: transformers.PreTrainedModel) -> None:
    """Say in the configuration that embedding and head are two tensors, if they are.

    transformers does not tie them if the files hold two different tensors, whatever the
    configuration says. Copies of the model and its checkpoints follow the configuration."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is input_embedding(model)
    if getattr(config, "tie_word_embeddings", False) and not is_tied:
        config.tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def load_outline(path: str, attention: str) -> Loaded:
    """Load a tokenizer, and build its model on the meta device, without the weights' content.

    Raises ValueError with a single-line message if that fails."""
    check_tokenizer_files(path)
    with reading_model(path):
        tokenizer = load_tokenizer(path)
        config = load_config(path, attention)
    check_not_quantized(config, path)
    check_tied_head(config, path)
    with reading_model(path), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model, usable(tokenizer, path)


def writable(config: transformers.GenerationConfig) -> transformers.GenerationConfig:
    """Return a generation configuration that transformers agrees to write.

    Some public models have `do_sample: false` beside a temperature, which transformers reads but
    does not write. Then `do_sample` becomes true, and the other values stay. If that does not help,
    only the ids of tokens are kept."""
    repaired = copy.deepcopy(config)
    for change in ({}, {"do_sample": True}):
        try:
            repaired.update(**change)
            repaired.validate(strict=True)
        except ValueError:
            continue
        return repaired
    return transformers.GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def check_can_be_written(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """Raise ValueError if a checkpoint of a model cannot be written and read again.

    Configuration and tokenizer are written to a temporary folder, and the weights too if they are
    small. The tokenizer must give the same tokens afterwards. Without this check a run could end at
    its first checkpoint, with nothing saved."""
    name = architecture(model)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with tempfile.TemporaryDirectory(prefix="gspo-checkpoint-") as folder:
        try:
            save_configuration(model, tokenizer, Path(folder))
            transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            reread = load_tokenizer(folder)
            if weight_bytes <= MAX_TRIAL_BYTES:
                with errors_of_the_disk(Path(folder)):
                    model.save_pretrained(folder)
        except OSError:
            raise
        # transformers raises exceptions of many types
        except Exception as error:
            raise ValueError(
                f"{name}: a checkpoint of it cannot be written ({type(error).__name__}: "
                f"{first_line(error)}); fix the model's folder first"
            ) from None
    has_same_tokens = reread(SAMPLE_TEXT)["input_ids"] == tokenizer(SAMPLE_TEXT)["input_ids"]
    if not has_same_tokens or reread.chat_template != tokenizer.chat_template:
        raise ValueError(
            f"{name}: its tokenizer gives other tokens once it is written and read again, so a "
            "checkpoint would not be what was trained; fix the model's folder first"
        )


def load_tokenizer(folder: str | Path) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or of a name on the hub."""
    # transformers reads the model's configuration too
    check_stated_sizes(str(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # transformers' annotation allows None
    if tokenizer is None:
        raise ValueError("transformers knows no tokenizer for it")
    return tokenizer


def load_config(path: str, attention: str) -> transformers.PretrainedConfig:
    """Load a model's configuration, and set our choice of attention.

    The attention of config.json is not used, because it may name code on the hub. Models without
    PyTorch's own attention (sdpa), such as Mamba, get "eager" instead. So do models with a soft cap
    on attention scores, such as Gemma 2: sdpa would leave it out."""
    check_stated_sizes(path)
    check_generation_config(path)
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    has_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if attention == "sdpa" and (has_cap or not getattr(model_class, "_supports_sdpa", True)):
        attention = "eager"
    config._attn_implementation = attention
    config.return_dict = True
    return config


def usable(
    tokenizer: transformers.PreTrainedTokenizerBase, path: str
) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer, with a padding token.

    Raises ValueError if it has no end-of-sequence token, gives no tokens, or has a bad chat
    template."""
    if tokenizer.eos_token_id is None:
        raise SettingError(
            "model.path",
            path,
            "its tokenizer has no end-of-sequence token, so responses could not end",
        )
    if not tokenizer(SAMPLE_TEXT)["input_ids"]:
        raise SettingError(
            "model.path",
            path,
            "its tokenizer makes no tokens of a text; are all of its files there?",
        )
    check_template(tokenizer.chat_template, tokenizer.special_tokens_map, path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_path(path: str) -> None:
    """Raise ValueError if a path is no model: a missing folder, a run, or a LoRA adapter."""
    is_folder = Path(path).is_dir()
    # a name on the hub is NAME or OWNER/NAME
    could_be_hub_name = path.count("/") <= 1 and not path.startswith(("/", ".", "~"))
    if not is_folder and not could_be_hub_name and "/" in path:
        raise SettingError("model.path", path, "there is no such folder")
    if Path(path, SETTINGS_FILE).exists() and not Path(path, "config.json").exists():
        raise SettingError(
            "model.path",
            path,
            "is the directory of a run, not of a model",
            remedy=f"name one of its checkpoints, as in {path}/checkpoints/step_000100",
        )
    if Path(path, "adapter_config.json").exists():
        if not Path(path, "config.json").exists():
            raise SettingError(
                "model.path",
                path,
                "is a LoRA adapter without its model: merge the two (docs/algorithms.md), "
                "or name its run, as in `gspo evaluate RUN`",
            )
        # transformers would apply the adapter without a message
        raise SettingError(
            "model.path",
            path,
            "holds a LoRA adapter (adapter_config.json) beside a whole model: merge the "
            "two (docs/algorithms.md), or move the adapter away",
        )


@contextmanager
def reading_model(path: str) -> Generator[None]:
    """Check a model's path, then turn any error in this context into a ValueError of a single line.

    If the hub cannot be reached, transformers reads this machine's cache from now on."""
    check_path(path)
    check_source(path)
    is_folder = Path(path).is_dir()
    try:
        yield
    except SettingError:  # a refusal of ours, which names its own setting
        raise
    # for an odd configuration transformers raises exceptions of many types
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise SettingError(
                "model.path",
                path,
                "needs code of its own (auto_map), which is never run",
                remedy="choose a model whose architecture and tokenizer transformers knows",
            ) from None
        if "safetensors" in str(error) and any(Path(path).glob("pytorch_model*.bin")):
            raise SettingError(
                "model.path",
                path,
                "its weights are pickles (pytorch_model.bin), which are never read",
                remedy="convert them to safetensors",
            ) from None
        if is_folder:
            raise SettingError(
                "model.path", path, f"cannot be loaded: {first_line(error)}"
            ) from None
        raise SettingError(
            "model.path",
            path,
            "cannot be loaded: there is no such folder here, and no model of this name "
            f"from the hub: {first_line(error)}{nearest_model(path)}",
        ) from None


def positions(config: transformers.PretrainedConfig) -> int | None:
    """Return the maximum number of tokens of prompt and response together, None for no bound.

    LongRoPE (Phi-3) rotates all rows of a batch by other factors if one row is longer than the
    original context length. A row's log-probs would then depend on its neighbours, so the original
    context length is the bound."""
    config = config.get_text_config()
    rotation = getattr(config, "rope_parameters", None) or {}
    if rotation.get("rope_type") == "longrope":
        return rotation["original_max_position_embeddings"]
    # transformers maps the n_positions of GPT-2 and others to the first name.
    maximum = getattr(config, "max_position_embeddings", None)
    return maximum or getattr(config, "max_seq_len", None) or None


def save(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a normal transformers folder of weights, config and tokenizer.

    `weights` replaces the model's own weights. Raises OSError if the disk fails."""
    with errors_of_the_disk(folder):
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def save_configuration(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Write a model folder without its weights: the configurations and the tokenizer.

    The weights may be sharded over ranks."""
    with errors_of_the_disk(folder):
        model.config.architectures = [architecture(model)]
        model.config.dtype = torch.float32
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
