"""The texts of a policy: its prompts, its responses, and the tokens that end a response."""

from collections.abc import Iterable

import transformers

from gspo.model.chat.control_tokens import check_readable
from gspo.model.chat.decoding import decoded
from gspo.model.chat.prompts import PromptFormat
from gspo.model.weights import input_embedding


class PolicyText:
    """The base class of `Policy`, which reads and writes its texts with the tokenizer."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        prompts: PromptFormat,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.prompts.check(tokenizer)
        # chat models end a turn and a text with different tokens
        eos_ids = model.generation_config.eos_token_id if model.generation_config else None
        if not isinstance(eos_ids, list):
            eos_ids = [eos_ids]
        named_ids = [i for i in eos_ids if i is not None]
        vocabulary_size = len(input_embedding(model))
        # the ids in generation_config.json that are no tokens of the model
        self.unknown_stop_ids = [i for i in named_ids if not 0 <= i < vocabulary_size]
        # the tokens that end a response
        self.stop_ids = {tokenizer.eos_token_id, *named_ids} - set(self.unknown_stop_ids)
        turn_end = self.prompts.end_of_turn(tokenizer)
        # the token that ends a turn by the chat template alone: neither the tokenizer nor
        # generation_config.json names it
        self.template_turn_end = None if turn_end in self.stop_ids else turn_end
        if turn_end is not None:
            self.stop_ids.add(turn_end)
        if self.template_turn_end is not None and model.generation_config:
            # checkpoints store this, so other software that samples from them also stops there
            ends = [i for i in self.stop_ids if i is not None]
            model.generation_config.eos_token_id = sorted(ends)
        # the stop tokens without the user's stop strings
        self.end_ids = frozenset(self.stop_ids)

    def stop_at(self, strings: Iterable[str], key: str) -> None:
        """Make each stop string that is one token of the tokenizer end a response by its id.

        Raises ValueError for a string that holds a special token without text beside other text.
        `key` is the name of the setting for this message."""
        ids = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items()}
        longer_strings = []
        for string in strings:
            if string in ids:
                self.stop_ids.add(ids[string])
            else:
                longer_strings.append(string)
        check_readable(longer_strings, self.tokenizer, self.textless_ids, key)

    @property
    def textless_ids(self) -> set[int]:
        """The tokens that are left out of a response's text.

        They begin, end and pad a text or a turn. If `prompt.special_tokens` is false, all special
        tokens are left out too."""
        tokenizer = self.tokenizer
        ids = {
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            *self.end_ids,
        }
        if not self.prompts.special_tokens:
            ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
            ids |= set(tokenizer.all_special_ids)
        return ids - {None}

    def text(self, token_ids: list[int]) -> str:
        """Return the text of a response or a turn, as verifiers and environments read it."""
        textless_ids = self.textless_ids
        text_ids = [token for token in token_ids if token not in textless_ids]
        return decoded(self.tokenizer, text_ids)

    @property
    def prompt_format_used(self) -> str:
        """The format that prompts are encoded in: "chat" or "plain"."""
        return self.prompts.format_for(self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt in the policy's format."""
        return self.prompts.encode(self.tokenizer, text)

    def rendered(self, prompt_ids: list[int]) -> str:
        """Return the text of a prompt's token ids, with special tokens."""
        return decoded(self.tokenizer, prompt_ids)

    @property
    def pad_id(self) -> int:
        """A token id for padding, which is masked.

        It is the tokenizer's padding token if the model has an embedding for it, else 0."""
        vocabulary = len(input_embedding(self.model))
        pad_token_id = self.tokenizer.pad_token_id
        return pad_token_id if pad_token_id is not None and pad_token_id < vocabulary else 0

    def _check_embeddings(self) -> None:
        """Raise ValueError if tokens that can occur have no embedding.

        Padding is masked and needs none."""
        rows = len(input_embedding(self.model))
        added_tokens = self.tokenizer.added_tokens_decoder
        template = str(self.tokenizer.chat_template)

        def can_occur(token: str, i: int) -> bool:
            if i == self.tokenizer.pad_token_id and i != self.tokenizer.eos_token_id:
                return False
            is_special = i in added_tokens and added_tokens[i].special
            return not is_special or i in self.stop_ids or token in template

        vocabulary = self.tokenizer.get_vocab().items()
        beyond = sorted((i, token) for token, i in vocabulary if i >= rows and can_occur(token, i))
        if beyond:
            named = ", ".join(f"{token!r} ({i})" for i, token in beyond[:3])
            more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
            raise ValueError(
                "the tokenizer has tokens that the model has no embedding for, which has "
                f"{rows} rows: {named}{more}; use the tokenizer that the model was trained with, "
                "or resize the model's embedding"
            )
