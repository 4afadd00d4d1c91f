"""Models that people bring: what is mended when they are loaded, and what is refused before the
first step.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from architectures import small_model
from builders import small_policy
from gspo.model import loading
from gspo.model.loading import check_can_be_written, load, load_outline, save, writable
from gspo.model.policy import Policy
from gspo.model.settings import HFModel, StandIn, TinyDense
from gspo.model.tokenizer import character_tokenizer
from refusals import refuses


def test_a_generation_configuration_that_cannot_be_written_is_mended():
    read = transformers.GenerationConfig(
        do_sample=False, temperature=0.6, top_p=0.95, eos_token_id=[1, 2]
    )
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        read.save_pretrained("nowhere")
    mended = writable(read)
    assert (mended.do_sample, mended.temperature, mended.top_p, mended.eos_token_id) == (
        True,
        0.6,
        0.95,
        [1, 2],
    )
    mended.validate(strict=True)
    assert read.do_sample is False, "what was read is not changed"
    plain = transformers.GenerationConfig(eos_token_id=2)
    assert writable(plain).to_dict() == plain.to_dict()


def test_one_that_nothing_mends_keeps_the_ids_of_tokens():
    read = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    read.__dict__["early_stopping"] = "perhaps"  # as read from a file of another version
    mended = writable(read)
    mended.validate(strict=True)
    assert (mended.eos_token_id, mended.pad_token_id, mended.bos_token_id) == (2, 0, None)


def test_a_soft_cap_on_attention_scores_is_not_left_out(tmp_path):
    capped = small_model("gemma2")
    capped.config.attn_logit_softcapping = 0.5
    save(capped, character_tokenizer(), tmp_path)
    model, _ = load(str(tmp_path))
    ids = torch.arange(3, 40)[None]

    def logits(attention: str) -> torch.Tensor:
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation=attention
        )
        return plain(ids).logits

    assert torch.allclose(model(ids).logits, logits("eager"), atol=1e-5)
    assert (logits("sdpa") - logits("eager")).abs().max() > 1e-3


def test_a_folder_with_such_a_file_is_loaded_and_written_again(tmp_path):
    policy = small_policy()
    save(policy.model, policy.tokenizer, tmp_path)
    given = {"do_sample": False, "temperature": 0.6, "eos_token_id": policy.tokenizer.eos_token_id}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    model, tokenizer = load(str(tmp_path))
    check_can_be_written(model, tokenizer)
    save(model, tokenizer, tmp_path / "again")
    assert (
        json.loads((tmp_path / "again" / "generation_config.json").read_text())["temperature"]
        == 0.6
    )


def test_loaded_weights_lie_where_those_that_a_process_makes_lie(tmp_path):
    """Products round by the address of a matrix, so a resumed run would differ in the last bit."""
    made = small_policy()
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        made.model.to(dtype).save_pretrained(folder)
        made.tokenizer.save_pretrained(folder)
        model, _ = load(str(folder))
        addresses = [p.data_ptr() % 64 for p in (*made.model.parameters(), *model.parameters())]
        assert set(addresses) == {0}
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == made.model.config.tie_word_embeddings


def test_a_head_that_is_not_the_embedding_stays_another_tensor_whatever_the_configuration_says(
    tmp_path,
):
    """Copies for the engine, checkpoints and what is read of them follow the configuration."""
    made = small_policy(TinyDense(hidden=16, layers=1, heads=2, width=16))
    save(made.model, made.tokenizer, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with refuses("model.path", problem="lm_head.weight differs from the input embedding"):
        load_outline(str(tmp_path), "sdpa")  # without the weights' content
    policy = Policy(*load(str(tmp_path)))
    assert not policy.model.config.tie_word_embeddings
    save(policy.model, policy.tokenizer, tmp_path / "again")
    token_ids = torch.arange(5)[None]
    expected = policy.model(token_ids).logits
    for model in (policy.copy(torch.float32).model, load(str(tmp_path / "again"))[0]):
        torch.testing.assert_close(model(token_ids).logits, expected)
    without_embedding = [p for p in policy.model.parameters() if p is not embedding_of(policy)]
    assert policy.active_parameters == sum(p.numel() for p in without_embedding)


def embedding_of(policy: Policy) -> torch.Tensor:
    return policy.model.get_input_embeddings().weight


def test_a_folder_of_links_as_in_the_hugging_face_cache_is_loaded_and_its_sizes_are_checked(
    tmp_path,
):
    policy = small_policy()
    save(policy.model, policy.tokenizer, tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..", "blobs", file.name))
    model, _ = load(str(tmp_path / "snapshot"))
    for a, b in zip(model.parameters(), policy.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    config = tmp_path / "blobs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 10**12}))
    with refuses("model.path", problem="hidden_size=1000000000000, which no model has"):
        load(str(tmp_path / "snapshot"))


def test_what_cannot_be_written_is_said_before_the_first_step(monkeypatch):
    model, tokenizer = StandIn().make()
    check_can_be_written(model, tokenizer)
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = False
    words = r"Qwen3ForCausalLM: a checkpoint of it cannot be written \(ValueError: GenerationConfig is invalid"
    with pytest.raises(ValueError, match=words):
        check_can_be_written(model, tokenizer)
    model.generation_config.do_sample = True
    other = StandIn(path="allenai/OLMoE-1B-7B-0924").make()[1]
    monkeypatch.setattr(
        loading.transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: other
    )
    with pytest.raises(
        ValueError, match="its tokenizer gives other tokens once it is written and read again"
    ):
        check_can_be_written(model, tokenizer)


def test_a_full_temporary_folder_is_no_fault_of_the_model(monkeypatch):
    model, tokenizer = StandIn().make()

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: ... (os error 28)")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(OSError, match=r"No space left on device: .*gspo-checkpoint-"):
        check_can_be_written(model, tokenizer)


def test_weights_that_cannot_be_written_are_said_too():
    model, tokenizer = StandIn().make()
    layers = model.model.layers
    # safetensors refuses what shares memory
    layers[0].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: a checkpoint of it cannot be written"):
        check_can_be_written(model, tokenizer)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "fp8"])
def test_quantized_weights_are_refused_in_one_line(tmp_path, method):
    policy = small_policy()
    save(policy.model, policy.tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "load_in_4bit": True, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for make in (HFModel(path=str(tmp_path)).make, HFModel(path=str(tmp_path)).outline):
        with refuses("model.path", str(tmp_path), f"its weights are quantized ({method})"):
            make()


def test_an_architecture_without_pytorchs_attention_gets_its_own(tmp_path):
    model = small_model("mamba")
    save(model, character_tokenizer(), tmp_path)
    loaded, _ = HFModel(path=str(tmp_path)).make()
    ids = torch.arange(5)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
