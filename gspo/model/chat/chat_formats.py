"""How families of public models write a chat, for models that stand in for them
(gspo.model.stand_in).

A real model's folder brings its own template, which is always used. These say the same of what a
run needs of it: the turns of system, user and assistant, and where the answer begins. Tools are not
in them. That they agree with the families' own templates is tested where a package that ships those
is installed (`make setup-peer`).
"""

from __future__ import annotations

from dataclasses import dataclass

IM_END, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# as Jinja writes it
QWEN_MATH_SYSTEM = r"Please reason step by step, and put your final answer within \\boxed{}."

_TURNS = "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
_ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
# Qwen2.5 puts a system turn of its own where the chat has none.
_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nSYSTEM<|im_end|>\n{% endif %}"
_OLMOE = (
    "{{ bos_token }}{% for turn in messages %}<|{{ turn.role }}|>\n{{ turn.content }}"
    "{{ eos_token if turn.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class ChatFormat:
    """What a tokenizer knows of chats."""

    template: str | None  # Jinja; None for a base model without one
    end: str  # the token that ends a response
    padding: str
    begin: str | None = None  # the begin-of-sequence token
    ends_text: bool = False  # whether the end of a text ends a response too


def chat_format(name: str) -> ChatFormat:
    """Return the chat format of a public model, by its name on the hub."""
    base = name.endswith("-Base") or name.endswith(("1.5B", "0924"))
    if "OLMoE" in name:
        return ChatFormat(
            None if base else _OLMOE, END_OF_TEXT, "<pad>", begin=None if base else END_OF_TEXT
        )
    if "Qwen3" in name:
        template = _TURNS + _ANSWER + _THINKING + "{% endif %}"
    else:
        system = QWEN_MATH_SYSTEM if "Math" in name else QWEN_SYSTEM
        template = _SYSTEM.replace("SYSTEM", system) + _TURNS + _ANSWER + "{% endif %}"
    return ChatFormat(template, END_OF_TEXT if base else IM_END, END_OF_TEXT, ends_text=not base)
