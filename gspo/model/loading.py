"""Loads a model and its tokenizer from a folder or the hub, and writes them as a folder that any
engine can load.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from gspo.io.files import errors_of_the_disk
from gspo.model.chat.template_trial import check_template
from gspo.model.claimed_size import check_claimed_size, check_stated_sizes
from gspo.model.hub import check_source, nearest_model
from gspo.model.sharding.dtensors import architecture

# methods whose weights transformers turns into 16 bits where it has no kernels
UNPACKED_WHEN_LOADED = ("mxfp4",)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "tokenizer_config.json",
)  # fmt: skip
SMALL = 2**28  # bytes of weights that are written once before a run, as a trial
SAMPLE = "The 12 cats\n\tsaid: naïve <b> 日本 x**2."  # a text to compare tokenizers on
# In quotes: transformers imports a class, and with it much else, when its name is first read.
Loaded = "tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]"

# else every checkpoint would draw a progress bar over the run's own
transformers.utils.logging.disable_progress_bar()


def load(path: str, attention: str = "sdpa") -> Loaded:
    """Load model and tokenizer from a folder or by a hub name. Raises ValueError, in one line, if
    that fails.
    """
    check_stated_sizes(path)
    check_tokenizer_files(path)
    with one_line(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        config = load_config(path, attention)
    check_not_quantized(config, path)
    check_claimed_size(config, path)
    with one_line(path):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,  # other weight files are pickles, which can run code
        )
    check_not_quantized(model.config, path, among=())
    model.generation_config = writable(model.generation_config)
    return model, usable(tokenizer, path)


def load_outline(path: str, attention: str) -> Loaded:
    """Return a model of the folder's or hub name's configuration whose weights have no content, and
    its tokenizer. Raises ValueError, in one line, if that fails."""
    check_tokenizer_files(path)
    with one_line(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        config = load_config(path, attention)
    check_not_quantized(config, path)
    with one_line(path), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model, usable(tokenizer, path)


def check_not_quantized(
    config: transformers.PretrainedConfig, path: str, among: tuple[str, ...] = UNPACKED_WHEN_LOADED
) -> None:
    """Raise ValueError if a model's weights are quantized, unless transformers unpacks the method,
    one of `among`.
    """
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return
    as_dict = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = getattr(as_dict.get("quant_method"), "value", as_dict.get("quant_method"))
    if method not in among:
        raise ValueError(
            f"model.path={path!r}: its weights are quantized ({method}), and such weights cannot be trained, not with "
            "policy.lora either; use the folder of 16 or 32 bits that it was made from"
        )


def writable(found: transformers.GenerationConfig | None) -> transformers.GenerationConfig | None:
    """Return a generation configuration that transformers writes, from one that it has read.

    Some public models say `do_sample: false` beside a temperature, which can be read and not
    written: there `do_sample` becomes true, and the other values stay. Where that does not help,
    the ids of tokens are all that is kept."""
    if found is None:
        return None
    mended = copy.deepcopy(found)
    for change in ({}, {"do_sample": True}):
        try:
            mended.update(**change)
            mended.validate(strict=True)
        except ValueError:
            continue
        return mended
    ids = {name: getattr(found, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return transformers.GenerationConfig(**ids)


def check_can_be_written(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """Write and read again what a checkpoint of a model has beside its weights, and the weights too
    if they are small.

    Raises ValueError if that fails, or if the tokenizer that was written gives other tokens. Else a
    run would end at its first checkpoint, with nothing saved."""
    kind = architecture(model)
    small = sum(p.numel() * p.element_size() for p in model.parameters()) <= SMALL
    with tempfile.TemporaryDirectory(prefix="gspo-checkpoint-") as folder:
        try:
            save_configuration(model, tokenizer, Path(folder))
            transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            again = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            if small:
                model.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # transformers raises exceptions of many types
            first_line = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{kind}: a checkpoint of it cannot be written ({type(error).__name__}: {first_line}); mend the "
                "model's folder first"
            ) from None
    if (
        again(SAMPLE)["input_ids"] != tokenizer(SAMPLE)["input_ids"]
        or again.chat_template != tokenizer.chat_template
    ):
        raise ValueError(
            f"{kind}: its tokenizer gives other tokens once it is written and read again, so a checkpoint would not be "
            "what was trained; mend the model's folder first"
        )


def load_config(path: str, attention: str) -> transformers.PretrainedConfig:
    """Load a model's configuration, with our choice of attention: config.json may name code on the
    hub.

    Models that PyTorch's own attention (sdpa) is not there for, such as Mamba, have their own
    instead."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if attention == "sdpa" and kind is not None and not kind._supports_sdpa:
        attention = "eager"
    config._attn_implementation = attention
    return config


def usable(
    tokenizer: transformers.PreTrainedTokenizerBase, path: str
) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer, with a padding token. Raises ValueError if responses could not end with
    it.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.path={path!r}: its tokenizer has no end-of-sequence token, so responses could not end"
        )
    if not tokenizer(SAMPLE)["input_ids"]:
        raise ValueError(
            f"model.path={path!r}: its tokenizer makes no tokens of a text; are all of its files there?"
        )
    check_template(tokenizer.chat_template, tokenizer.special_tokens_map, path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def one_line(path: str) -> Iterator[None]:
    """Turn any error of reading a model inside the block into a ValueError of one line."""
    there = Path(path).is_dir()
    if not there and (path.count("/") != 1 or path.startswith(("/", ".", "~"))) and "/" in path:
        raise ValueError(f"model.path={path!r}: there is no such folder")
    if Path(path, "adapter_config.json").exists() and not Path(path, "config.json").exists():
        raise ValueError(
            f"model.path={path!r} is a LoRA adapter without its model: merge the two (docs/algorithms.md), or name its "
            "run, as in `gspo evaluate run=RUN`"
        )
    if Path(path, "adapter_config.json").exists():  # transformers would apply it without a word
        raise ValueError(
            f"model.path={path!r} holds a LoRA adapter (adapter_config.json) beside a whole model: merge the two "
            "(docs/algorithms.md), or move the adapter away"
        )
    check_source(path)
    try:
        yield
    except (
        Exception
    ) as error:  # for an odd configuration transformers raises exceptions of many types
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model.path={path!r} needs code of its own (auto_map), which is never run; choose a model whose "
                "architecture and tokenizer transformers knows"
            ) from None
        if "safetensors" in str(error) and any(Path(path).glob("pytorch_model*.bin")):
            raise ValueError(
                f"model.path={path!r}: its weights are pickles (pytorch_model.bin), which are never read: convert them "
                "to safetensors"
            ) from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        absent = (
            ""
            if there
            else "there is no such folder here, and no model of this name from the hub: "
        )
        near = "" if there else nearest_model(path)
        raise ValueError(
            f"model.path={path!r} cannot be loaded: {absent}{lines[0]}{near}"
        ) from None


def check_tokenizer_files(path: str) -> None:
    """Raise ValueError for a folder without tokenizer: transformers would make one that knows no
    text.
    """
    folder = Path(path)
    if (folder / "config.json").is_file() and not any(
        (folder / name).exists() for name in TOKENIZER_FILES
    ):
        raise ValueError(
            f"model.path={path!r} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy the tokenizer's files "
            "of the model that it was made from into the folder"
        )


def positions(model: transformers.PreTrainedModel) -> int | None:
    """Return how many tokens of prompt and response together a model can take, None if its
    configuration has no bound."""
    config = model.config.get_text_config()
    # transformers maps the n_positions of GPT-2 and others to the first of these names.
    names = ("max_position_embeddings", "max_seq_len")
    return next((found for name in names if (found := getattr(config, name, None))), None)


def save(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a normal transformers folder of weights, config and tokenizer. `weights` replaces the
    model's own weights. Raises OSError if the disk fails."""
    with errors_of_the_disk(folder):
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def save_configuration(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Write what a model folder has beside its weights: configurations and the tokenizer. The
    weights may be spread over ranks."""
    with errors_of_the_disk(folder):
        model.config.architectures, model.config.dtype = [architecture(model)], torch.float32
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
