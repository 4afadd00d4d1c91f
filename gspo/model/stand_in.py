"""A small random model that stands in for a large public model of the same architecture.

With a stand-in, a recipe can be tried on a laptop that does not have the real model: `cut=tiny`
beside a recipe chooses it. The stand-in learns nothing. It has the real model's class of
transformers, heads that share keys, norms of queries and keys, routers, chat format, tokens that
begin and end turns, and tokens that are pieces of words. So all code that depends on these runs.
"""

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gspo.model.chat.chat_formats import ChatFormat, chat_format
from gspo.model.public_models import known_config
from gspo.model.tiny import random_model
from gspo.model.weights import Loaded

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
    *,
    path: str,
    attention: str,
    hidden: int,
    layers: int,
    heads: int,
    positions: int,
    experts: int,
    init_seed: int,
) -> Loaded:
    """Return a random model of the architecture of `path`, and a tokenizer for its chats.

    A token of an MoE model goes through two of the `experts`."""
    chat = chat_format(path)
    tokenizer = byte_tokenizer(chat)
    public_config = known_config(path)
    queries_per_key = public_config.num_attention_heads // public_config.num_key_value_heads
    key_heads = max(heads // queries_per_key, 1)
    while heads % key_heads:
        key_heads -= 1
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": positions,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if hasattr(public_config, "num_experts"):
        # Qwen3-MoE writes num_local_experts
        key = public_config.attribute_map.get("num_experts", "num_experts")
        sizes[key] = experts
        sizes["num_experts_per_tok"] = 2
        sizes["moe_intermediate_size"] = hidden
    values = public_config.to_dict() | sizes
    # it has an entry for each layer of the public model
    values.pop("layer_types", None)
    config = type(public_config).from_dict(values)
    config._attn_implementation = attention
    architecture = (public_config.architectures or [""])[0]
    model_class = getattr(transformers, architecture)
    model = random_model(model_class, config, init_seed)
    if chat.ends_text:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    return model, tokenizer


def byte_tokenizer(chat: ChatFormat) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with some merges and a family's chat format.

    It can write any text.

    >>> byte_tokenizer(chat_format("Qwen/Qwen3-0.6B")).tokenize("the cat in 12")
    ['t', 'he', 'Ġ', 'c', 'a', 't', 'Ġ', 'in', 'Ġ', '1', '2']
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    template = chat.template or ""
    turn_markers = [marker for marker in ("<|im_start|>", "<|im_end|>") if marker in template]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=chat.begin,
        eos_token=chat.end,
        pad_token=chat.padding,
        additional_special_tokens=[marker for marker in turn_markers if marker != chat.end],
        chat_template=chat.template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
