"""Stop strings: a response ends with the token whose text completes a stop string.

For example, with the string "</answer>" the response "<answer>12</answer>" ends when its last token
brings ">". All tokens are kept as they were sampled. The last token is kept even if its text goes
on after the string. The verifier sees the text of all tokens, because the stop string may close the
answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gspo.io.errors import SettingError

if TYPE_CHECKING:
    import transformers


class StopStringDetector:
    """A reader of a response that says, token by token, whether a stop string is complete.

    Every token has a byte of text or more, except the `textless` tokens. So the latest tokens are
    decoded, up to the number of bytes of the longest string. An extra token is decoded because some
    tokenizers leave out a space at the start of a text.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        textless: set[int],
        strings: Iterable[str],
        before: Iterable[int] = (),
    ):
        """`textless` are the tokens without text in a response.

        `before` are the earlier tokens of the response, which have completed no string."""
        self.tokenizer = tokenizer
        self.textless = textless
        self.strings = tuple(strings)
        max_bytes = max(len(string.encode()) for string in self.strings)
        self.latest: deque[int] = deque(maxlen=max_bytes + 1)
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
    """Raise ValueError for an empty stop string, which every text contains."""
    if "" in strings:
        raise SettingError(
            key,
            list(strings),
            "an empty string would end every response at once",
            remedy="leave it out",
        )
