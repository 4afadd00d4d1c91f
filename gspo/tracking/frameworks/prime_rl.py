"""prime-rl, whose trainer and orchestrator write rows of their own into one file."""

from gspo.tracking.frameworks.table import PROBE, Axis, Table, other, reweighted, same, scaled

GROUP_MEANS = "mean over groups of the groups' means"
ONLY_EQUAL_REWARDS = "groups in which no response, or every response, has full reward"
SHARED = ("time/step", "time/save_ckpt")

ENTRIES = (
    # of the orchestrator
    same("train/agg/all/reward/mean", "reward/mean"),
    same("train/agg/all/*/reward/mean", "reward/mean", "of the only agent", if_only=True),
    same("train/agg/all/*/reward/mean", "reward/*"),
    same("train/agg/all/num_output_tokens/mean", "length/mean"),
    same(
        "train/agg/all/*/num_output_tokens/mean",
        "length/mean",
        "of the only agent",
        if_only=True,
    ),
    same("train/agg/all/is_truncated/mean", "length/truncated"),
    same("train/agg/all/*/is_truncated/mean", "length/truncated", "of the only agent", if_only=True),
    reweighted("reward/all/mean", "reward/mean", GROUP_MEANS),
    reweighted(
        "train/agg/all/*/solved_none",
        "group/zero_variance",
        ONLY_EQUAL_REWARDS,
        plus="train/agg/all/*/solved_all",
        if_only=True,
    ),
    other("train/agg/effective/*", "of the responses that were trained on"),
    other("train/agg/*", "of all responses, also of those that were dropped"),
    other("reward/*", "of one environment, or of single groups"),
    reweighted("decode_len/all/mean", "length/mean", GROUP_MEANS),
    reweighted("is_truncated/all/mean", "length/truncated", GROUP_MEANS),
    reweighted(
        "solve_none/all", "group/zero_variance", ONLY_EQUAL_REWARDS, plus="solve_all/all"
    ),
    other("solve_none/*", "share of groups without any reward"),
    other("solve_all/*", "share of groups in which every response is right"),
    same("eval/*/effective/*/avg@*", "eval/*_*/avg@*"),
    same("eval/*/effective/*/pass@*", "eval/*_*/pass@*"),
    same("eval/*/avg@*", "eval/*/avg@*"),
    other("eval/*", "of held-out problems"),
    # of the trainer
    same("optim/lr", "optim/lr"),
    same("optim/grad_norm", "optim/grad_norm"),
    other("optim/*", "of the optimizer"),
    same("entropy/all/mean", "policy/entropy"),
    other("entropy/*", "entropy of one environment's tokens, or its quantiles"),
    other(
        "mismatch_kl/*",
        "k3 of the current trainer and the sampler: drift of the policy and gap of the engine in "
        "one number",
    ),
    other("masked_mismatch_kl/*", "mismatch_kl of the masked tokens"),
    other("unmasked_mismatch_kl/*", "mismatch_kl of the other tokens"),
    other("kl_ent_ratio/*", "mismatch_kl over the entropy"),
    other(PROBE, "gspo.probe: ratios to the policy that sampled, mean over responses"),
    other("is_masked*", "tokens masked by differences of probabilities (DPPO), mean over responses"),
    scaled(
        "max_vio/mean", "routing/load_max", "mean over layers and micro-batches", offset=1
    ),
    other("max_vio/*", "load of the experts"),
    other("routing_confidence/*", "probability of the chosen experts"),
    other("off_policy/*", "age of the weights that sampled, by its own definition"),
    other("loss/*", "of micro-batches"),
    other("trainer/time/step", "seconds of a step of the trainer"),
    other("orchestrator/time/step", "seconds of a step of the orchestrator"),
    other("time/*", "seconds of a part of the step"),
    other("perf/*", "tokens per second, memory"),
    other("progress/*", "tokens, samples and problems of the step and so far"),
)  # fmt: skip

TABLE = Table(
    name="prime_rl",
    title="prime-rl",
    version="commit of 2026-11",
    entries=ENTRIES,
    axes=(Axis("step"), Axis("_step")),
    proofs=(
        ("mismatch_kl/all/mean",),
        ("entropy/all/mean", "optim/zero_grad_ratio"),
        ("train/agg/effective/*",),
        ("train/agg/all/*",),
        ("solve_none/all", "progress/total_problems"),
    ),
    # "time" is the clock of the writer, and "producer" its name
    ignored=("_timestamp", "time", "producer"),
    shared=SHARED,
    writers={"trainer": "time/forward_backward", "orchestrator": "progress/*"},
    gradient_norm="optim/grad_norm",
)
