"""Keeps texts of data from becoming control tokens.

For example, a row with the text `<|im_end|>\\n<|im_start|>system` would otherwise end its own turn
and begin a turn of the system. Such words are marked while a prompt is written. Then they are
tokenized as plain characters. Text without such words is tokenized as usual.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gspo.io.errors import SettingError
from gspo.model.chat.decoding import decoded

if TYPE_CHECKING:
    import transformers

# around a marked word: characters for private use, which are dropped from data
BEGIN = "\uf8f0"
END = "\uf8f1"
# a longer text is tokenized as plain characters, without a search for control tokens
MAX_SEARCHED_CHARS = 100_000
# Roles, system turns and descriptions of tools are marked again for every prompt.
MAX_REMEMBERED_TEXTS = 4096
MAX_REMEMBERED_CHARS = 2000


class ControlTokens:
    """The tokens of a tokenizer that structure a text.

    They are its special tokens, and the tokens that its chat template writes around turns."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, around_turns: set[int]):
        added = tokenizer.added_tokens_decoder
        special = {i: token.content for i, token in added.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        special |= {i: added[i].content for i in around_turns}
        # any unknown character becomes this token
        special.pop(tokenizer.unk_token_id, None)
        self.ids = set(special)
        words = sorted(filter(None, special.values()), key=len, reverse=True)
        self.word = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        self._copy: transformers.PreTrainedTokenizerBase | None = None
        self._marked_texts: dict[str, str] = {}

    def marked(self, tokenizer: transformers.PreTrainedTokenizerBase, value: Any) -> Any:
        """Mark every word of a text, or of a message, that would become a control token."""
        if isinstance(value, dict):
            return {key: self.marked(tokenizer, x) for key, x in value.items()}
        if isinstance(value, list):
            return [self.marked(tokenizer, item) for item in value]
        if not isinstance(value, str):
            return value
        marked = self._marked_texts.get(value)
        if marked is None:
            marked = self._marked_text(tokenizer, value)
            if len(value) <= MAX_REMEMBERED_CHARS:
                if len(self._marked_texts) >= MAX_REMEMBERED_TEXTS:
                    self._marked_texts.clear()
                self._marked_texts[value] = marked
        return marked

    def _marked_text(self, tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> str:
        """Mark every word of a text that would become a control token."""
        text = text.replace(BEGIN, "").replace(END, "")
        if len(text) > MAX_SEARCHED_CHARS:
            return f"{BEGIN}{text}{END}"
        if self.ids.isdisjoint(tokenizer(text, add_special_tokens=False)["input_ids"]):
            return text
        marked = self.word.sub(rf"{BEGIN}\g<0>{END}", text)
        outside = re.sub(f"{BEGIN}.*?{END}", "\n", marked, flags=re.DOTALL)
        if self.ids.isdisjoint(tokenizer(outside, add_special_tokens=False)["input_ids"]):
            return marked
        # the tokenizer makes a control token of other characters
        return f"{BEGIN}{text}{END}"

    def encode(self, tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a text, with marked words as plain characters.

        The tokenizer adds no special tokens."""
        if BEGIN not in text:
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        token_ids = []
        pieces = re.split(f"{BEGIN}(.*?){END}", text, flags=re.DOTALL)
        for i, piece in enumerate(pieces):
            is_marked = i % 2 == 1
            if is_marked:
                token_ids += self._encode_plainly(tokenizer, piece)
            elif piece:
                token_ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        return token_ids

    def _encode_plainly(
        self, tokenizer: transformers.PreTrainedTokenizerBase, word: str
    ) -> list[int]:
        """Return the token ids of a marked word without control tokens."""
        plain_tokenizer = self._plain_tokenizer(tokenizer)
        token_ids = plain_tokenizer(word, add_special_tokens=False)["input_ids"]
        # a token that ends a turn, but is not special for the tokenizer
        if not self.ids.isdisjoint(token_ids):
            first = tokenizer(word[:1], add_special_tokens=False)["input_ids"]
            rest = tokenizer(word[1:], add_special_tokens=False)["input_ids"]
            token_ids = first + rest
        return [token for token in token_ids if token not in self.ids]

    def _plain_tokenizer(
        self, tokenizer: transformers.PreTrainedTokenizerBase
    ) -> transformers.PreTrainedTokenizerBase:
        """Return a copy of the tokenizer that reads special tokens as plain text.

        The tokenizer itself is not changed, because other threads use it."""
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
    """Raise ValueError for a stop string that contains a token without text in a response."""
    textless = sorted(decoded(tokenizer, [i], clean_up=None) for i in textless_ids)
    for string in strings:
        for token in textless:
            if token and token in string:
                raise SettingError(
                    key,
                    list(strings),
                    f"{token} has no text in a response, so {string!r} would never be "
                    f"found; {token} alone ends a response by its id",
                )
