"""The policy against transformers itself; folders that other programs can load; the tokenizer."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from builders import batch_of, fed, sample, small_policy
from gspo.model.loading import save
from gspo.model.settings import HFModel, TinyDense, TinyMoE
from gspo.model.tokenizer import CHARACTERS, character_tokenizer
from refusals import refuses


@pytest.mark.parametrize("model", [None, TinyDense(hidden=32, layers=3, heads=2, width=48)])
def test_log_probs_and_entropy_equal_one_by_one_forwards_without_padding(model):
    policy = small_policy(model)
    policy.temperature = 0.7
    responses = sample(policy)
    output = policy.forward(batch_of(policy, responses))
    for i, r in enumerate(responses):
        with torch.no_grad():
            logits = policy.model(torch.tensor([r.prompt_ids + r.token_ids])).logits[
                0, len(r.prompt_ids) - 1 : -1
            ]
        logprobs = (logits / 0.7).log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(r.token_ids)[:, None])[:, 0]
        n = len(r.token_ids)
        torch.testing.assert_close(output.logp_BT[i, :n], expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(
            output.entropy_BT[i, :n], -(logprobs.exp() * logprobs).sum(-1), atol=1e-4, rtol=0
        )


def test_score_equals_forward_whatever_the_micro_batch(moe):
    batch = batch_of(moe, sample(moe))
    with torch.no_grad():
        whole = moe.forward(batch)
    for size in (1, 4, 100):
        scored = moe.score(batch, size)
        logp_BT, experts_BSLK = scored.logp_BT, scored.experts_BSLK
        torch.testing.assert_close(
            logp_BT[batch.mask_BT], whole.logp_BT[batch.mask_BT], atol=1e-5, rtol=0
        )
        real = fed(batch)
        assert torch.equal(
            experts_BSLK[real].sort(-1).values, whole.experts_BSLK[real].sort(-1).values
        )


def test_the_tokenizer_is_one_character_one_token_and_survives_a_folder(tmp_path):
    tokenizer = character_tokenizer()
    text = "def f(x):\n x=x*2\n return x  #" + CHARACTERS
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == ids and loaded.decode(ids) == text
    assert (loaded.pad_token_id, loaded.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    assert loaded.decode([*ids[:3], loaded.eos_token_id], skip_special_tokens=True) == text[:3]


@pytest.mark.parametrize("settings", [TinyMoE(layers=2), TinyDense(layers=2)])
def test_a_saved_folder_is_a_normal_model(settings, tmp_path):
    model, tokenizer = settings.make()
    save(model, tokenizer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    again, again_tokenizer = HFModel(path=str(tmp_path)).make()
    ids = again_tokenizer("7+5=?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model.eval()(ids).logits
        assert torch.equal(plain.eval()(ids).logits, logits) and torch.equal(
            again.eval()(ids).logits, logits
        )


def test_made_models_depend_only_on_their_settings():
    a, b, c = (
        TinyMoE(layers=1).make()[0],
        TinyMoE(layers=1).make()[0],
        TinyMoE(layers=1, init_seed=1).make()[0],
    )
    state = torch.random.get_rng_state()
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert any(not torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True))
    TinyMoE(layers=1).make()
    assert torch.equal(state, torch.random.get_rng_state()), (
        "making a model must not disturb anyone's generator"
    )


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    with refuses("model.path", problem="there is no such folder"):
        HFModel(path=str(tmp_path / "nothing")).make()
    with refuses("model.path", "", "is empty"):
        HFModel().make()
    with refuses("model.experts_per_token", 20):
        TinyMoE(experts_per_token=20)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_copy_has_weights_of_its_own_with_the_same_buffers_and_draws_nothing(tied, dtype):
    policy = small_policy()
    if not tied:
        policy.model.config.tie_word_embeddings = False
        policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach() * 2)
    before = torch.get_rng_state()
    twin = policy.copy(dtype)
    assert torch.equal(torch.get_rng_state(), before)
    model = twin.model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ours = dict(policy.model.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(ours)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad and parameter.data_ptr() != ours[name].data_ptr()
        assert torch.equal(parameter, ours[name].to(dtype or torch.float32))
    buffers = dict(policy.model.named_buffers())
    assert buffers and dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, buffers[name])
        assert buffer.data_ptr() != buffers[name].data_ptr()
