"""Stop strings: a response ends with the token whose text completes one of them.

For example, with the string "</answer>" the response "<answer>12</answer>" ends when its last token brings ">". That
token is kept as it was sampled, whole, even where its text goes on after the string; so are all before it. The verifier
sees the text of all tokens, the stop string included, because it may be what closes the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import transformers


class StopWatch:
    """Reads the tokens of one response, one by one, and says which of them completes a stop string.

    Every token but the special ones, which have no text, stands for at least one byte. So the latest tokens, as many as
    the longest string has bytes, are all that has to be decoded at every token; one more is taken because some
    tokenizers leave out a space at the start of a text.
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, strings: Iterable[str], before: Iterable[int] = ()
    ):
        """`before` are the response's earlier tokens, which have completed no string."""
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.textless = marked | set(tokenizer.all_special_ids)
        self.latest: deque[int] = deque(maxlen=max(len(string.encode()) for string in self.strings) + 1)
        self.read(before)

    def read(self, tokens: Iterable[int]) -> None:
        """Read tokens that have completed no string."""
        self.latest.extend(token for token in tokens if token not in self.textless)

    def completes(self, token: int) -> bool:
        """Read the next token, and return whether it completes a string."""
        if token in self.textless:
            return False
        self.latest.append(token)
        text = self.tokenizer.decode(list(self.latest), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)


def check_readable(strings: Iterable[str], tokenizer: transformers.PreTrainedTokenizerBase, key: str) -> None:
    """Raise ValueError for a stop string that holds a special token, which has no text in a response."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for string in strings:
        if found := sorted(token for token in special | set(tokenizer.all_special_tokens) if token and token in string):
            raise ValueError(
                f"{key}={list(strings)}: {found[0]} is a special token of this model's tokenizer and has no text in a "
                "response, so it would never be found; end-of-sequence tokens end a response by themselves"
            )


def check_stop(strings: Iterable[str], key: str) -> None:
    """Raise ValueError for an empty stop string, which every text holds."""
    if "" in strings:
        raise ValueError(f"{key}={list(strings)}: an empty string would end every response at once; leave it out")
