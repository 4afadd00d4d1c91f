"""TRL's GRPOTrainer with the GSPO objective on a benchmark's workload, in TRL's environment (`make
setup-peer`).

experiments/benchmark.py calls it with peer=trl, not the user: `python experiments/benchmark_trl.py
SPEC.json`. It adds clocks to TRL and changes nothing else. It uses TRL's fastest settings on a CPU,
which are not its defaults: no mixed precision and no gradient checkpointing (both together take
twice as long there). On a GPU there is no checkpointing either, and its weights are bfloat16 where
ours are float32 with bfloat16 products, which spares it a cast of all weights. This is untried on a
GPU.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

# checked before the imports below, which need TRL's environment
if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    print(__doc__.strip())
    sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
try:
    SPEC = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
except (OSError, ValueError) as error:
    sys.exit(f"error: {sys.argv[1]} is no SPEC.json of experiments/benchmark.py: {error}")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.environ |= {"ACCELERATE_USE_CPU": "1" if SPEC["device"] == "cpu" else "0"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

import datasets
import torch
import transformers
from trl import GRPOConfig, GRPOTrainer

ON_CPU = SPEC["device"] == "cpu"


class Clocked(GRPOTrainer):
    """A GRPOTrainer that records, for every rollout batch, the seconds in all and of sampling, and
    what was sampled.
    """

    def __init__(self, *args, **kwargs):
        self.rows: list[dict] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        self.close_row()
        self.rows.append({"started": time.perf_counter()})
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, *args, **kwargs):
        started = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        tokens = [len(ids) for ids in result[0]]
        self.rows[-1] |= {
            "rollout_s": time.perf_counter() - started,
            "tokens": sum(tokens),
            "longest": max(tokens),
        }
        return result

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        self.rows[-1]["reward"] = rewards.mean().item()
        return rewards

    def close_row(self) -> None:
        if self.rows:
            self.rows[-1].setdefault("total_s", time.perf_counter() - self.rows[-1]["started"])


def correct(completions, completion_ids, answer, **_) -> list[float]:
    end = SPEC["end"]
    return [
        float(end in ids and text.split("#")[-1].strip() == right)
        for text, ids, right in zip(completions, completion_ids, answer, strict=True)
    ]


def even_text(completions, **_) -> list[float]:
    return [float(sum(map(ord, text)) % 2 == 0) for text in completions]


def configuration(folder: str) -> GRPOConfig:
    optim, rows = SPEC["optim"], SPEC["prompts_per_step"] * SPEC["group_size"]
    micro_batch_size = min(SPEC["micro_batch_size"], rows // SPEC["minibatches"])
    return GRPOConfig(
        output_dir=folder, seed=SPEC["seed"], use_cpu=ON_CPU, bf16=SPEC["precision"] == "bfloat16",
        gradient_checkpointing=False, model_init_kwargs={"dtype": SPEC["precision"]},
        importance_sampling_level="sequence", loss_type="grpo",
        epsilon=SPEC["clip"][0], epsilon_high=SPEC["clip"][1], beta=0.0, scale_rewards="group",
        num_generations=SPEC["group_size"], per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=rows // SPEC["minibatches"] // micro_batch_size,
        steps_per_generation=rows // micro_batch_size, num_iterations=1,
        max_completion_length=SPEC["new_tokens"], temperature=1.0, top_p=1.0, top_k=0, shuffle_dataset=False,
        max_steps=SPEC["batches"] * SPEC["minibatches"], learning_rate=optim["lr"],
        lr_scheduler_type="constant_with_warmup", warmup_steps=optim["warmup_updates"], adam_beta1=optim["beta1"],
        adam_beta2=optim["beta2"], adam_epsilon=optim["eps"], weight_decay=0.0, max_grad_norm=optim["max_grad_norm"],
        report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, use_vllm=False,
        router_aux_loss_coef=0.0, dataloader_num_workers=0, dataloader_pin_memory=False,
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(SPEC["threads"] or torch.get_num_threads())
    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(SPEC["checkpoint"])
    SPEC["end"] = tokenizer.eos_token_id
    rows = [
        {"prompt": p, "answer": str(a)}
        for p, a in zip(SPEC["prompts"], SPEC["answers"], strict=True)
    ]
    reward = even_text if SPEC["reward"] == "EvenText" else correct
    with tempfile.TemporaryDirectory() as folder:
        trainer = Clocked(
            model=SPEC["checkpoint"],
            reward_funcs=reward,
            args=configuration(folder),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        trainer.close_row()
    measured = trainer.rows[1:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )
    if not ON_CPU:
        peak = torch.cuda.max_memory_allocated() / 2**20
    record = {
        key: median(r[key] for r in measured)
        for key in ("total_s", "rollout_s", "tokens", "longest", "reward")
    }
    Path(SPEC["out"]).write_text(
        json.dumps(record | {"peak_memory_mib": peak, "batches": measured}), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
