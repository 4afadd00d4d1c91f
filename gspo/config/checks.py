"""Refuse combinations of settings that cannot work, or that would not do as they say.

Every refusal is one line that names the key, the value and a remedy. `check` runs before a model
loads. algorithm_checks.py has the checks of the algorithm.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from gspo.config.algorithm_checks import check_algorithm, starts_at_one
from gspo.config.episodes import check_episodes
from gspo.config.unread_options import changed, check_unread_options
from gspo.io.errors import SettingError
from gspo.rollout.settings import check_sampler
from gspo.rollout.vllm_settings import VLLMRolloutBase, check_temperature

if TYPE_CHECKING:
    from gspo.config.settings import Settings


def check(s: Settings, given: Collection[str] | None = None) -> None:
    """Raise ValueError for the first combination of settings that cannot work.

    `given` names the settings, and the groups, in which options that nothing reads are refused.
    None stands for all."""
    check_updates(s)
    check_replay(s)
    check_optimizer(s)
    check_stop_strings(s)
    check_router(s)
    check_lora(s)
    check_head(s)
    check_algorithm(s)
    check_episodes(s)
    check_unread_options(s, given)
    if s.cold_start.steps and not s.task.has_demonstrations:
        raise SettingError(
            "cold_start.steps",
            s.cold_start.steps,
            f"task={s.task.name} has no demonstrations",
            remedy="start from a trained model, model=hf model.path=... cold_start.steps=0",
        )
    check_sampler(s.rollout, s.sampler)
    if isinstance(s.rollout, VLLMRolloutBase):
        check_temperature("evaluation.temperature", s.evaluation.temperature)
    longest = getattr(s.rollout, "max_model_len", None)
    if longest and longest <= s.rollout.longest_limit:
        raise SettingError(
            "rollout.max_model_len",
            longest,
            "leaves no room for a prompt beside responses of up to "
            f"{s.rollout.longest_limit} tokens (rollout.max_new_tokens, rollout.extend)",
        )
    unknown = set(s.evaluation.sets) - set(s.task.evaluation_sets())
    if unknown:
        raise SettingError(
            "evaluation.sets",
            sorted(unknown),
            f"task={s.task.name} has {', '.join(s.task.evaluation_sets())}",
        )


def check_training_set(s: Settings) -> None:
    """Read the training set, before a model loads.

    Raises ValueError if it is missing or smaller than the query set."""
    size = s.task.size("train")
    if size and s.rollout.query_set > size:
        raise SettingError(
            "rollout.query_set",
            s.rollout.query_set,
            f"exceeds the {size} training problems of task={s.task.name}: some would be in "
            "it twice",
            remedy=f"use at most {size}, or 0 for all of them epoch by epoch",
        )


def check_updates(s: Settings) -> None:
    """Refuse mini-batches that split groups, and a single update in which no objective clips."""
    updates = s.trainer.minibatches * s.trainer.epochs
    if s.rollout.prompts_per_step % s.trainer.minibatches:
        raise SettingError(
            "trainer.minibatches",
            s.trainer.minibatches,
            f"does not divide rollout.prompts_per_step={s.rollout.prompts_per_step}: "
            "mini-batches are made of whole groups",
        )
    on_policy = updates == 1 and starts_at_one(s)
    if on_policy and not s.allow_on_policy and s.objective.ratio_to == "old":
        raise SettingError(
            "trainer.minibatches",
            1,
            f"with policy.old_logprobs={s.policy.old_logprobs}, every ratio is 1, so "
            f"objective={s.objective.name} cannot clip and all objectives are the same",
            remedy="use more mini-batches, or set allow_on_policy=true",
        )


def check_replay(s: Settings) -> None:
    """Refuse Routing Replay without routing, without effect, or with gaps in the record."""
    replay = s.policy.routing_replay
    if replay == "none":
        return
    if s.model.is_dense:
        raise needs_experts(s, "policy.routing_replay", replay)
    # r2 replays the experts of the old policy, r3 the experts of the engine. Does the router
    # choose the same experts anyway?
    if replay == "r2":
        changes_nothing = starts_at_one(s) or not s.rollout.samples_ahead
    else:
        same_precision = s.rollout.shares_weights and s.policy.precision == "float32"
        changes_nothing = same_precision and not s.rollout.samples_ahead
    if s.trainer.minibatches * s.trainer.epochs == 1 and changes_nothing:
        raise SettingError(
            "policy.routing_replay",
            replay,
            "changes nothing with one update per rollout batch (trainer.minibatches=1)",
        )
    if s.rollout.token_budget and (replay == "r3" or s.policy.old_logprobs != "step_start"):
        raise SettingError(
            "policy.routing_replay",
            replay,
            f"with rollout.token_budget={s.rollout.token_budget} and "
            f"policy.old_logprobs={s.policy.old_logprobs}, each policy routes anew what "
            "stands before its own segment, so a cut response has no one record of experts",
            remedy="use routing_replay=none, or r2 with old_logprobs=step_start",
        )


def check_optimizer(s: Settings) -> None:
    """Refuse moments of 8 bits for sharded weights: bitsandbytes' state was never sharded."""
    if s.optim.name != "adamw" and s.parallel.mode == "shard":
        raise SettingError(
            "optim.name",
            s.optim.name,
            "with parallel.mode=shard, its state was never spread over processes",
            remedy="use optim.name=adamw, whose moments are spread",
        )


def check_stop_strings(s: Settings) -> None:
    """Refuse stop strings if vLLM must return the experts of every token."""
    if s.rollout.stop and s.rollout.routes and s.rollout.name != "local":
        raise SettingError(
            "rollout.stop",
            s.rollout.stop,
            f"with rollout={s.rollout.name} and rollout.routes=true (r3 sets it), vLLM "
            "keeps no experts of a response that it breaks off",
            remedy="use one of the two, or rollout=local",
        )


def check_router(s: Settings) -> None:
    """Refuse settings of routers for a model without routers, or with frozen routers."""
    not_read = "is not read with policy.freeze_router=true, which leaves the routers as they are"
    for key, value, default in [
        ("policy.freeze_router", s.policy.freeze_router, False),
        ("optim.router_lr_factor", s.optim.router_lr_factor, 1),
        ("trainer.router_aux_loss_coef", s.trainer.router_aux_loss_coef, 0),
    ]:
        if value != default and s.model.is_dense:
            raise needs_experts(s, key, value)
        if value != default and s.policy.freeze_router and key != "policy.freeze_router":
            raise SettingError(key, value, not_read)


def needs_experts(s: Settings, key: str, value: Any) -> SettingError:
    """Return the error of a setting that a dense model does not read."""
    return SettingError(key, value, f"needs an MoE model; model={s.model.name} is dense")


def check_head(s: Settings) -> None:
    """Refuse a head in bfloat16 if nothing else is: the setting would be ignored."""
    if s.policy.head_dtype == "bfloat16" and s.policy.precision == s.rollout.dtype == "float32":
        raise SettingError(
            "policy.head_dtype",
            "bfloat16",
            "is not read with policy.precision=float32 and rollout.dtype=float32",
            remedy="set policy.precision=bfloat16, or leave it out",
        )


def check_lora(s: Settings) -> None:
    """Refuse settings of an adapter without an adapter, and settings that exclude an adapter."""
    lora = s.policy.lora
    rank = f"policy.lora.rank={lora.rank}"
    if not lora.rank:
        for key in ("targets", "alpha"):
            if changed(lora, key):
                raise SettingError(
                    f"policy.lora.{key}",
                    getattr(lora, key),
                    f"is not read with {rank}",
                    remedy="choose a rank, or leave it",
                )
        return
    if lora.targets == "experts" and s.model.is_dense:
        raise needs_experts(s, "policy.lora.targets", "experts")
    routers = "an adapter leaves the routers as they are"
    sharded = "weights that are spread take no adapter; use replicate"
    merged = (
        "policy.old_logprobs=behaviour are then computed by the copy that samples, into which the "
        "adapter is merged: in policy.precision=bfloat16 these are not the trainer's; "
        "use rollout.overlap=false"
    )
    fixed = (
        "the reference is the model with its adapter off, which does not change; "
        "use kl.refresh_every=0"
    )
    rounds_copy = s.policy.old_logprobs == "behaviour" and s.policy.precision == "bfloat16"
    refresh = s.kl.needs_reference and s.kl.refresh_every
    lr_factor = s.optim.router_lr_factor
    aux_loss = s.trainer.router_aux_loss_coef
    excluded = [
        (s.policy.freeze_router, "policy.freeze_router", True, routers),
        (lr_factor != 1, "optim.router_lr_factor", lr_factor, routers),
        (aux_loss != 0, "trainer.router_aux_loss_coef", aux_loss, routers),
        (s.parallel.mode == "shard", "parallel.mode", "shard", sharded),
        (s.rollout.overlap and rounds_copy, "rollout.overlap", True, merged),
        (refresh, "kl.refresh_every", refresh, fixed),
    ]
    for is_chosen, key, value, reason in excluded:
        if is_chosen:
            raise SettingError(key, value, f"with {rank}, {reason}")


def check_processes(s: Settings, count: int) -> None:
    """Raise ValueError for settings that `count` processes cannot have."""
    if s.rollout.name == "vllm":
        if not s.rollout.own_process:
            raise SettingError(
                "rollout.own_process",
                False,
                f"with {count} processes, vLLM would take itself for one of them",
                remedy="set rollout.own_process=true",
            )
        size = s.rollout.tensor_parallel_size
        if count % size:
            raise SettingError(
                "rollout.tensor_parallel_size",
                size,
                f"does not divide the {count} processes: each vLLM is shared by {size} of them",
            )
    shard_size = s.parallel.shard_size
    if shard_size and count % shard_size:
        raise SettingError(
            "parallel.shard_size", shard_size, f"does not divide the {count} processes"
        )
    if (shard_size or count) % s.parallel.experts:
        shard = f"parallel.shard_size={shard_size}" if shard_size else f"the {count} processes"
        raise SettingError("parallel.experts", s.parallel.experts, f"does not divide {shard}")
    if s.rollout.prompts_per_step < count:
        raise SettingError(
            "rollout.prompts_per_step",
            s.rollout.prompts_per_step,
            f"is less than the {count} processes",
        )
