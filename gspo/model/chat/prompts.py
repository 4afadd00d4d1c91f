"""Turns a problem's text into the tokens that a model sees: the text as it is, or as the user's
turn of a chat.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jinja2

from gspo.data.samples import ChatPrompt
from gspo.io.ranges import HASHED_IF_CHANGED, Ranged, choice
from gspo.model.chat.control_tokens import BEGIN, ControlTokens

if TYPE_CHECKING:
    import transformers

# No text worth reading has more characters to a token. Single tokens may: there are some of 128
# blanks.
CHARACTERS = 64
# Words that stand for the texts of turns; no template changes a plain word.
ANSWER, SYSTEM, QUESTION = "zqanswerqz", "zqsystemqz", "zquserqz"
# What templates raise where they do not know a role, or find no call before a tool's turn.
UNWRITTEN = (jinja2.TemplateError, TypeError, AttributeError, KeyError)
THOUGHTS = ("<think>", "</think>")  # they are in no turn's frame, and prompts may speak of them


@dataclass
class PromptFormat(Ranged, key="prompt"):
    """The settings under `prompt`.

    format   plain: the text as it is; chat: as the user's turn; auto: chat if the tokenizer has a
             chat template
    system   a system message before the user's turn of a chat; empty: none
    thinking   the variable `enable_thinking` of chat templates such as Qwen3's, which says whether
               the model reasons
             before it answers; null: what the template does of itself (Qwen3: true)
    date     the day, YYYY-MM-DD, that a chat template such as Llama 3.2's writes as today's. It is
             fixed, so that a run that is resumed later, and all runs of a sweep, see the same
             prompts
    control_tokens   whether words of the data that the tokenizer knows as special tokens, such as
                     <|im_end|>, become
             those tokens. false: they are read as the characters that they are made of, so that no
             row of data can end its turn and begin another
    special_tokens   whether the text of a response, which verifiers, rewards and environments read,
                     keeps special
             tokens, such as a model's own <answer>. The tokens that begin, end and pad a text or a
             turn never are in it
    """

    format: str = choice("auto", ("auto", "plain", "chat"))
    system: str = ""
    thinking: bool | None = field(default=None, metadata=HASHED_IF_CHANGED)
    date: str = field(default="2026-01-01", metadata=HASHED_IF_CHANGED)
    control_tokens: bool = field(default=False, metadata=HASHED_IF_CHANGED)
    special_tokens: bool = field(default=True, metadata=HASHED_IF_CHANGED)

    def __post_init__(self):
        super().__post_init__()
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise ValueError(f"prompt.date={self.date!r} is no date: write YYYY-MM-DD") from None
        if self.format == "plain" and self.system:
            raise ValueError(
                f"prompt.system={self.system!r} with prompt.format=plain: a plain text has no system turn"
            )
        if self.format == "plain" and self.thinking is not None:
            raise ValueError(
                f"{self._thinking} with prompt.format=plain: only a chat template reads it"
            )

    def check(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        """Raise ValueError if the tokenizer has no chat template and these settings need one."""
        if tokenizer.chat_template is None and self.format == "chat":
            raise ValueError(
                "prompt.format=chat: this model's tokenizer has no chat template; use prompt.format=plain"
            )
        if tokenizer.chat_template is None and self.system:
            raise ValueError(
                f"prompt.system={self.system!r}: this model's tokenizer has no chat template to put it in"
            )
        if self.thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
            raise ValueError(
                f"{self._thinking}: this model's chat template does not read enable_thinking; leave it null"
            )
        if self.used(tokenizer) == "chat":
            self._check_template(tokenizer)

    def _check_template(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        """Raise ValueError if the chat template cannot write a prompt with these settings, or
        leaves a part out.
        """
        turns = [{"role": "user", "content": QUESTION}]
        try:
            written = self.rendered(tokenizer, turns)
        except Exception as error:  # templates raise anything
            raise ValueError(
                f"prompt.format={self.format}: this model's chat template fails on one turn of the user "
                f"({type(error).__name__}: {error}); use prompt.format=plain"
            ) from None
        if QUESTION not in written:
            raise ValueError(
                f"prompt.format={self.format}: this model's chat template leaves out the user's text; use "
                "prompt.format=plain"
            )
        if not self.system:
            return
        try:
            written = self.rendered(tokenizer, [{"role": "system", "content": SYSTEM}, *turns])
        except Exception as error:
            raise ValueError(
                f"prompt.system={self.system!r}: this model's chat template refuses a system turn ({error}); leave it "
                "empty, and put its text into the prompts"
            ) from None
        if SYSTEM not in written:
            raise ValueError(
                f"prompt.system={self.system!r}: this model's chat template leaves out what a system turn says; leave "
                "it empty, and put its text into the prompts"
            )

    def end_of_turn(self, tokenizer: transformers.PreTrainedTokenizerBase) -> int | None:
        """Return the token that the chat template writes behind an assistant's turn, None if it
        writes none or if there is no chat."""
        if self.used(tokenizer) == "plain":
            return None
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        try:
            written = self.rendered(tokenizer, turns, add_generation_prompt=False)
        except UNWRITTEN:
            return None
        behind = written.rpartition(ANSWER)[2].strip()
        for token in (
            tokenizer(behind, add_special_tokens=False)["input_ids"] if ANSWER in written else ()
        ):
            if tokenizer.decode([token]).strip():  # SentencePiece begins with a space
                return token if token in tokenizer.added_tokens_decoder else None
        return None

    @property
    def _thinking(self) -> str:
        return f"prompt.thinking={str(self.thinking).lower()}"

    def used(self, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
        """Return the format that is used with this tokenizer: "chat" or "plain", also where
        `format` is auto.
        """
        return "plain" if self.format == "plain" or tokenizer.chat_template is None else "chat"

    def encode(self, tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a prompt.

        A plain text begins with the begin-of-sequence token if the tokenizer adds one, and has no
        end-of-sequence token. A chat goes up to where the assistant's turn begins."""
        is_chat = isinstance(text, ChatPrompt) and self.used(tokenizer) == "chat"
        messages = text.messages if is_chat else [{"role": "user", "content": str(text)}]
        return self.encode_chat(tokenizer, messages)

    def encode_chat(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a prompt of several messages, as `encode` does of one."""
        return self.encode_written(tokenizer, self.write(tokenizer, messages, tools))

    def write(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Return the text of a prompt of several messages. `tools` are the functions that the
        policy may call, which the chat template writes in its own way. A plain text is the
        messages' contents, one after the other."""
        if not self.control_tokens:
            marked = control_tokens_of(tokenizer).marked
            messages = [marked(tokenizer, message) for message in messages]
            tools = [marked(tokenizer, tool) for tool in tools]
        if self.used(tokenizer) == "plain":
            return "".join(message["content"] for message in messages)
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            written = self.rendered(tokenizer, messages, tools)
        except UNWRITTEN as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"this model's chat template refuses a chat of {roles}: {error}"
            ) from None
        first = messages[0]
        if first["role"] == "system" and str(first["content"]).strip() not in written:
            raise ValueError("this model's chat template leaves out what a system turn says")
        return written

    def rendered(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return what the chat template makes of messages."""
        return tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.variables,
        )

    def encode_written(
        self, tokenizer: transformers.PreTrainedTokenizerBase, text: str
    ) -> list[int]:
        """Return the token ids of a prompt that `write` has written."""
        if self.used(tokenizer) == "chat":  # the template has written the special tokens
            if self.control_tokens:
                return tokenizer(text, add_special_tokens=False)["input_ids"]
            return control_tokens_of(tokenizer).encode(tokenizer, text)
        if BEGIN in text and not self.control_tokens:
            begin = [
                token for token in tokenizer("")["input_ids"] if token != tokenizer.eos_token_id
            ]
            return begin + control_tokens_of(tokenizer).encode(tokenizer, text)
        ids = tokenizer(text)["input_ids"]
        return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that the chat template is given."""
        day = datetime.date.fromisoformat(self.date)
        variables: dict[str, Any] = {"strftime_now": day.strftime}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking
        return variables


def around_turns(tokenizer: transformers.PreTrainedTokenizerBase) -> set[int]:
    """Return the added tokens that a chat template writes around a question and its answer."""
    if tokenizer.chat_template is None:
        return set()
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        written = PromptFormat().rendered(tokenizer, turns, add_generation_prompt=False)
    except UNWRITTEN:
        return set()
    added = tokenizer.added_tokens_decoder
    found = tokenizer(written, add_special_tokens=False)["input_ids"]
    return {token for token in found if token in added and added[token].content not in THOUGHTS}


_KNOWN: WeakKeyDictionary[transformers.PreTrainedTokenizerBase, ControlTokens] = WeakKeyDictionary()


def control_tokens_of(tokenizer: transformers.PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer, which are found once."""
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = ControlTokens(tokenizer, around_turns(tokenizer))
    return _KNOWN[tokenizer]
