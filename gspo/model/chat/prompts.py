"""Turns a problem's text into the tokens of a prompt: as plain text, or as a turn of a chat."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gspo.data.problems import ChatPrompt
from gspo.io.errors import SettingError
from gspo.io.ranges import HASHED_IF_CHANGED, Ranged, choice
from gspo.model.chat.control_tokens import BEGIN, ControlTokens
from gspo.model.chat.decoding import decoded
from gspo.model.chat.template_trial import ANSWER, QUESTION, SYSTEM

if TYPE_CHECKING:
    import transformers

# No readable text has more on average. Single tokens may: some tokens are 128 blanks.
MAX_CHARS_PER_TOKEN = 64
QUESTION_AND_ANSWER = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": ANSWER},
]
# They do not begin or end turns, and prompts may contain them.
THINK_TOKENS = ("<think>", "</think>")


@dataclass
class PromptFormat(Ranged, key="prompt"):
    """The settings under `prompt`.

    format           plain: the plain text; chat: the user's turn of a chat; auto: chat if the
                     tokenizer has a chat template
    system           a system message before the user's turn of a chat; empty: none
    thinking         the variable `enable_thinking` of chat templates such as Qwen3's: whether the
                     model reasons before it answers; null: the template's default (Qwen3: true)
    date             today's date, YYYY-MM-DD, in chat templates such as Llama 3.2's. It is fixed,
                     because resumed runs and all runs of a sweep must see the same prompts
    control_tokens   whether words of the data that the tokenizer knows as special tokens, such as
                     <|im_end|>, become special tokens. false: they are tokenized as plain
                     characters, so no row of data can end its turn and begin another
    special_tokens   whether the text of a response, which verifiers, rewards and environments read,
                     keeps special tokens, such as a model's own <answer>. It never contains tokens
                     that begin, end or pad a text or a turn
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
            raise SettingError(
                "prompt.date", self.date, "is no date", remedy="write YYYY-MM-DD"
            ) from None
        if self.format == "plain" and self.system:
            raise SettingError(
                "prompt.system",
                self.system,
                "with prompt.format=plain, a plain text has no system turn",
            )
        if self.format == "plain" and self.thinking is not None:
            raise SettingError(
                "prompt.thinking",
                self.thinking,
                "with prompt.format=plain, no chat template reads it",
            )

    def check(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        """Raise ValueError if the tokenizer has no chat template and these settings need it."""
        if tokenizer.chat_template is None and self.format == "chat":
            raise SettingError(
                "prompt.format",
                "chat",
                "this model's tokenizer has no chat template",
                remedy="use prompt.format=plain",
            )
        if tokenizer.chat_template is None and self.system:
            raise SettingError(
                "prompt.system",
                self.system,
                "this model's tokenizer has no chat template to put it in",
            )
        if self.thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
            raise SettingError(
                "prompt.thinking",
                self.thinking,
                "this model's chat template does not read enable_thinking",
                remedy="leave it null",
            )
        if self.format_for(tokenizer) == "chat":
            self._check_template(tokenizer)

    def _check_template(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        """Raise ValueError if the chat template fails or leaves out a text with these settings."""
        turns = [{"role": "user", "content": QUESTION}]
        try:
            prompt = self.apply_chat_template(tokenizer, turns)
        # templates raise any exception
        except Exception as error:
            raise SettingError(
                "prompt.format",
                self.format,
                "this model's chat template fails on one turn of the user "
                f"({type(error).__name__}: {error})",
                remedy="use prompt.format=plain",
            ) from None
        if QUESTION not in prompt:
            raise SettingError(
                "prompt.format",
                self.format,
                "this model's chat template leaves out the user's text",
                remedy="use prompt.format=plain",
            )
        if not self.system:
            return
        turns = [{"role": "system", "content": SYSTEM}, *turns]
        try:
            prompt = self.apply_chat_template(tokenizer, turns)
        except Exception as error:
            raise SettingError(
                "prompt.system",
                self.system,
                f"this model's chat template refuses a system turn ({error})",
                remedy="leave it empty, and put its text into the prompts",
            ) from None
        if SYSTEM not in prompt:
            raise SettingError(
                "prompt.system",
                self.system,
                "this model's chat template leaves out what a system turn says",
                remedy="leave it empty, and put its text into the prompts",
            )

    def end_of_turn(self, tokenizer: transformers.PreTrainedTokenizerBase) -> int | None:
        """Return the token that the chat template writes after an assistant's turn.

        The result is None if there is no such token or no chat."""
        if self.format_for(tokenizer) == "plain":
            return None
        try:
            chat = self.apply_chat_template(
                tokenizer, QUESTION_AND_ANSWER, add_generation_prompt=False
            )
        # templates raise any exception
        except Exception:
            return None
        if ANSWER not in chat:
            return None
        after_answer = chat.rpartition(ANSWER)[2].strip()
        for token in tokenizer(after_answer, add_special_tokens=False)["input_ids"]:
            # SentencePiece begins with a space
            if decoded(tokenizer, [token], clean_up=None).strip():
                return token if token in tokenizer.added_tokens_decoder else None
        return None

    def format_for(self, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
        """Return the format that is used with this tokenizer: "chat" or "plain", never "auto"."""
        return "plain" if self.format == "plain" or tokenizer.chat_template is None else "chat"

    def encode(self, tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a prompt.

        A plain text begins with the begin-of-sequence token if the tokenizer adds this token. It
        has no end-of-sequence token. A chat ends with the beginning of the assistant's turn."""
        is_chat = isinstance(text, ChatPrompt) and self.format_for(tokenizer) == "chat"
        messages = text.messages if is_chat else [{"role": "user", "content": str(text)}]
        return self.encode_chat(tokenizer, messages)

    def encode_chat(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a prompt of several messages."""
        return self.encode_written(tokenizer, self.write(tokenizer, messages, tools))

    def write(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Return the text of a prompt of several messages.

        `tools` are the functions that the policy may call. The chat template writes them. A plain
        text is the concatenation of the messages' contents.

        Raises ValueError if the template refuses the chat or leaves out turns of the system or of
        the user."""
        if not self.control_tokens:
            marked = control_tokens_of(tokenizer).marked
            messages = [marked(tokenizer, message) for message in messages]
            tools = [marked(tokenizer, tool) for tool in tools]
        if self.format_for(tokenizer) == "plain":
            return "".join(message["content"] for message in messages)
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            prompt = self.apply_chat_template(tokenizer, messages, tools)
        # templates raise any exception, for example for a role that they do not know
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"this model's chat template refuses a chat of {roles}: {error}"
            ) from None
        lost_role = self.lost_role(
            tokenizer, tuple(str(message.get("role")) for message in messages)
        )
        if lost_role:
            raise ValueError(f"this model's chat template leaves out what a {lost_role} turn says")
        return prompt

    def lost_role(
        self, tokenizer: transformers.PreTrainedTokenizerBase, roles: tuple[str, ...]
    ) -> str:
        """Return the role of a turn that the chat template leaves out of a chat, "" if there is none.

        The chat has these roles, and texts that no template edits. Only turns of the system and of
        the user count: some templates leave out the thoughts of earlier turns of the assistant."""
        known = _LOST_ROLES.setdefault(tokenizer, {})
        key = (tokenizer.chat_template, roles, self.thinking, self.date)
        if key not in known:
            known[key] = ""
            texts = [f"{QUESTION} {number}." for number in range(len(roles))]
            turns = [
                {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
            ]
            # templates raise any exception, for example for a tool's result without a call
            with suppress(Exception):
                prompt = self.apply_chat_template(tokenizer, turns)
                for role, text in zip(roles, texts, strict=True):
                    if role in ("system", "user") and text not in prompt:
                        known[key] = role
        return known[key]

    def apply_chat_template(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text that the chat template writes for messages."""
        text = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.variables,
        )
        # with other options the method returns token ids, or several texts
        if not isinstance(text, str):
            raise TypeError(f"a chat template has given {type(text).__name__} instead of a text")
        return text

    def encode_written(
        self, tokenizer: transformers.PreTrainedTokenizerBase, text: str
    ) -> list[int]:
        """Return the token ids of a prompt that `write` has written."""
        if self.format_for(tokenizer) == "chat":
            # the template has written the special tokens
            if self.control_tokens:
                return tokenizer(text, add_special_tokens=False)["input_ids"]
            return control_tokens_of(tokenizer).encode(tokenizer, text)
        if BEGIN in text and not self.control_tokens:
            return begin_ids(tokenizer) + control_tokens_of(tokenizer).encode(tokenizer, text)
        token_ids = tokenizer(text)["input_ids"]
        if token_ids and token_ids[-1] == tokenizer.eos_token_id:
            token_ids = token_ids[:-1]
        return token_ids

    @property
    def variables(self) -> dict[str, Any]:
        """The variables for the chat template."""
        day = datetime.date.fromisoformat(self.date)
        variables: dict[str, Any] = {"strftime_now": day.strftime}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking
        return variables


def begin_ids(tokenizer: transformers.PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer writes before every text."""
    empty_ids = tokenizer("")["input_ids"]
    letter_ids = tokenizer("a")["input_ids"]
    pairs = zip(empty_ids, letter_ids, strict=False)
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def around_turns(tokenizer: transformers.PreTrainedTokenizerBase) -> set[int]:
    """Return the added tokens that a chat template writes around a question and its answer."""
    if tokenizer.chat_template is None:
        return set()
    try:
        chat = PromptFormat().apply_chat_template(
            tokenizer, QUESTION_AND_ANSWER, add_generation_prompt=False
        )
    # templates raise any exception
    except Exception:
        return set()
    added = tokenizer.added_tokens_decoder
    chat_ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    return {i for i in chat_ids if i in added and added[i].content not in THINK_TOKENS}


# by tokenizer: the results of PromptFormat.lost_role
_LOST_ROLES: WeakKeyDictionary[transformers.PreTrainedTokenizerBase, dict[tuple, str]] = (
    WeakKeyDictionary()
)
_CACHE: WeakKeyDictionary[transformers.PreTrainedTokenizerBase, ControlTokens] = WeakKeyDictionary()


def control_tokens_of(tokenizer: transformers.PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer, which are computed once."""
    if tokenizer not in _CACHE:
        _CACHE[tokenizer] = ControlTokens(tokenizer, around_turns(tokenizer))
    return _CACHE[tokenizer]
