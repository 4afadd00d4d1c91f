"""A small random model in the place of a large public one: the same architecture and chat format,
few weights.

With it a recipe can be tried on a laptop before its real model is there: `cut=tiny` beside a recipe
chooses it. It learns nothing, but every part of a run that knows the model meets the real one's
kind: the class of transformers, heads that share keys, norms of queries and keys, routers, the
tokens that begin and end turns, tokens that are pieces of words.
"""

from __future__ import annotations

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gspo.model.chat.chat_formats import ChatFormat, chat_format
from gspo.model.public_models import known_config
from gspo.model.tiny import random_model

# Pieces of English that become one token; "Ġ" is a space. All other texts are tokens of one byte
# each.
MERGES = [
    ("Ġ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("Ġt", "he"),
    ("Ġ", "a"),
    ("r", "e"),
    ("o", "n"),
    ("Ġ", "s"),
    ("e", "r"),
]


def random_stand_in(
    path: str,
    attention: str,
    hidden: int,
    layers: int,
    heads: int,
    positions: int,
    experts: int,
    seed: int,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Return a random model of the architecture of `path`, a public model's name on the hub, and a
    tokenizer with its chat format. An MoE model's tokens go through two of its `experts`."""
    chat = chat_format(path)
    tokenizer = byte_tokenizer(chat)
    config = known_config(path)
    kind = getattr(transformers, config.architectures[0])
    shared = config.num_attention_heads // config.num_key_value_heads  # queries of a key head
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // shared, 1),
        "head_dim": hidden // heads,
        "max_position_embeddings": positions,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if hasattr(config, "num_experts"):
        # Qwen3-MoE writes num_local_experts
        key = config.attribute_map.get("num_experts", "num_experts")
        sizes |= {key: experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    # one for each layer
    kept = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    config = type(config).from_dict(kept | sizes)
    config._attn_implementation = attention
    model = random_model(kind, config, seed)
    if chat.ends_text:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    return model, tokenizer


def byte_tokenizer(chat: ChatFormat) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, which can write any text, with some merges and a family's
    chat format.

    >>> byte_tokenizer(chat_format("Qwen/Qwen3-0.6B")).tokenize("the cat in 12")
    ['t', 'he', 'Ġ', 'c', 'a', 't', 'Ġ', 'in', 'Ġ', '1', '2']
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [
        mark for mark in ("<|im_start|>", "<|im_end|>") if chat.template and mark in chat.template
    ]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=chat.begin,
        eos_token=chat.end,
        pad_token=chat.padding,
        additional_special_tokens=[mark for mark in marks if mark != chat.end],
        chat_template=chat.template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
