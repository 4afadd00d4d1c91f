"""The trainer's settings: the optimizer, how a rollout batch becomes updates, what the ratio's denominator is."""

from __future__ import annotations

from dataclasses import dataclass, field

from gspo.aggregation import Aggregation


@dataclass
class OptimSettings:
    """AdamW; the learning rate rises linearly over the first `warmup_updates` updates and then stays."""

    lr: float = 1e-6
    warmup_updates: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-15  # RL gradients can be as small as 1e-18: the usual 1e-8 would stop learning (arXiv:2506.13585)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_skipped: int = 8  # updates in a row that are left out as their gradient is not finite, before the run stops

    def __post_init__(self):
        for key in ("lr", "eps", "weight_decay", "warmup_updates", "max_skipped"):
            if not getattr(self, key) >= 0:  # so that nan fails too
                raise ValueError(f"optim.{key}={getattr(self, key)} must not be negative")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"optim.{key}={getattr(self, key)} must lie in [0, 1)")
        if not self.max_grad_norm > 0:
            raise ValueError(f"optim.max_grad_norm={self.max_grad_norm} must be positive")


@dataclass
class TrainerSettings:
    """How a rollout batch becomes updates."""

    minibatches: int = 4  # optimizer updates per rollout batch and epoch; 4 in the paper, section 5.1
    epochs: int = 1
    micro_batch_size: int = 64  # responses per forward and backward; changes memory and speed, not the gradient
    aggregation: Aggregation = field(default_factory=Aggregation)  # from the loss of every token to one number
    mask_truncated: bool = (
        False  # leave responses that hit the limit out of the loss (their rewards stay in the baseline)
    )
    consistency_sample: int = 32  # responses on which routing is measured after the step's last update

    def __post_init__(self):
        for key in ("minibatches", "epochs", "micro_batch_size", "consistency_sample"):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key}={getattr(self, key)} must be at least 1")


@dataclass
class PolicySettings:
    """What the ratio's denominator is, and whether its routing is replayed."""

    # none | r2: gradient steps go through the experts that the trainer chose under the old policy
    #      | r3: old log-probs and gradient steps go through those that the engine chose
    routing_replay: str = "none"
    # step_start: recomputed under the weights of the step's start | behaviour: under those that sampled
    #            | engine: as the engine reported. The first two differ where responses are older than the step.
    old_logprobs: str = "step_start"
    # auto: no pass over the batch before the updates where the engine has just computed the same, with the trainer's
    # own weights, in its precision (Trainer.engine_knows); its experts are recorded for that. always: one in any case.
    # Results differ by rounding; mismatch/* and routing/engine_agreement are those of the first mini-batch with auto.
    old_pass: str = "auto"
    device: str = "auto"  # auto | cpu | cuda ...
    # bfloat16: the trainer's matrix products; weights, optimizer, norms, routers and the logits' softmax stay float32
    precision: str = "float32"
    checkpointing: bool = False  # keep only the layers' inputs for the backward pass, and compute the rest again

    def __post_init__(self):
        known = {
            "routing_replay": ("none", "r2", "r3"),
            "old_logprobs": ("step_start", "behaviour", "engine"),
            "old_pass": ("auto", "always"),
            "precision": ("float32", "bfloat16"),
        }
        for key, choices in known.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"policy.{key}={getattr(self, key)!r}: choose one of {', '.join(choices)}")
