"""Turns a problem's text into the tokens that a model sees: the text as it is, or as the user's turn of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers

from gspo.core.ranges import HASHED_IF_CHANGED

# No text worth reading has more characters to a token. Single tokens may: there are some of 128 blanks.
CHARACTERS = 64


@dataclass
class PromptFormat:
    """The settings under `prompt`.

    format   plain: the text as it is; chat: as the user's turn; auto: chat if the tokenizer has a chat template
    system   a system message before the user's turn of a chat; empty: none
    thinking   the variable `enable_thinking` of chat templates such as Qwen3's, which says whether the model reasons
             before it answers; null: what the template does of itself (Qwen3: true)
    """

    format: str = "auto"  # auto | plain | chat
    system: str = ""
    thinking: bool | None = field(default=None, metadata=HASHED_IF_CHANGED)

    def __post_init__(self):
        if self.format not in ("auto", "plain", "chat"):
            raise ValueError(f"prompt.format={self.format!r}: choose auto, plain or chat")
        if self.format == "plain" and self.system:
            raise ValueError(f"prompt.system={self.system!r} with prompt.format=plain: a plain text has no system turn")
        if self.format == "plain" and self.thinking is not None:
            raise ValueError(f"{self._thinking} with prompt.format=plain: only a chat template reads it")

    def check(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        """Raise ValueError if the tokenizer has no chat template and these settings need one."""
        if tokenizer.chat_template is None and self.format == "chat":
            raise ValueError("prompt.format=chat: this model's tokenizer has no chat template; use prompt.format=plain")
        if tokenizer.chat_template is None and self.system:
            raise ValueError(f"prompt.system={self.system!r}: this model's tokenizer has no chat template to put it in")
        if self.thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
            raise ValueError(
                f"{self._thinking}: this model's chat template does not read enable_thinking; leave it null"
            )

    @property
    def _thinking(self) -> str:
        return f"prompt.thinking={str(self.thinking).lower()}"

    def used(self, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
        """Return the format that is used with this tokenizer: "chat" or "plain", also where `format` is auto."""
        return "plain" if self.format == "plain" or tokenizer.chat_template is None else "chat"

    def encode(self, tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a prompt.

        A plain text begins with the begin-of-sequence token if the tokenizer adds one, and has no end-of-sequence
        token. A chat goes up to where the assistant's turn begins."""
        return self.encode_chat(tokenizer, [{"role": "user", "content": text}])

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
        """Return the text of a prompt of several messages. `tools` are the functions that the policy may call, which
        the chat template writes in its own way. A plain text is the messages' contents, one after the other."""
        if self.used(tokenizer) == "plain":
            return "".join(message["content"] for message in messages)
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=False,
            **self.variables,
        )

    def encode_written(self, tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a prompt that `write` has written."""
        if self.used(tokenizer) == "chat":  # the template has written the special tokens
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = tokenizer(text)["input_ids"]
        return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids

    @property
    def variables(self) -> dict[str, bool]:
        """The variables that the chat template is given."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}
