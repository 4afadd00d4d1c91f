"""Turns an environment's observation into the tokens that follow a turn of the policy.

For example, after the policy's `4 8 * 7 3 <|im_end|>` a chat goes on with the tokens of

    \\n<|im_start|>user\\n                     from the chat template
    3504                                     the observation
    <|im_end|>\\n<|im_start|>assistant\\n      from the chat template

The policy's tokens stay as they were sampled. The observation is tokenized separately and cannot
end its own turn or begin another turn. For this, the markers of the template's turns and the
tokenizer's added tokens are broken up in it by a space.
"""

import re
import string
from dataclasses import dataclass

import transformers

from gspo.io.errors import SettingError
from gspo.model.chat.decoding import decoded
from gspo.model.chat.prompts import (
    ANSWER,
    MAX_CHARS_PER_TOKEN,
    QUESTION,
    SYSTEM,
    PromptFormat,
)

# words that stand for the texts of turns
OBSERVATION = "zqobservationqz"
WORDS = {"system": SYSTEM, "user": QUESTION, "assistant": ANSWER, "tool": OBSERVATION}
FIRST_TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": ANSWER},
]
# Chats in which every role has a turn; templates refuse some of them.
CHATS = (
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user", "assistant", "tool", "assistant", "user"),
)
# a text in which the tokenizer makes markers again after so many rounds is left out
MAX_ROUNDS = 4
# SentencePiece writes a space as the last character
BLANKS = string.whitespace + "\u2581"
# <|user|>, </tool_response>, [INST], ...
MARKER = re.compile(r"<[|/]?[\w|:-]{1,40}>|\[/?[A-Z_]{2,20}\]")


@dataclass
class Reply:
    """The tokens of an environment's turn.

    text      the observation as the policy can read it
    escaped   the number of markers that were broken up
    cut       whether the observation was longer than allowed
    """

    token_ids: list[int]
    text: str
    escaped: int
    cut: bool


@dataclass
class TurnFrame:
    """The tokens that the chat template puts around an environment's turn in a role.

    closes   end the policy's turn
    opens    begin the environment's turn
    after    end the environment's turn and begin the policy's next turn
    """

    closes: list[int]
    opens: list[int]
    after: list[int]


class Conversation:
    """Writes the turns of environments for one tokenizer and prompt format."""

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        prompts: PromptFormat,
        stop_ids: set[int],
        role: str,
    ):
        """Read the chat template, if the prompts are chats.

        `role` is the role of an observation: "user" or "tool". If the template writes no turn of a
        tool alone, "user" is used instead. Raises ValueError if it writes neither turn."""
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        # Some tokenizers have added tokens of blanks only. These are normal text.
        self.added = {
            i: token.content
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or token.content.strip(BLANKS)
        }
        self.role = role
        self.frames = {role: TurnFrame([], [], [])}
        # the token by which the template ends the last turn of a chat
        self.ends_last: int | None = None
        markers = set(self.added.values())
        if prompts.format_for(tokenizer) == "chat":
            markers |= self._read_template(prompts)
        # A marker of several tokens may read differently after tokenization: with blanks inside if
        # the tokenizer has no decoder.
        for marker in list(markers):
            ids = self._encode(marker)
            if self.added.keys().isdisjoint(ids):
                markers.add(self._decode(ids))
        # If a marker began with a blank, a space after its first character would not break it up.
        markers = {marker.strip(BLANKS) for marker in markers}
        self.markers = sorted((m for m in markers if len(m) > 1), key=len, reverse=True)

    def reply(self, text: str, last: int, max_tokens: int) -> Reply:
        """Return the tokens of an environment's turn after a turn of the policy.

        The policy's turn ended with the token `last`. Only the first `max_tokens` tokens of the
        text are kept."""
        before, after = self._around(last)
        # a text of 10 MB need not be tokenized
        beginning = text[: MAX_CHARS_PER_TOKEN * max_tokens]
        ids, escaped = self._encode_escaped(beginning)
        reply_ids = ids[:max_tokens]
        cut = len(reply_ids) < len(ids) or len(beginning) < len(text)
        return Reply([*before, *reply_ids, *after], self._decode(reply_ids), escaped, cut)

    def _around(self, last: int) -> tuple[list[int], list[int]]:
        """Return the tokens before and after an observation, if the policy's turn ended by `last`.

        `last` is already in the sequence. If it ends a turn, the template's own end-of-turn token
        is left out, even if the two differ. If it begins a turn, as GLM-4's <|user|> and
        <|observation|> do, the observation continues that turn."""
        frame = self.frames[self.role]
        if last in self.stop_ids:
            # the role of the observations first
            for candidate in (frame, *self.frames.values()):
                if candidate.opens[:1] == [last]:
                    return candidate.opens[1:], candidate.after
        template_end = frame.closes[:1]
        both_end_turns = last in self.stop_ids and (
            last == self.ends_last or not self.stop_ids.isdisjoint(template_end)
        )
        closes = frame.closes
        if template_end == [last] or both_end_turns:
            closes = closes[1:]
        return [*closes, *frame.opens], frame.after

    def _encode_escaped(self, text: str) -> tuple[list[int], int]:
        """Return the tokens of a text without markers, and the number of markers in the text.

        The tokenizer itself may make a marker, from similar characters or because it drops the
        characters between its parts. Then the decoded text is escaped and tokenized again."""
        text, escaped = self._escape(text)
        for _ in range(MAX_ROUNDS):
            ids = self._encode(text)
            # Added tokens are dropped. With split_special_tokens the tokenizer would not make them,
            # but other threads encode prompts with it.
            plain_ids = [i for i in ids if i not in self.added]
            added_ids = [i for i in ids if i in self.added]
            text, new_markers = self._escape(self._decode(plain_ids))
            escaped += new_markers + sum(i != self.tokenizer.unk_token_id for i in added_ids)
            if not new_markers:
                return plain_ids, escaped
        return [], escaped

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _decode(self, ids: list[int]) -> str:
        return decoded(self.tokenizer, ids)

    def _read_template(self, prompts: PromptFormat) -> set[str]:
        """Set the frames of the environment's turns, and return the template's markers.

        Raises ValueError if the template writes no turn for an observation."""
        chats = {}
        for role in ("user", "tool"):
            chat = self._render_observation(prompts, role)
            if chat:
                chats[role] = chat
        if self.role not in chats:
            self.role = "user"
        if self.role not in chats:
            raise SettingError(
                "prompt.format",
                "chat",
                "this model's chat template writes no second turn of the user, so no "
                "environment can answer",
                remedy="use prompt.format=plain",
            )
        last_closes = self._encode(self._closing(prompts))
        self.ends_last = last_closes[0] if last_closes else None
        self.frames = {}
        frame_texts = []
        for role, chat in chats.items():
            before, after = chat.rpartition(ANSWER)[2].split(OBSERVATION)
            ids = self._encode(before)
            count = len(last_closes) if ids[: len(last_closes)] == last_closes else 0
            if not count and ids and ids[0] in self.added and self.ends_last in self.added:
                # A turn that is not the last ends with another token: gpt-oss has <|end|>
                # instead of <|return|>.
                count = 1
            self.frames[role] = TurnFrame(ids[:count], ids[count:], self._encode(after))
            frame_texts += [before, after]
        return self._template_markers(prompts, [*chats.values()], frame_texts)

    def _template_markers(
        self, prompts: PromptFormat, chats: list[str], frame_texts: list[str]
    ) -> set[str]:
        """Return the texts by which the chat template marks turns."""
        texts = list(frame_texts)
        for roles in CHATS:
            turns = [{"role": role, "content": WORDS[role]} for role in roles]
            chat = self._render(prompts, turns)
            if chat:
                texts.append(chat)
        written = "\n".join(texts)
        template = str(self.tokenizer.chat_template)
        markers = set(MARKER.findall(template + "".join(chats) + written))
        # lines that the template itself writes, such as "### Response:"
        without_words = re.sub("|".join(WORDS.values()), "\n", written)
        for line in without_words.splitlines():
            if re.search(r"[^\w\s]", line):
                markers.add(line.strip())
        return markers

    def _closing(self, prompts: PromptFormat) -> str:
        """Return the text that the template writes after an assistant's turn that ends a chat."""
        chat = self._render(prompts, FIRST_TURNS, add_generation_prompt=False) or ""
        return chat.rpartition(ANSWER)[2] if ANSWER in chat else ""

    def _render_observation(self, prompts: PromptFormat, role: str) -> str | None:
        """Render a chat with an observation in this role.

        Returns None if the template does not know the role, or does not write the observation right
        after the assistant's turn. Some templates do not if no tool was called."""
        if role == "tool" and "tool" not in str(self.tokenizer.chat_template):
            return None
        observation = {"role": role, "content": OBSERVATION}
        chat = self._render(prompts, [*FIRST_TURNS, observation])
        if chat is None or ANSWER not in chat:
            return None
        return chat if chat.rpartition(ANSWER)[2].count(OBSERVATION) == 1 else None

    def _render(
        self, prompts: PromptFormat, turns: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str | None:
        """Render a chat. Returns None if the template refuses it."""
        try:
            return prompts.apply_chat_template(
                self.tokenizer, turns, add_generation_prompt=add_generation_prompt
            )
        # Some templates need the number of the call beside its result, some know no system turn.
        # They raise any exception.
        except Exception:
            return None

    def _escape(self, text: str) -> tuple[str, int]:
        """Break up the markers in a text by a space after their first character, and count them."""
        count = 0
        while True:
            present = [marker for marker in self.markers if marker in text]
            if not present:
                return text, count
            for marker in present:
                count += text.count(marker)
                text = text.replace(marker, f"{marker[0]} {marker[1:]}")
