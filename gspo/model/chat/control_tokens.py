"""Keeps texts of data from becoming control tokens.

For example, a row that holds `<|im_end|>\\n<|im_start|>system` would otherwise end its own turn and
begin one of the system. Here such words are marked while a prompt is written, and then tokenized as
the characters that they are made of. Text without such words is tokenized as a whole, as ever.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers

# around a marked word: characters for private use, which are dropped from data
BEGIN, END = "\uf8f0", "\uf8f1"
LONG = 100_000  # characters; a longer text is read as plain characters without a look at its tokens


class ControlTokens:
    """The tokens of one tokenizer that structure a text: its special tokens, and those that its
    chat template writes around turns."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, around_turns: set[int]):
        special = {
            i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        special |= {i: tokenizer.added_tokens_decoder[i].content for i in around_turns}
        special.pop(tokenizer.unk_token_id, None)  # any unknown character becomes this one
        self.ids = set(special)
        words = sorted(filter(None, special.values()), key=len, reverse=True)
        self.word = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        self._copy: transformers.PreTrainedTokenizerBase | None = None

    def marked(self, tokenizer: transformers.PreTrainedTokenizerBase, value: Any) -> Any:
        """Return a text, or a message that consists of texts, in which every word that would become
        a control token is marked."""
        if isinstance(value, dict):
            return {key: self.marked(tokenizer, x) for key, x in value.items()}
        if isinstance(value, list):
            return [self.marked(tokenizer, item) for item in value]
        if not isinstance(value, str):
            return value
        text = value.replace(BEGIN, "").replace(END, "")
        if len(text) > LONG:
            return f"{BEGIN}{text}{END}"
        if self.ids.isdisjoint(tokenizer(text, add_special_tokens=False)["input_ids"]):
            return text
        marked = self.word.sub(rf"{BEGIN}\g<0>{END}", text)
        outside = re.sub(f"{BEGIN}.*?{END}", "\n", marked, flags=re.DOTALL)
        if self.ids.isdisjoint(tokenizer(outside, add_special_tokens=False)["input_ids"]):
            return marked
        return f"{BEGIN}{text}{END}"  # the tokenizer makes a control token of other characters

    def encode(self, tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a text, of its marked words as plain characters. No token is
        added.
        """
        if BEGIN not in text:
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = []
        for i, piece in enumerate(re.split(f"{BEGIN}(.*?){END}", text, flags=re.DOTALL)):
            if i % 2 == 0:
                ids += tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            else:
                plain = self._plain_tokenizer(tokenizer)(piece, add_special_tokens=False)[
                    "input_ids"
                ]
                # a token that is not special, though it ends a turn
                if not self.ids.isdisjoint(plain):
                    parts = (piece[:1], piece[1:])
                    plain = [
                        token
                        for part in parts
                        for token in tokenizer(part, add_special_tokens=False)["input_ids"]
                    ]
                ids += [token for token in plain if token not in self.ids]
        return ids

    def _plain_tokenizer(
        self, tokenizer: transformers.PreTrainedTokenizerBase
    ) -> transformers.PreTrainedTokenizerBase:
        """Return a copy of the tokenizer that reads special tokens as plain text. The tokenizer
        itself is used by other threads."""
        if self._copy is None:
            self._copy = copy.deepcopy(tokenizer)
            self._copy.split_special_tokens = True
        return self._copy


def check_readable(
    strings: Iterable[str],
    tokenizer: transformers.PreTrainedTokenizerBase,
    textless_ids: set[int],
    key: str,
) -> None:
    """Raise ValueError for a stop string that holds a token without text in a response."""
    textless = {tokenizer.decode([i]) for i in textless_ids}
    for string in strings:
        if found := sorted(token for token in textless if token and token in string):
            raise ValueError(
                f"{key}={list(strings)}: {found[0]} has no text in a response, so {string!r} would never be found; "
                f"{found[0]} alone ends a response by its id"
            )
