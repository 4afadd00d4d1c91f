"""Stop strings: a response ends with the token whose text completes one of them.

For example, with the string "</answer>" the response "<answer>12</answer>" ends when its last token
brings ">". That token is kept as it was sampled, whole, even where its text goes on after the
string; so are all before it. The verifier sees the text of all tokens, the stop string included,
because it may be what closes the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import transformers


class StopStringDetector:
    """Reads the tokens of one response, one by one, and says which of them completes a stop string.

    Every token but the `textless` ones stands for at least one byte. So the latest tokens, as many
    as the longest string has bytes, are all that has to be decoded at every token; one more is
    taken because some tokenizers leave out a space at the start of a text.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        textless: set[int],
        strings: Iterable[str],
        before: Iterable[int] = (),
    ):
        """`textless` are the tokens without text in a response; `before` are the response's earlier
        tokens, which have completed no string."""
        self.tokenizer = tokenizer
        self.textless = textless
        self.strings = tuple(strings)
        self.latest: deque[int] = deque(
            maxlen=max(len(string.encode()) for string in self.strings) + 1
        )
        self.read(before)

    def read(self, tokens: Iterable[int]) -> None:
        """Read tokens that have completed no string."""
        self.latest.extend(token for token in tokens if token not in self.textless)

    def completes(self, token: int) -> bool:
        """Read the next token, and return whether it completes a string."""
        if token in self.textless:
            return False
        self.latest.append(token)
        text = self.tokenizer.decode(list(self.latest), clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)


def check_stop(strings: Iterable[str], key: str) -> None:
    """Raise ValueError for an empty stop string, which every text holds."""
    if "" in strings:
        raise ValueError(
            f"{key}={list(strings)}: an empty string would end every response at once; leave it out"
        )
