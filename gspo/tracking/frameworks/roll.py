"""ROLL. The definitions are from roll/pipeline/rlvr/actor_worker.py."""

from gspo.tracking.frameworks.table import Axis, Table, other, reweighted, same, scaled

ENTRIES = (
    same("critic/score/mean", "reward/mean"),
    other("critic/correct/mean", "share of responses with a score of exactly 1"),
    same("tokens/response_length/mean", "length/mean"),
    other("tokens/total_response_length/clip", "number of responses at the limit, not their share"),
    other("tokens/*", "of single responses"),
    reweighted(
        "critic/entropy/mean", "policy/entropy", "its weights and its moment were not checked"
    ),
    scaled("actor/policykl", "kl/old_k1", "new minus old log-prob", factor=-1),
    other("actor/approxkl", "its own estimate of the KL to the old policy"),
    other("actor/clipfrac", "active tokens, averaged by loss_agg_mode"),
    other("actor/ppo_ratio_clipfrac", "ratios outside the range by a count that can exceed 1"),
    other("actor/kl_loss", "KL to the reference as a term of the loss"),
    other("critic/kl", "KL to the reference, by its own estimator"),
    other("actor/ratio_*", "ratios of tokens or responses, by the loss"),
    same("actor_train/grad_norm", "optim/grad_norm"),
    other("actor/train_infer_*", "engine against trainer, by its own definitions"),
    same("group/all_correct_groups_ratio", "group/all_correct"),
    reweighted(
        "group/all_incorrect_groups_ratio",
        "group/zero_variance",
        "groups with the largest or the smallest score in every response",
        plus="group/all_correct_groups_ratio",
    ),
    other("group/*", "shares of groups"),
    other("val_correct/*/mean", "share of held-out responses with a score of exactly 1"),
    other("time/step_total", "seconds of the step before"),
)

TABLE = Table(
    name="roll",
    title="ROLL",
    version="commit of 2026-11",
    entries=ENTRIES,
    axes=(Axis("step", first=0), Axis("_step", first=0)),
    proofs=(
        ("critic/correct/mean", "critic/score/mean"),
        ("actor/policykl", "critic/score/mean"),
        ("actor_train/grad_norm",),
    ),
    gradient_norm="optim/grad_norm",
    settings={"seed": ("seed",), "steps": ("max_steps",)},
)
