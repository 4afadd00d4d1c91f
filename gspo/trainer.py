"""The loop, the step, the update.

fit         for each step: train_step, evaluate if due, log, checkpoint if due
train_step  scored groups -> advantages -> batch -> old log-probs -> N mini-batches of updates
update      micro-batches -> loss -> backward -> clip the gradient norm -> optimizer step

How this differs from the paper (arXiv:2507.18071), which leaves them open: AdamW with linear warm-up; mini-batches are
made of whole groups; gradients are clipped by their norm; no KL term.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.nn.utils import clip_grad_norm_

from gspo import diagnostics
from gspo.advantages import GroupNormalized
from gspo.batch import TrainBatch, pack
from gspo.checkpoint import TrainState
from gspo.diagnostics import Tally
from gspo.masked import AGGREGATIONS, Totals, aggregate
from gspo.objectives import LossInputs, Objective
from gspo.policy.policy import Policy
from gspo.rollout.source import OnPolicySource, Rollout
from gspo.seeding import permutation


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

    def __post_init__(self):
        for key in ("lr", "eps", "weight_decay", "warmup_updates"):
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
    aggregation: str = "sequence_mean"
    consistency_sample: int = 32  # responses on which routing is measured after the step's last update

    def __post_init__(self):
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"trainer.aggregation={self.aggregation!r}: choose one of {', '.join(AGGREGATIONS)}")
        for key in ("minibatches", "epochs", "micro_batch_size", "consistency_sample"):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key}={getattr(self, key)} must be at least 1")


@dataclass
class PolicySettings:
    """What the ratio's denominator is, and whether its routing is replayed."""

    routing_replay: str = "none"  # none | r2: gradient steps go through the experts that the old policy chose
    old_logprobs: str = "step_start"  # step_start: recomputed by the trainer | engine: as the engine reported
    device: str = "auto"  # auto | cpu | cuda ...

    def __post_init__(self):
        for key, choices in (("routing_replay", ("none", "r2")), ("old_logprobs", ("step_start", "engine"))):
            if getattr(self, key) not in choices:
                raise ValueError(f"policy.{key}={getattr(self, key)!r}: choose one of {', '.join(choices)}")


class Trainer:
    """Policy optimization of one policy by one objective."""

    def __init__(
        self,
        policy: Policy,
        source: OnPolicySource,
        objective: Objective,
        advantage: GroupNormalized,
        optim: OptimSettings,
        settings: TrainerSettings,
        policy_settings: PolicySettings,
        seed: int,
    ):
        self.policy, self.source, self.objective, self.advantage = policy, source, objective, advantage
        self.optim, self.settings, self.seed = optim, settings, seed
        self.replay = policy_settings.routing_replay == "r2"
        if self.replay:
            policy.routing.check_replay()
        self.old_logprobs = policy_settings.old_logprobs
        self.state = TrainState()
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )

    def fit(
        self,
        steps: int,
        evaluate: Callable[[int], dict[str, float]],
        log: Callable[[int, dict[str, float], Rollout | None], None],
        checkpoint: Callable[[int, bool], None],
        stop: Callable[[], bool],
    ) -> None:
        """Train up to step `steps`, from wherever the state stands; `stop()` true ends after the current step.

        `evaluate(step)` gives held-out metrics where they are due and nothing elsewhere; `checkpoint(step, last)`
        writes one where it is due, and always when this was the last step.
        """
        if self.state.step == 0:
            log(0, evaluate(0), None)
        for step in range(self.state.step + 1, steps + 1):
            rollout = self.source.next(step)
            metrics = self.train_step(step, rollout)
            log(step, metrics | evaluate(step), rollout)
            stopping = stop()
            checkpoint(step, stopping or step == steps)
            if stopping:
                return

    def train_step(self, step: int, rollout: Rollout) -> dict[str, float]:
        """One policy iteration on a batch of scored groups: credit, old log-probs, N updates."""
        started, tally = time.perf_counter(), Tally()
        rewards_PG = torch.tensor([[r.score.reward for r in group] for group in rollout.groups])
        batch = pack(rollout.responses, self.advantage(rewards_PG).flatten(), self.policy.tokenizer.pad_token_id)
        self.remember_old_policy(batch, tally)
        diagnostics.rewards(rollout.groups, tally)
        diagnostics.lengths(rollout.responses, tally)
        groups = torch.arange(len(batch)).view(rewards_PG.shape)
        update = 0
        for epoch in range(self.settings.epochs):
            order = torch.from_numpy(permutation(len(groups), self.seed, "minibatches", step, epoch))
            for rows in groups[order].chunk(self.settings.minibatches):
                update += 1
                self.update(batch.rows(rows.flatten()), update, tally)
        self.routing_after_step(batch, step, tally)
        self.account(step, batch, rollout, time.perf_counter() - started)
        return tally.result() | self.costs(rollout, batch, time.perf_counter() - started)

    @torch.no_grad()
    def remember_old_policy(self, batch: TrainBatch, tally: Tally) -> None:
        """Record log-probs and routing under the weights of the step's start: the ratio's denominator."""
        logp_BT, batch.experts_BSLK = self.policy.score(batch, self.settings.micro_batch_size)
        batch.old_logp_BT = logp_BT
        diagnostics.mismatch(batch, tally)
        if self.old_logprobs == "engine":
            batch.old_logp_BT = batch.engine_logp_BT

    def update(self, batch: TrainBatch, minibatch: int, tally: Tally) -> None:
        """One optimizer step; the loss is normalised by the counts of the whole mini-batch."""
        totals = Totals.of(batch.mask_BT)
        signal = bool(batch.adv_BT.any())
        for micro in batch.split(self.settings.micro_batch_size):
            learns = bool(micro.adv_BT.any()) or not signal  # rows without advantage add exactly 0 to the gradient
            with torch.set_grad_enabled(learns):
                output = self.policy.forward(micro, replay=self.replay)
                micro = micro.to(self.policy.device)
                losses = self.objective(LossInputs(output.logp_BT, micro.old_logp_BT, micro.adv_BT, micro.mask_BT))
                loss = aggregate(losses.loss_BT, micro.mask_BT, self.settings.aggregation, totals)
            if learns:
                loss.backward()
            with torch.no_grad():
                tally.mean("optim/loss", loss, len(micro) / len(batch))
                diagnostics.clips(losses, micro, minibatch, tally)
                diagnostics.ratios(output.logp_BT, micro, self.objective.log_ratio_bound, tally)
                diagnostics.entropy(output.entropy_BT, micro, tally)
                if output.experts_BSLK is not None:
                    diagnostics.routing(output.experts_BSLK, micro, self.policy.routing.experts, minibatch, tally)
        self.state.updates += 1
        lr = self.optim.lr * min(1.0, self.state.updates / max(self.optim.warmup_updates, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = clip_grad_norm_(self.policy.model.parameters(), self.optim.max_grad_norm, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tally.mean("optim/grad_norm", norm, 1)
        tally.largest("optim/grad_norm_max", norm)

    @torch.no_grad()
    def routing_after_step(self, batch: TrainBatch, step: int, tally: Tally) -> None:
        """Routing consistency after the last update, on a sample of the step's responses drawn by position."""
        if batch.experts_BSLK is None:
            return
        chosen = permutation(len(batch), self.seed, "consistency", step)[: self.settings.consistency_sample]
        sample = batch.rows(torch.from_numpy(chosen))
        _, own_BSLK = self.policy.score(sample, self.settings.micro_batch_size)
        diagnostics.routing(own_BSLK, sample, self.policy.routing.experts, None, tally)

    def account(self, step: int, batch: TrainBatch, rollout: Rollout, train_s: float) -> None:
        """Training compute so far: a prompt is prefilled once per group, a response scored once and trained on."""
        lengths_B = batch.attention_BS.sum(1)
        prompts_B = lengths_B - batch.mask_BT.sum(1)
        group_size = len(rollout.groups[0])
        flops = self.policy.forward_flops
        generated = flops(lengths_B) - flops(prompts_B) + flops(prompts_B[::group_size])
        self.state.step = step
        self.state.tokens += int(batch.mask_BT.sum())
        self.state.flops += generated + flops(lengths_B) * (1 + 3 * self.settings.epochs)
        self.state.seconds += rollout.rollout_s + rollout.score_s + train_s

    def costs(self, rollout: Rollout, batch: TrainBatch, train_s: float) -> dict[str, float]:
        tokens = int(batch.mask_BT.sum())
        totals = {
            f"compute/{key}": value for key, value in asdict(self.state).items() if key not in ("step", "updates")
        }
        return totals | {
            "optim/updates": self.state.updates,
            "optim/lr": self.optimizer.param_groups[0]["lr"],
            "time/rollout_s": rollout.rollout_s,
            "time/score_s": rollout.score_s,
            "time/train_s": train_s,
            "throughput/rollout_tokens": tokens / rollout.rollout_s,
            "throughput/train_tokens": tokens / train_s,
        }
