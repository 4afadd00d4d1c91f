"""Stop strings: where a response ends, what is kept of it, and that nothing else changes."""

import random

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from builders import problems, small_policy
from composing import settings
from gspo.data.problems import Problem
from gspo.evaluation.settings import EvaluationSettings
from gspo.model.chat.control_tokens import check_readable
from gspo.model.tokenizer import character_tokenizer
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Row, Sampling, SamplingRequest, to_response
from gspo.rollout.engines.stop_strings import StopStringDetector
from gspo.rollout.settings import RolloutSettings
from gspo.run.policies import open_policy
from refusals import refuses

CORPUS = [
    "<answer>12</answer> so the end",
    "Grüße, 漢字 und mehr. ###\n\nNext: </answer></s>",
    "stop! stop? </stop>",
]


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE whose tokens cut letters and stop strings anywhere, with a special token of
    its own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|tool|>"]
    tokenizer.train_from_iterator(
        CORPUS * 5,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=special),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )


def first_end(tokenizer, ids: list[int], strings) -> int | None:
    """The number of tokens after which the text of all of them first holds a string, by decoding
    everything.
    """
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(
            ids[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if any(string in text for string in strings):
            return count
    return None


@pytest.mark.parametrize("make", [character_tokenizer, byte_tokenizer])
def test_it_ends_where_the_whole_text_first_holds_a_string(make):
    """Random tokens between pieces of the strings, special tokens among them: as if everything were
    decoded anew.
    """
    tokenizer, strings, found = make(), ["</answer>", "##", "\n\n", "字 u", "üß"], set()
    specials = sorted(set(tokenizer.all_special_ids))
    for seed in range(300):
        rng = random.Random(seed)
        ids = []
        for _ in range(12):
            text = rng.choice(
                [
                    "</ans",
                    "wer>",
                    "#",
                    "\n",
                    "12",
                    " ",
                    "漢",
                    "字",
                    " u",
                    "ü",
                    "ß",
                    "</",
                    "answer",
                    ">",
                ]
            )
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += [rng.choice(specials)] if rng.random() < 0.1 else []
            ids += [rng.randrange(len(tokenizer))] if rng.random() < 0.1 else []
        detector = StopStringDetector(tokenizer, set(tokenizer.all_special_ids), strings)
        ours = next((n for n, token in enumerate(ids, start=1) if detector.completes(token)), None)
        assert ours == first_end(tokenizer, ids, strings), (seed, ids)
        found.add(ours)
    assert len(found) > 8 and None in found, "the case should hold ends at many places, and none"


def full(policy, **sampling):
    groups = LocalEngine(policy).generate(
        SamplingRequest(problems(), 6, Sampling(1.0, 60, **sampling), (1, "t"), record_experts=True)
    )
    return [r for group in groups for r in group]


def test_a_response_is_the_one_without_stop_strings_up_to_the_token_that_completes_one():
    policy, strings = small_policy(), ("7", "a", "+:")
    plain, stopped = full(policy), full(policy, stop=strings)
    cut = 0
    for a, b in zip(plain, stopped, strict=True):
        end = first_end(policy.tokenizer, a.token_ids, strings)
        assert b.token_ids == a.token_ids[:end]
        assert (b.logprobs == a.logprobs[: len(b.token_ids)]).all()
        assert len(b.experts) == len(b.prompt_ids) + len(b.token_ids) - 1
        assert (b.experts == a.experts[: len(b.experts)]).all()
        assert b.finish_reason == ("stop" if end else a.finish_reason)
        assert b.text == policy.tokenizer.decode(b.token_ids, skip_special_tokens=True), (
            "with the stop string"
        )
        cut += end is not None
    assert 5 < cut < len(plain) or len({len(r.token_ids) for r in stopped}) > 5
    never = full(policy, stop=("no such text in sixty tokens",))
    assert [r.token_ids for r in never] == [r.token_ids for r in plain]


def test_the_prompt_ends_nothing_and_a_string_may_lie_across_calls():
    """The prompt holds "5=?", and budgets of 3 tokens cut strings of two apart."""
    policy, strings = small_policy(), ("5=?", "7", "a", "+:", "ab")
    whole = Sampling(1.0, 40, stop=strings)
    few = Sampling(1.0, 40, budget=3, stop=strings)
    engine = LocalEngine(policy)
    expected = [
        r for g in engine.generate(SamplingRequest(problems(), 4, whole, (1, "t"))) for r in g
    ]
    assert any(len(r.token_ids) > 3 and r.finish_reason == "stop" for r in expected)
    found = [r for g in engine.generate(SamplingRequest(problems(), 4, few, (1, "t"))) for r in g]
    while any(r.finish_reason == "budget" for r in found):
        going = [i for i, r in enumerate(found) if r.finish_reason == "budget"]
        for i, r in zip(
            going,
            engine.extend([found[i] for i in going], SamplingRequest([], 1, few, (1, "t"), 1)),
            strict=True,
        ):
            found[i] = r
    assert [(r.token_ids, r.finish_reason) for r in found] == [
        (r.token_ids, r.finish_reason) for r in expected
    ]


def test_what_an_engine_sampled_past_a_string_is_left_out():
    """As vLLM may: it does not know the tokens of earlier calls, and its server knows no text."""
    policy = small_policy()
    ids = policy.tokenizer("12ab34")["input_ids"]
    earlier = policy.tokenizer("9a")["input_ids"]
    sampling = Sampling(1.0, 40, stop=("ab",))
    for done, tokens, kept in ((0, ids, 4), (2, ids[3:], 1), (0, ids[:2], 2)):
        row = Row(
            Problem("math", 0, "", ""),
            0,
            [5, *earlier],
            done,
            9,
            list(tokens),
            list(map(float, range(len(tokens)))),
        )
        row.cut_at_stop(policy, sampling)
        assert row.token_ids == tokens[:kept] and row.logprobs == list(map(float, range(kept)))
    row = Row(
        Problem("math", 0, "", ""), 0, [5], 0, 9, list(ids[:4]), [0.0] * 4, [np.zeros((9, 1, 1))]
    )
    response = to_response(policy, row, SamplingRequest([], 1, sampling, (1, "t")), None)
    assert (response.finish_reason, response.text) == ("stop", "12ab")


def test_a_special_token_is_a_stop_by_its_id_and_is_refused_within_other_text():
    tokenizer = byte_tokenizer()
    ids = tokenizer("a<|tool|>b")["input_ids"]
    end = tokenizer.eos_token_id
    detector = StopStringDetector(tokenizer, {end}, ["<|tool|>"])
    assert [detector.completes(token) for token in ids[:2]] == [False, True], "it has a text"
    assert not any(
        StopStringDetector(tokenizer, {end, ids[1]}, ["<|tool|>"]).completes(token) for token in ids
    )
    with refuses("rollout.stop", ["a", "\n<|end|>"], "<|end|> has no text in a response"):
        check_readable(["a", "\n<|end|>"], tokenizer, {end}, "rollout.stop")
    check_readable(["</tool>", "\n", "\n<|tool|>"], tokenizer, {end}, "rollout.stop")
    chat = ("model=stand_in", "cold_start.steps=0")
    policy = open_policy(settings(*chat, "rollout.stop=['<|im_start|>']"), None, print)
    opens = policy.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert opens in policy.stop_ids and opens in policy.copy().stop_ids
    assert policy.text([opens]) == "<|im_start|>", "the verifier sees the stop string"
    assert policy.text([policy.tokenizer.eos_token_id]) == ""
    with refuses("rollout.stop", ["a<|im_end|>"], "<|im_end|> has no text in a"):
        open_policy(settings(*chat, "rollout.stop=['a<|im_end|>']"), None, print)


def test_settings_reach_the_sampling_and_an_empty_string_is_refused():
    assert RolloutSettings(stop=["</a>"]).sampling(1).stop == ("</a>",)
    assert EvaluationSettings().sampling(5, ["x"]).stop == ("x",)
    with refuses("rollout.stop", ["a", ""], "an empty string would end every"):
        RolloutSettings(stop=["a", ""])
    with refuses("stop", [""]):
        Sampling(stop=("",))
