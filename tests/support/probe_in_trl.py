"""TRL's GRPOTrainer with the probe, and our trainer on the same batches from the same weights.

    PYTHONPATH=.:tests/support .venv-peer/bin/python tests/support/probe_in_trl.py FOLDER CASE

A tiny model trains on two rollout batches. CASE is gspo or grpo, with an MoE and four updates on
each batch, or dense, with GSPO and one update. Prints a JSON object: the rows of TRL's
trainer_state.json, and our trainer's metrics of each rollout batch.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import transformers
from trl import GRPOConfig

from builders import PROMPTS, small_policy
from gspo.algorithm.objectives import GRPO, GSPO
from gspo.algorithm.objectives.base import Clipped
from gspo.data.batch import RolloutBatch, TrainBatch
from gspo.model.loading import save
from gspo.model.settings import TinyDense
from gspo.probe.trl import ProbedGRPOTrainer
from gspo.train.accumulator import MetricAccumulator
from trainers import trainer

ROLLOUTS = 2
MICRO_BATCHES = 2  # of an update
ROWS = 4  # of a micro-batch


@dataclass
class Case:
    """A training: its objective, its updates on a rollout batch, and its model."""

    objective: Clipped
    updates: int = 4
    model: TinyDense | None = None  # None: the MoE of small_policy

    @property
    def level(self) -> str:
        return "sequence" if self.objective.sequence_level else "token"


GSPO_CLIP = GSPO(clip_low=3e-3, clip_high=4e-3)
CASES = {
    "gspo": Case(GSPO_CLIP),
    "grpo": Case(GRPO(clip_low=0.1, clip_high=0.1)),
    "dense": Case(GSPO_CLIP, 1, TinyDense(hidden=32, layers=3, heads=2, width=48)),
}
# the step of such an AdamW is a smooth function of the gradient
LEARNING_RATE = 0.3
EPS = 1.0


class Recorded(ProbedGRPOTrainer):
    """A ProbedGRPOTrainer that keeps the inputs of every loss."""

    def __init__(self, *args, **kwargs):
        self.inputs: list[dict] = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        self.inputs.append(dict(inputs))
        return super()._compute_loss(model, inputs)


def begins_well(completions, **_) -> list[float]:
    return [float(text[:1].isdigit() or text[:1].islower()) for text in completions]


def train_in_trl(folder: Path, case: Case) -> Recorded:
    """Train the case with TRL, with gradient checkpointing, as is its default."""
    policy = small_policy(case.model)
    save(policy.model, policy.tokenizer, folder / "model")
    steps = ROLLOUTS * case.updates
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        seed=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=True,
        model_init_kwargs={"dtype": "float32"},
        importance_sampling_level=case.level,
        loss_type="grpo",
        epsilon=case.objective.clip_low,
        epsilon_high=case.objective.clip_high,
        num_generations=4,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICRO_BATCHES,
        steps_per_generation=case.updates * MICRO_BATCHES,
        max_completion_length=12,
        top_k=0,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=EPS,
        weight_decay=0.0,
        max_grad_norm=1.0,
        router_aux_loss_coef=0.0,
        report_to="none",
        logging_steps=1,
        save_strategy="steps",
        save_steps=steps,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trl = Recorded(
        model=str(folder / "model"),
        reward_funcs=begins_well,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": p} for p in 8 * PROMPTS]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )
    trl.remove_callback(transformers.PrinterCallback)
    trl.train()
    return trl


def batch_of(inputs: list[dict]) -> RolloutBatch:
    """Join the micro-batches of TRL to a rollout batch of ours."""
    joined = {
        name: torch.cat([micro[name] for micro in inputs])
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    }
    mask_BT = joined["completion_mask"].bool()
    _, prompts_B = joined["prompt_ids"].unique(dim=0, return_inverse=True)
    return RolloutBatch(
        tokens_BS=torch.cat([joined["prompt_ids"], joined["completion_ids"]], dim=1),
        attention_BS=torch.cat([joined["prompt_mask"].bool(), mask_BT], dim=1),
        mask_BT=mask_BT,
        sampled_BT=mask_BT,
        prompts_B=prompts_B,
        engine_logp_BT=torch.zeros(mask_BT.shape),
    )


def train_here(inputs: list[dict], case: Case) -> list[dict[str, float]]:
    """Train the same model with our trainer on TRL's batches."""
    ours = trainer(case.objective, model=case.model, lr=LEARNING_RATE, eps=EPS)
    metrics = []
    size = case.updates * MICRO_BATCHES
    for start in range(0, len(inputs), size):
        micros = inputs[start : start + size]
        rollout = batch_of(micros)
        scored = ours.policy.score(rollout, micro_batch_size=ROWS)
        adv_B = torch.cat([micro["advantages"] for micro in micros])
        adv_BT = adv_B.unsqueeze(-1).expand(rollout.mask_BT.shape)
        old = rollout.with_old_policy(scored.logp_BT, scored.experts_BSLK)
        batch: TrainBatch = old.with_advantages(adv_BT)
        accumulator = MetricAccumulator()
        rows_of_updates = torch.arange(len(batch)).split(MICRO_BATCHES * ROWS)
        for number, rows_N in enumerate(rows_of_updates, start=1):
            every_row_B = torch.ones(len(rows_N), dtype=torch.bool)
            ours.update(batch.rows(rows_N), every_row_B, number, accumulator)
        metrics.append(accumulator.result())
    return metrics


def main(folder: Path, case: Case) -> None:
    torch.set_num_threads(1)
    trl = train_in_trl(folder, case)
    state = folder / "trl" / f"checkpoint-{ROLLOUTS * case.updates}" / "trainer_state.json"
    rows = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    print(json.dumps({"trl": rows, "ours": train_here(trl.inputs, case)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), CASES[sys.argv[2]])
