"""The chat formats of families of public models, for their stand-ins (gspo.model.stand_in).

A real model's folder has its own template, which is always used. These templates write the same
turns of system, user and assistant, and the same beginning of an answer. They do not write tools.
Tests compare them with the families' own templates if a package with those is installed
(`make setup-peer`).
"""

from dataclasses import dataclass

IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# as Jinja writes it
QWEN_MATH_SYSTEM = r"Please reason step by step, and put your final answer within \\boxed{}."

_TURNS = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n"
    "{% endfor %}"
)
_ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
# Qwen2.5 adds its own system turn if the chat has none.
_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nSYSTEM<|im_end|>\n{% endif %}"
_OLMOE = (
    "{{ bos_token }}{% for turn in messages %}<|{{ turn.role }}|>\n{{ turn.content }}"
    "{{ eos_token if turn.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class ChatFormat:
    """The chat template and the special tokens of a tokenizer."""

    # Jinja; None for a base model without template
    template: str | None
    # the token that ends a response
    end: str
    padding: str
    # the begin-of-sequence token
    begin: str | None = None
    # whether the end of a text ends a response too
    ends_text: bool = False


def chat_format(name: str) -> ChatFormat:
    """Return the chat format of a public model, by its name on the hub."""
    is_base = name.endswith(("-Base", "1.5B", "0924"))
    if "OLMoE" in name:
        if is_base:
            return ChatFormat(None, END_OF_TEXT, "<pad>")
        return ChatFormat(_OLMOE, END_OF_TEXT, "<pad>", begin=END_OF_TEXT)
    if "Qwen3" in name:
        template = _TURNS + _ANSWER + _THINKING + "{% endif %}"
    else:
        system = QWEN_MATH_SYSTEM if "Math" in name else QWEN_SYSTEM
        template = _SYSTEM.replace("SYSTEM", system) + _TURNS + _ANSWER + "{% endif %}"
    end = END_OF_TEXT if is_base else IM_END
    return ChatFormat(template, end, END_OF_TEXT, ends_text=not is_base)
