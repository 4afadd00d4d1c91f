"""Models that stand in for public ones: their architecture, their tokens, and how they write a
chat.
"""

from pathlib import Path

import pytest
import torch
import transformers
from jinja2 import BaseLoader, Environment

from gspo.model.chat.chat_formats import END_OF_TEXT, IM_END, QWEN_SYSTEM, chat_format
from gspo.model.chat.prompts import PromptFormat
from gspo.model.policy import Policy
from gspo.model.public_models import PUBLIC_MODELS, known_config
from gspo.model.settings import StandIn
from refusals import refuses

ROOT = Path(__file__).parents[3]
ASSISTANT = "<|im_start|>assistant\n"


def rendered(name: str, prompts: PromptFormat | None = None, text="1+1?") -> str:
    model, tokenizer = StandIn(path=name).make()
    policy = Policy(model, tokenizer, prompts=prompts)
    return policy.rendered(policy.encode_prompt(text))


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_it_is_of_the_class_and_shape_of_the_public_model(name):
    """Small in all sizes; the same in what the arithmetic depends on."""
    model, tokenizer = StandIn(path=name, hidden=48, layers=3, heads=4).make()
    config, real = model.config, known_config(name)
    assert type(config) is type(real) and type(model).__name__ in transformers.__all__
    assert (
        config.tie_word_embeddings == real.tie_word_embeddings
        and config.rope_parameters == real.rope_parameters
    )
    assert getattr(config, "norm_topk_prob", None) == getattr(real, "norm_topk_prob", None)
    assert config.num_attention_heads // config.num_key_value_heads == min(
        real.num_attention_heads // real.num_key_value_heads, 4
    )
    assert hasattr(config, "num_experts") == hasattr(real, "num_experts")
    assert sum(p.numel() for p in model.parameters()) < 500_000
    policy = Policy(model, tokenizer)
    assert policy.network, "our own forward is used, as for the real one"
    again, _ = StandIn(path=name, hidden=48, layers=3, heads=4).make()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "prompts", "text"),
    [
        ("Qwen/Qwen3-0.6B", PromptFormat(), f"<|im_start|>user\n1+1?<|im_end|>\n{ASSISTANT}"),
        (
            "Qwen/Qwen3-1.7B",
            PromptFormat(thinking=False, system="Short."),
            f"<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n{ASSISTANT}<think>\n\n</think>\n\n",
        ),
        ("Qwen/Qwen3-4B-Base", PromptFormat("plain"), "1+1?"),
        (
            "Qwen/Qwen2.5-Coder-1.5B-Instruct",
            PromptFormat(),
            f"<|im_start|>system\n{QWEN_SYSTEM}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n{ASSISTANT}",
        ),
        (
            "allenai/OLMoE-1B-7B-0924-Instruct",
            PromptFormat(system="Short."),
            "<|endoftext|><|system|>\nShort.\n<|user|>\n1+1?\n<|assistant|>\n",
        ),
        ("allenai/OLMoE-1B-7B-0924", PromptFormat(), "1+1?"),
    ],
)
def test_a_prompt_is_written_as_its_family_writes_it(name, prompts, text):
    assert rendered(name, prompts) == text


def test_turns_end_with_the_tokens_of_the_family():
    def ends(name):
        model, tokenizer = StandIn(path=name).make()
        return set(tokenizer.convert_ids_to_tokens(sorted(Policy(model, tokenizer).stop_ids)))

    assert ends("Qwen/Qwen3-0.6B") == {IM_END, END_OF_TEXT}
    assert ends("Qwen/Qwen3-4B-Base") == {IM_END, END_OF_TEXT}, (
        "its chat template ends turns with another token"
    )
    assert ends("allenai/OLMoE-1B-7B-0924-Instruct") == {END_OF_TEXT}


def test_any_text_becomes_tokens_and_the_same_text_again():
    _, tokenizer = StandIn().make()
    for text in (
        "the cat in 12 hats",
        "def f(x):\n\treturn x**2\n",
        "naïve 日本語 🙂",
        "<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("the cat in 12") == [
        "t",
        "he",
        "Ġ",
        "c",
        "a",
        "t",
        "Ġ",
        "in",
        "Ġ",
        "1",
        "2",
    ]
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            {"path": "Qwen/Qwen9-1T"},
            ("model.path", "Qwen/Qwen9-1T", "it can stand in for Qwen/Qwen3"),
        ),
        (
            {"hidden": 36},
            ("model.hidden", 36, "divided by model.heads=4 it must be"),
        ),
        ({"layers": 0}, ("model.layers", 0)),
        ({"experts": 4}, ("model.experts", 4, "Qwen/Qwen3-0.6B has no experts")),
    ],
)
def test_what_cannot_be_made_is_refused(settings, refusal):
    with refuses(*refusal):
        StandIn(**settings)


def test_heads_of_any_number_share_keys_evenly():
    model, tokenizer = StandIn(heads=5, hidden=20).make()
    assert Policy(model, tokenizer) and model.config.num_key_value_heads == 1
    assert StandIn(heads=12, hidden=24).make()[0].config.num_key_value_heads == 6
    # 9 // 2 = 4 does not divide 9
    assert StandIn(heads=9, hidden=36).make()[0].config.num_key_value_heads == 3


def test_models_of_the_same_shapes_have_positions_of_their_own():
    positions = {name: known_config(name).max_position_embeddings for name in PUBLIC_MODELS}
    assert positions["Qwen/Qwen2.5-1.5B"] == 131072
    assert positions["Qwen/Qwen2.5-1.5B-Instruct"] == 32768
    assert positions["Qwen/Qwen2.5-Math-1.5B"] == 4096
    assert positions["Qwen/Qwen3-8B"] == 40960
    assert positions["Qwen/Qwen3-8B-Base"] == 32768


def test_thinking_is_refused_where_no_template_reads_it():
    with refuses("prompt.thinking", True, "with prompt.format=plain"):
        PromptFormat("plain", thinking=True)
    for name in ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "allenai/OLMoE-1B-7B-0924"):
        _, tokenizer = StandIn(path=name).make()
        with refuses("prompt.thinking", False, "this model's chat template does"):
            PromptFormat(thinking=False).check(tokenizer)


# TRL's package has the families' own templates, byte for byte
TEMPLATES = sorted((ROOT / ".venv-peer").glob("lib/*/site-packages/trl/chat_templates"))


@pytest.mark.skipif(not TEMPLATES, reason="TRL is not installed: make setup-peer")
@pytest.mark.parametrize(
    ("name", "file"),
    [("Qwen/Qwen3-0.6B", "qwen3.jinja"), ("Qwen/Qwen2.5-1.5B-Instruct", "qwen2_5.jinja")],
)
@pytest.mark.parametrize("system", ["", "Short."])
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("answered", [False, True])
def test_our_templates_say_what_the_families_own_say(name, file, system, thinking, answered):
    turns = [{"role": "system", "content": system}] * bool(system) + [
        {"role": "user", "content": "1+1?"}
    ]
    variables = {} if thinking is None else {"enable_thinking": thinking}
    if answered and "Qwen3" in name:
        return  # Qwen3's own adds an empty thought to the last answer, which no prompt of a run has
    turns += [
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2+2?"},
    ] * answered
    # as transformers does
    write = Environment(loader=BaseLoader(), trim_blocks=True, lstrip_blocks=True).from_string
    own = (TEMPLATES[0] / file).read_text()
    both = [
        write(template).render(messages=turns, add_generation_prompt=True, tools=None, **variables)
        for template in (own, chat_format(name).template)
    ]
    assert both[0] == both[1]
