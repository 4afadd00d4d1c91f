"""Turns what an environment says into the tokens that follow a turn of the policy.

For example, after the policy's `4 8 * 7 3 <|im_end|>` a chat goes on with the tokens of

    \\n<|im_start|>user\\n        from the chat template
    3504                        what the environment said
    <|im_end|>\\n<|im_start|>assistant\\n

The policy's tokens stay as they were sampled. What the environment said is tokenized by itself and
stays a text: the markers of the template, of all roles' turns, and the tokenizer's added tokens are
broken up in it, so that it can neither end its own turn nor begin one of another.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

import transformers

from gspo.model.chat.prompts import ANSWER, CHARACTERS, QUESTION, SYSTEM, UNWRITTEN, PromptFormat

SAID = "zqobservationqz"
WORDS = {"system": SYSTEM, "user": QUESTION, "assistant": ANSWER, "tool": SAID}
# Chats in which every role has a turn; templates refuse some of them.
CHATS = (
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user", "assistant", "tool", "assistant", "user"),
)
ROUNDS = 4  # a text in which the tokenizer makes markers again and again is left out after so many
BLANKS = string.whitespace + "\u2581"  # the last is how SentencePiece writes a space
# <|user|>, </tool_response>, [INST], ...
MARKER = re.compile(r"<[|/]?[\w|:-]{1,40}>|\[/?[A-Z_]{2,20}\]")


@dataclass
class Reply:
    """The tokens of an environment's turn, and what had to be done to its text."""

    token_ids: list[int]
    text: str  # what the policy can read of what the environment said
    escaped: int  # markers that were broken up
    cut: bool  # whether the text was longer than allowed


@dataclass
class Around:
    """The tokens that the chat template puts around an environment's turn in one role."""

    closes: list[int]  # what ends the policy's turn
    opens: list[int]  # what begins the environment's
    after: list[int]  # what ends it and begins the policy's next


class Conversation:
    """Writes the turns of environments for one tokenizer and prompt format."""

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        prompts: PromptFormat,
        stop_ids: set[int],
        role: str,
    ):
        """`role` is whose turn an observation is: "user", or "tool", which is the user's where the
        template writes no tool's turn by itself. Raises ValueError for a template that writes
        neither."""
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        # Some tokenizers have runs of blanks among their added tokens, which are text like any
        # other.
        self.added = {
            i: token.content
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or token.content.strip(BLANKS)
        }
        self.markers = set(self.added.values())
        self.role = role
        self.turns = {role: Around([], [], [])}  # by role
        # the token by which the template ends a turn that is the last
        self.ends_last: int | None = None
        if prompts.used(tokenizer) == "chat":
            self._read_template(prompts, role)
        # One of words counts as it is read back, too, which is with blanks in it where the
        # tokenizer has no decoder.
        tokens = [
            tokenizer(marker, add_special_tokens=False)["input_ids"] for marker in self.markers
        ]
        read = {self._read(ids) for ids in tokens if not self.added.keys() & set(ids)}
        # Without blanks around them: a space behind a marker's own first blank would break up
        # nothing.
        markers = {marker.strip(BLANKS) for marker in self.markers | read}
        self.markers = sorted((m for m in markers if len(m) > 1), key=len, reverse=True)

    def reply(self, text: str, last: int, most: int) -> Reply:
        """Return the tokens of an environment's turn after a turn of the policy that ended with the
        token `last`. Of the text at most `most` tokens are kept, the first."""
        before, after = self._around(last)
        head = text[: CHARACTERS * most]  # 10 MB need not be tokenized
        ids, escaped = self._tokens(head)
        kept = ids[:most]
        cut = len(kept) < len(ids) or len(head) < len(text)
        return Reply([*before, *kept, *after], self._read(kept), escaped, cut)

    def _around(self, last: int) -> tuple[list[int], list[int]]:
        """Return the tokens before and after an environment's text, behind a turn that the policy
        ended with the token `last`.

        The policy's token stays as it is. Where it is the end of a turn, the template's own is left
        out, whichever the template writes. Where it opens a turn, as GLM-4's <|user|> and
        <|observation|> do, the environment has that turn."""
        for turn in (self.turns[self.role], *self.turns.values()):  # its own role first
            if last in self.stop_ids and turn.opens[:1] == [last]:
                return turn.opens[1:], turn.after
        turn = self.turns[self.role]
        own_end = turn.closes[:1]
        both_end = last in self.stop_ids and (
            last == self.ends_last or not self.stop_ids.isdisjoint(own_end)
        )
        closes = turn.closes[1:] if own_end == [last] or both_end else turn.closes
        return [*closes, *turn.opens], turn.after

    def _tokens(self, text: str) -> tuple[list[int], int]:
        """Return the tokens of a text, in which no marker can be read, and how many were broken up
        or left out. The tokenizer itself may make a marker, of look-alikes or by leaving out what
        stood between its parts: then what is read is broken up, and tokenized again."""
        text, escaped = self._escape(text)
        for _ in range(ROUNDS):
            ids, left_out = self._plain(text)
            text, more = self._escape(self._read(ids))
            escaped += left_out + more
            if not more:
                return ids, escaped
        return [], escaped

    def _plain(self, text: str) -> tuple[list[int], int]:
        """Return a text's tokens without added ones, and how many were left out, unknown characters
        not counted.
        """
        # Without split_special_tokens, which would change a tokenizer that other threads encode
        # prompts with.
        found = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # what normalizes to a marker is none either
        ids = [i for i in found if i not in self.added]
        return ids, sum(i in self.added and i != self.tokenizer.unk_token_id for i in found)

    def _read(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _read_template(self, prompts: PromptFormat, role: str) -> None:
        """Find the tokens that the template puts around an environment's turn, and its markers."""
        rendered = {
            name: text for name in ("user", "tool") if (text := self._rendered(prompts, name))
        }
        if role not in rendered:
            role = "user"
        if role not in rendered:
            raise ValueError(
                "prompt.format=chat: this model's chat template writes no second turn of the user, so no environment "
                "can answer; use prompt.format=plain"
            )
        closes = self._ids(self._closing(prompts))
        self.ends_last = closes[0] if closes else None
        self.role = role
        self.turns = {}
        around = []
        for name, text in rendered.items():
            before, after = text.rpartition(ANSWER)[2].split(SAID)
            ids = self._ids(before)
            count = len(closes) if ids[: len(closes)] == closes else 0
            if closes and not count and ids and ids[0] in self.added and closes[0] in self.added:
                # a turn ends otherwise where it is not the last: gpt-oss has <|end|> for <|return|>
                count = 1
            self.turns[name] = Around(ids[:count], ids[count:], self._ids(after))
            around += [before, after]
        chats = [
            self._written(prompts, [{"role": name, "content": WORDS[name]} for name in chat])
            for chat in CHATS
        ]
        written = "\n".join([*around, *(chat for chat in chats if chat)])
        self.markers |= set(
            MARKER.findall(str(self.tokenizer.chat_template) + "".join(rendered.values()) + written)
        )
        # what the template itself has written, line by line
        lines = {
            line.strip() for line in re.sub("|".join(WORDS.values()), "\n", written).splitlines()
        }
        # such as "### Response:"
        self.markers |= {line for line in lines if re.search(r"[^\w\s]", line)}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _closing(self, prompts: PromptFormat) -> str:
        """Return what the template writes behind an assistant's turn that is the last."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
        written = self._written(prompts, turns, begins_answer=False) or ""
        return written.rpartition(ANSWER)[2] if ANSWER in written else ""

    def _rendered(self, prompts: PromptFormat, role: str) -> str | None:
        """Render a chat with one turn of the environment. Returns None if the template does not
        know the role, or does not write its text right behind the assistant's, as some do for tools
        that were not called."""
        if role == "tool" and "tool" not in str(self.tokenizer.chat_template):
            return None
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
        written = self._written(prompts, [*turns, {"role": role, "content": SAID}])
        if (
            written is None
            or written.rpartition(ANSWER)[2].count(SAID) != 1
            or ANSWER not in written
        ):
            return None
        return written

    def _written(
        self, prompts: PromptFormat, turns: list[dict[str, str]], begins_answer: bool = True
    ) -> str | None:
        """Render a chat; None if the template refuses it."""
        try:
            return prompts.rendered(self.tokenizer, turns, add_generation_prompt=begins_answer)
        except UNWRITTEN:  # some want the call's number beside its result, some know no system turn
            return None

    def _escape(self, text: str) -> tuple[str, int]:
        """Break up the markers in a text by a space after their first character, and count them."""
        count = 0
        while found := [marker for marker in self.markers if marker in text]:
            for marker in found:
                count += text.count(marker)
                text = text.replace(marker, f"{marker[0]} {marker[1:]}")
        return text, count
