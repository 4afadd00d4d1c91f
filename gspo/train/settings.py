"""The settings of training: optimizer, updates, policy, ranks, checkpoints, cold start."""

import math
from dataclasses import dataclass, field, fields

from gspo.algorithm.advantages import Advantage, GroupNormalized
from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.corrections import Correction
from gspo.algorithm.entropy import EntropyCoefficient
from gspo.algorithm.kl import KL
from gspo.algorithm.objectives import GSPO, Objective
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.io.errors import SettingError
from gspo.io.ranges import (
    CHANGEABLE,
    HASHED_IF_CHANGED,
    LARGEST_SEED,
    Ranged,
    choice,
    cost_only,
    ranged,
)
from gspo.model.settings import LoraSettings

OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
PRECISIONS = ("float32", "bfloat16")


@dataclass
class OptimSettings(Ranged, key="optim"):
    """The settings of AdamW and of its learning-rate schedule."""

    # adamw | adamw_8bit, paged_adamw_8bit: with moments of 8 bits, by bitsandbytes
    # (gspo.train.optimizer)
    name: str = choice("adamw", OPTIMIZERS, metadata=HASHED_IF_CHANGED)
    lr: float = ranged(1e-6, least=0)  # the maximum of the schedule
    warmup_updates: int = ranged(20, least=0)  # updates over which it rises linearly
    # the learning rate after the warm-up. none: constant. linear, cosine: it falls to
    # `final_lr_factor` times lr over `decay_updates` updates
    decay: str = choice("none", ("none", "linear", "cosine"), metadata=HASHED_IF_CHANGED)
    decay_updates: int = ranged(0, least=0, metadata=HASHED_IF_CHANGED)
    final_lr_factor: float = ranged(0.0, least=0, most=1, metadata=HASHED_IF_CHANGED)
    beta1: float = ranged(0.9, least=0, below=1)
    beta2: float = ranged(0.95, least=0, below=1)
    # gradients of RL can be as small as 1e-18, and the usual 1e-8 would stop learning
    # (arXiv:2506.13585)
    eps: float = ranged(1e-15, least=0)
    weight_decay: float = ranged(0.0, least=0)
    # the learning rate of an MoE model's routers, as a multiple of lr
    router_lr_factor: float = ranged(1.0, least=0, metadata=HASHED_IF_CHANGED)
    max_grad_norm: float = ranged(1.0, above=0)
    # the run stops after more than this many updates in a row that are skipped because their
    # gradient is not finite
    max_skipped: int = ranged(8, least=0)

    def __post_init__(self):
        super().__post_init__()
        if (self.decay == "none") != (self.decay_updates == 0):
            raise SettingError(
                "optim.decay",
                self.decay,
                f"with optim.decay_updates={self.decay_updates}, the learning rate falls "
                "over a number of updates",
                remedy=(
                    "set both, or neither (a step has trainer.minibatches x trainer.epochs updates)"
                ),
            )
        if self.decay == "none" and self.final_lr_factor:
            raise SettingError(
                "optim.final_lr_factor", self.final_lr_factor, "does nothing with optim.decay=none"
            )

    def lr_of(self, update: int) -> float:
        """Return the learning rate of update n, counted from 1.

            lr min(1, n / warmup_updates) (f + (1 - f) d)

        f is final_lr_factor, and p = (n - warmup_updates) / decay_updates, kept within [0, 1].

            decay=none     d = 1
            decay=linear   d = 1 - p
            decay=cosine   d = (1 + cos(pi p)) / 2
        """
        lr = self.lr * min(1.0, update / max(self.warmup_updates, 1))
        if self.decay == "none":
            return lr
        progress = min(1.0, max(0, update - self.warmup_updates) / self.decay_updates)
        factor = 1 - progress
        if self.decay == "cosine":
            factor = (1 + math.cos(math.pi * progress)) / 2
        return lr * (self.final_lr_factor + (1 - self.final_lr_factor) * factor)


@dataclass
class TrainerSettings(Ranged, key="trainer"):
    """The settings of the updates on a rollout batch."""

    # optimizer updates per rollout batch and epoch; 4 in the paper, section 5.1
    minibatches: int = ranged(4, least=1)
    epochs: int = ranged(1, least=1)
    # responses per forward and backward pass; it changes memory and speed, not the gradient
    micro_batch_size: int = ranged(64, least=1, cost_only=True)
    # from the loss of every token to one number
    aggregation: Aggregation = field(default_factory=Aggregation)
    # leave truncated responses out of the loss, because their rewards are not fair (overlong
    # filtering, DAPO, arXiv:2503.14476). A response is truncated at max_new_tokens, at the model's
    # last position or at an episode's last turn. Its reward stays in the baseline
    mask_truncated: bool = False
    # coefficient of the auxiliary loss that balances the loads of the experts (BalanceTerm). The
    # GSPO paper's formula has none. transformers' router_aux_loss_coef is 0.001 for Qwen3-MoE and
    # Mixtral and 0.01 for OLMoE. Its loss is K times our loss.
    router_aux_loss_coef: float = ranged(0.0, least=0, metadata=HASHED_IF_CHANGED)
    # coefficient of the entropy bonus (EntropyTerm), which the GSPO paper does not have; with
    # entropy_target its value in the first update
    entropy_coef: float = ranged(0.0, least=0, metadata=HASHED_IF_CHANGED)
    # nats per token, the target of the entropy: after each update the coefficient moves by
    # entropy_coef_delta, within [entropy_coef_min, entropy_coef_max] (gspo.algorithm.entropy).
    # null: the coefficient is fixed
    entropy_target: float | None = ranged(None, above=0, metadata=HASHED_IF_CHANGED)
    entropy_coef_delta: float = ranged(0.005, above=0, metadata=HASHED_IF_CHANGED)
    entropy_coef_min: float = ranged(0.0, least=0, metadata=HASHED_IF_CHANGED)
    entropy_coef_max: float = ranged(1.0, above=0, metadata=HASHED_IF_CHANGED)
    # responses on which routing is measured after the last update
    consistency_sample: int = ranged(32, least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.entropy_target is not None:
            if not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
                raise SettingError(
                    "trainer.entropy_coef",
                    self.entropy_coef,
                    f"must lie between trainer.entropy_coef_min={self.entropy_coef_min} "
                    f"and trainer.entropy_coef_max={self.entropy_coef_max}",
                )
            return
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.startswith("entropy_coef_") and value != f.default:
                raise SettingError(
                    f"trainer.{f.name}",
                    value,
                    "is not read with trainer.entropy_target=null (a fixed coefficient)",
                )

    def entropy_coefficient(self) -> EntropyCoefficient | None:
        """Return the entropy bonus's coefficient at the start of a run, None without bonus."""
        if not self.entropy_coef and self.entropy_target is None:
            return None
        return EntropyCoefficient(
            self.entropy_coef,
            self.entropy_target,
            self.entropy_coef_delta,
            self.entropy_coef_min,
            self.entropy_coef_max,
        )


@dataclass
class PolicySettings(Ranged, key="policy"):
    """The settings of the policy: old log-probs, routing replay, precision, memory and LoRA."""

    # none | r2: gradient steps go through the experts that the trainer chose under the old policy
    #      | r3: old log-probs and gradient steps go through the experts that the engine chose
    routing_replay: str = choice("none", ("none", "r2", "r3"))
    # keep the routers of an MoE model as they are at the start of the run
    freeze_router: bool = field(default=False, metadata=HASHED_IF_CHANGED)
    # step_start: recomputed under the weights of the step's start
    # behaviour:  recomputed under the weights that sampled, which differs if responses are older
    #             than the step
    # engine:     as the engine reported
    old_logprobs: str = choice("step_start", ("step_start", "behaviour", "engine"))
    # auto:   skip the pass before the updates if the engine has just computed the same, with the
    #         trainer's weights, precision and forward pass (`skips_old_pass`). The engine's experts
    #         are recorded for that. mismatch/* and routing/engine_agreement are then measured on
    #         the first mini-batch alone
    # always: never skip it. Results differ by rounding
    old_pass: str = choice("auto", ("auto", "always"), metadata=CHANGEABLE)
    device: str = cost_only("auto")  # auto | cpu | cuda ...
    # of the trainer's matrix products; weights, optimizer, norms, routers and the logits' softmax
    # are always float32
    precision: str = choice("float32", PRECISIONS)
    # of the product that computes logits, in the trainer and in every engine. bfloat16 rounds it,
    # like the layers, which moves GSPO's ratios by more than its clip range (docs/recipes.md)
    head_dtype: str = choice("float32", PRECISIONS, metadata=HASHED_IF_CHANGED)
    # sum in the same order each time on a GPU too. A resumed run then equals an uninterrupted run
    # to the bit, as on a CPU. It is slower, and an operation without a fixed order ends the run
    deterministic: bool = cost_only(False)
    # keep only the layers' inputs for the backward pass, and recompute the rest
    checkpointing: bool = cost_only(False)
    # train a low-rank adapter on the model's layers instead of its weights
    lora: LoraSettings = field(default_factory=LoraSettings, metadata=HASHED_IF_CHANGED)

    def skips_old_pass(
        self,
        *,
        exact_engine: bool,
        samples_ahead: bool,
        correction: str,
        critic: bool,
        sum_pi_squared: bool = False,
    ) -> bool:
        """Return whether the engine's log-probs and experts stand for those of the old policy.

        They are the same, but for rounding, if the engine computes with the trainer's own weights,
        precision and forward pass (`exact_engine`) and no response is older than the step. The pass
        under the old policy is still needed for a correction, for the values of a critic, for sum_v
        pi_v^2, and for Routing Replay R3."""
        if self.old_pass == "always" or self.old_logprobs != "step_start":
            return False
        if not exact_engine or samples_ahead:
            return False
        if critic or sum_pi_squared or self.routing_replay == "r3":
            return False
        return correction == "none"


@dataclass
class ParallelSettings(Ranged, key="parallel"):
    """The settings of training with several ranks. Numbers depend on them by rounding."""

    # none:      one process
    # replicate: each of the processes that torchrun starts holds the whole model, passes its share
    #            of the responses through it, and makes the same updates
    # shard:     the same, with weights, gradients and optimizer state sharded over ranks (FSDP)
    mode: str = choice("none", ("none", "replicate", "shard"))
    # with mode=shard: the number of ranks over which a copy of the weights is sharded; 0: all
    shard_size: int = ranged(0, least=0)
    # with mode=shard: the number of ranks that share a layer's experts (expert parallelism). It
    # divides the ranks of a copy and the number of experts. 1: experts are all-gathered like all
    # other weights
    experts: int = ranged(1, least=1)
    # the number of processes of the run, which `gspo plan` reads; another number is refused. 0: any
    ranks: int = ranged(0, least=0)
    # minutes that the processes wait for a process that does not answer
    timeout_minutes: float = ranged(30.0, above=0)

    def __post_init__(self):
        super().__post_init__()
        if self.shard_size and self.mode != "shard":
            raise SettingError("parallel.shard_size", self.shard_size, "needs parallel.mode=shard")
        if self.experts > 1 and self.mode != "shard":
            raise SettingError("parallel.experts", self.experts, "needs parallel.mode=shard")


@dataclass
class CheckpointSettings(Ranged, key="checkpoint"):
    """The settings of checkpoints. A checkpoint is always written at the end or stop of a run."""

    every: int = ranged(10, least=1)  # steps from a checkpoint to the next
    keep: int = ranged(2, least=0)  # the number of newest checkpoints to keep; 0: all


@dataclass
class ColdStartSettings(Ranged, key="cold_start"):
    """The settings of supervised training before reinforcement learning. steps=0: none."""

    steps: int = ranged(0, least=0)
    batch_size: int = ranged(64, least=1)
    micro_batch_size: int = ranged(16, least=1)  # it changes speed and memory, not the gradient
    lr: float = ranged(3e-3, above=0)
    warmup_steps: int = ranged(50, least=0)
    # the share of demonstration steps that are wrong
    wrong_step_rate: float = ranged(0.12, least=0, below=1)
    # nats: pull log sum exp(logits) to this number. That adds a constant to all logits and leaves
    # the probabilities alone. 25 is the size in public models. null: no pull
    log_normalizer: float | None = ranged(None, above=0, metadata=HASHED_IF_CHANGED)
    # not the run's seed, because all seeds of a study share a cold start
    seed: int = ranged(0, least=0, most=LARGEST_SEED)


@dataclass
class Algorithm:
    """The mathematics of an update: objective, advantages, rewards, KL term and correction."""

    objective: Objective = field(default_factory=GSPO)
    advantage: Advantage = field(default_factory=GroupNormalized)
    reward: RewardShaping = field(default_factory=RewardShaping)
    kl: KL = field(default_factory=KL)
    correction: Correction = field(default_factory=Correction)
