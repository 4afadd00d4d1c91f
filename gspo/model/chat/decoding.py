"""From token ids back to text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import transformers


def decoded(
    tokenizer: transformers.PreTrainedTokenizerBase,
    token_ids: list[int],
    clean_up: bool | None = False,
) -> str:
    """Return the text of token ids, with special tokens.

    `clean_up` says whether the tokenizer removes spaces before punctuation; None: its own choice.
    transformers also decodes several sequences at once, and its annotation allows their texts."""
    text = tokenizer.decode(token_ids, clean_up_tokenization_spaces=clean_up)
    if not isinstance(text, str):
        raise TypeError(f"the tokenizer decodes a sequence into {type(text).__name__}")
    return text
