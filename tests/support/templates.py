"""Chat templates and tokenizers that know their markers, to try episodes with.

python tests/support/templates.py FOLDER      a table of the templates (*.jinja) in a folder
"""

import re
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gspo.model.chat.conversation import Conversation
from gspo.model.chat.prompts import PromptFormat

TOKEN = re.compile(r"<\uff5c?\|?[A-Za-z_\u2581./]+(?: [A-Za-z]+)?\|?\uff5c?>|\[/?[A-Z_]{3,20}\]")


def tokenizer_of(template: str, end: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, in which all that looks like a marker in the template is
    a special token.
    """
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = sorted(set(TOKEN.findall(template)) | {end})
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=end,
        pad_token="<pad>",
        additional_special_tokens=[marker for marker in markers if marker != end],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def played(template: str, role: str, end: str = "<|endoftext|>") -> tuple[str, str]:
    """Play an episode of two turns of the environment.

    Returns the context that the policy has then, and the template's own rendering of the whole
    conversation. The policy ends its turns as the template does. Raises ValueError for a template
    that cannot be used."""
    tokenizer = tokenizer_of(template, end)
    prompts = PromptFormat()
    prompts.check(tokenizer)
    turn_end = prompts.end_of_turn(tokenizer)
    stop_ids = {tokenizer.eos_token_id} | ({turn_end} if turn_end is not None else set())
    talk = Conversation(tokenizer, prompts, stop_ids, role)
    messages = [{"role": "user", "content": "Begin: the rest."}]
    ids = prompts.encode_chat(tokenizer, messages)
    for number in range(2):
        own = [*tokenizer(f"turn {number}", add_special_tokens=False)["input_ids"]]
        last = turn_end
        if turn_end is None:
            opens = talk.frames[talk.role].opens
            last = opens[0] if opens and opens[0] in tokenizer.added_tokens_decoder else own[-1]
            talk.stop_ids.add(last)  # as generation_config.json of GLM-4 has it
        ids += own if last == own[-1] else [*own, last]
        ids += talk.reply(f"said {number}", last, 100).token_ids
        messages += [
            {"role": "assistant", "content": f"turn {number}"},
            {"role": talk.role, "content": f"said {number}"},
        ]
    return tokenizer.decode(ids), prompts.apply_chat_template(tokenizer, messages)


def verdict(template: str, role: str) -> str:
    """Return in a few words how an episode goes with a template."""
    try:
        context, whole = played(template, role)
    except ValueError as error:
        return f"refused: {error}"
    if context == whole:
        return "equal"
    if environment_turns(context) == environment_turns(whole):
        return "equal but for what the template makes of the policy's own turns"
    return f"differs: {environment_turns(context)!r} for {environment_turns(whole)!r}"


def environment_turns(text: str) -> list[str]:
    """What stands between the policy's last word and the environment's, for each of its turns, and
    what is last.
    """
    return [
        *re.findall(r"turn \d(.*?said \d)", text, flags=re.DOTALL),
        text.rpartition("said 1")[2],
    ]


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        for role in ("user", "tool"):
            print(f"{path.stem:<36} {role:<5} {verdict(text, role)}")
