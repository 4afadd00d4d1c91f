"""Turns a problem's text into the tokens that a model sees: the text as it is, or as the user's turn of a chat."""

from __future__ import annotations

from dataclasses import dataclass

import transformers


@dataclass
class PromptFormat:
    """The settings under `prompt`.

    format   plain: the text as it is; chat: as the user's turn; auto: chat if the tokenizer has a chat template
    system   a system message before the user's turn of a chat; empty: none
    """

    format: str = "auto"  # auto | plain | chat
    system: str = ""

    def __post_init__(self):
        if self.format not in ("auto", "plain", "chat"):
            raise ValueError(f"prompt.format={self.format!r}: choose auto, plain or chat")
        if self.format == "plain" and self.system:
            raise ValueError(f"prompt.system={self.system!r} with prompt.format=plain: a plain text has no system turn")

    def check(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        """Raise ValueError if the tokenizer has no chat template and these settings need one."""
        if tokenizer.chat_template is None and self.format == "chat":
            raise ValueError("prompt.format=chat: this model's tokenizer has no chat template; use prompt.format=plain")
        if tokenizer.chat_template is None and self.system:
            raise ValueError(f"prompt.system={self.system!r}: this model's tokenizer has no chat template to put it in")

    def used(self, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
        """Return the format that is used with this tokenizer: "chat" or "plain", also where `format` is auto."""
        return "plain" if self.format == "plain" or tokenizer.chat_template is None else "chat"

    def encode(self, tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a prompt.

        A plain text begins with the begin-of-sequence token if the tokenizer adds one, and has no end-of-sequence
        token. A chat goes up to where the assistant's turn begins."""
        if self.used(tokenizer) == "plain":
            ids = tokenizer(text)["input_ids"]
            return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        turns = [{"role": "system", "content": self.system}] if self.system else []
        turns.append({"role": "user", "content": text})
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
