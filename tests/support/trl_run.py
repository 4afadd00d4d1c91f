"""A few steps of TRL's GRPOTrainer with the GSPO objective, on a model of a few thousand weights.

It is run in TRL's own environment (make setup-peer): python trl_run.py FOLDER [STEPS]. It leaves
checkpoints with trainer_state.json in the folder.
"""

import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1", "TOKENIZERS_PARALLELISM": "false"}

import datasets
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

TOKENS = ["<pad>", "<eos>", *"0123456789+="]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def reward(completions: list[str], **columns: object) -> list[float]:
    return [text.count("1") / 8 for text in completions]


def main(folder: str, steps: int = 12) -> None:
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    arguments = GRPOConfig(
        output_dir=folder,
        report_to="none",
        max_steps=steps,
        logging_steps=1,
        save_steps=max(steps // 2, 1),
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        importance_sampling_level="sequence",
        epsilon=3e-4,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    prompts = [f"{a}+{b}=" for a in range(8) for b in range(8)]
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM(config),
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
