"""How a problem's text becomes tokens: plain, or as a chat by the tokenizer's own template."""

import pytest

from builders import small_policy
from gspo.model.chat.prompts import PromptFormat
from gspo.model.policy import Policy
from gspo.model.tokenizer import character_tokenizer
from refusals import refuses

TEMPLATE = (
    "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chatty():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize(
    "prompts, text",
    [
        (PromptFormat(), "<user>7+5=?</><assistant>"),
        (PromptFormat("chat"), "<user>7+5=?</><assistant>"),
        (PromptFormat("auto", "Think."), "<system>Think.</><user>7+5=?</><assistant>"),
        (PromptFormat("plain"), "7+5=?"),
    ],
)
def test_a_chat_ends_where_the_assistant_begins(prompts, text):
    tokenizer = chatty()
    ids = prompts.encode(tokenizer, "7+5=?")
    assert all(type(i) is int for i in ids) and tokenizer.decode(ids) == text


def test_without_a_template_auto_is_plain_and_a_chat_is_refused():
    tokenizer, model = character_tokenizer(), small_policy().model
    assert PromptFormat().encode(tokenizer, "7+5=?") == tokenizer("7+5=?")["input_ids"]
    with refuses("prompt.format", "chat", "no chat template"):
        Policy(model, tokenizer, prompts=PromptFormat("chat"))
    with refuses("prompt.system", "Think.", "no chat template"):
        Policy(model, tokenizer, prompts=PromptFormat("auto", "Think."))
    assert len(Policy(model, chatty(), prompts=PromptFormat("chat")).encode_prompt("1")) == len(
        "<user>1</><assistant>"
    )


def test_refusals():
    with refuses("prompt.format", "chats"):
        PromptFormat("chats", "")
    with refuses("prompt.system", "Think.", "prompt.format=plain"):
        PromptFormat("plain", "Think.")
