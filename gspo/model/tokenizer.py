"""The tokenizer of the tiny models: one token per character.

It is a normal PreTrainedTokenizerFast, which engines can load.
"""

import string

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation


def character_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable ASCII character and newline.

    It has three special tokens: padding, begin of sequence and end of sequence.

    >>> tokenizer = character_tokenizer()
    >>> tokenizer.decode(tokenizer("7+5=12")["input_ids"])
    '7+5=12'
    """
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
