"""How each peer's defaults differ from ours, in words. The versions are those in the keys of the
golden vectors.
"""

COLUMNS = (
    "ratio and clip",
    "aggregation",
    "divided by",
    "bound before exp",
    "KL term",
    "advantage",
    "clip fraction",
)

OURS = (
    "sequence, 3e-4 / 4e-4",
    "seq-mean-token-mean; other objectives: their papers'",
    "responses with tokens",
    "±20, beyond it no gradient, counted",
    "none",
    "(r - mean) / (std + 1e-6); equal rewards and a group of one give 0",
    "tokens and responses, active and outside",
)

PEERS = {
    "verl": (
        "token, 0.2 / 0.2 (setting only `clip_ratio` has no effect); dual clip 3, but none in gspo",
        "token-mean; gspo, sapo: seq-mean-token-mean whatever is set",
        "global batch size in training, else responses with tokens; n_i + 1e-8",
        "gspo: 10 above, none below; others ±20",
        "off; coefficient 1e-3; k3 with d within ±20, value within ±10",
        "std + 1e-6; a group of one keeps its reward",
        "tokens, active",
    ),
    "TRL": (
        "token, 0.2 / 0.2; delta off",
        "token-mean (`dapo`), also with a sequence ratio",
        "tokens (dapo), all responses (grpo), B * max_completion_length (dr_grpo)",
        "none",
        "off; k3 without bounds, not weighted by rollout weights",
        "std + 1e-4",
        "tokens; with a sequence ratio responses, those without tokens included; active",
    ),
    "ms-swift": (
        "token, 0.2 / 0.2; delta off",
        "seq-mean-token-mean (`grpo`)",
        "all responses",
        "none",
        "on: coefficient 0.04; k3 with d within ±20, value within ±10; weighted by rollout weights",
        "std + 1e-4",
        "tokens, active",
    ),
    "ROLL": (
        "token, 0.2 / 0.2, in its GSPO example too; dual clip off, its constant 1 + 2 pg_clip",
        "seq-mean-token-mean; token-mean adds up padding",
        "responses with tokens; n_i + 1e-8, V + 1e-8; -norm: by T only",
        "none; n_i + 1e-8 in the mean log-ratio",
        "off; k3 with the value within ±10, aggregated like the policy term",
        "std + 1e-6; `reinforce` without reward norm has no group baseline",
        "outside, summed over padding (may exceed 1); `clipfrac` as the loss is aggregated",
    ),
    "OpenRLHF": (
        "token, 0.2; gspo with vLLM correction: the ratio is to the behaviour policy",
        "gspo: seq-mean-token-mean whatever is set",
        "responses with tokens; n_i + 1e-8",
        "ppo: ±20; gspo: none",
        "values within ±10, in float32",
        "std + 1e-9",
        "tokens, active",
    ),
    "slime": (
        "token, 0.2; dual clip an option",
        "seq-mean-token-mean",
        "all responses (global batch size)",
        "none",
        "low_var_kl with the value within ±10, others free, in float32",
        "std + 1e-6",
        "mean over responses of the share of their tokens, active",
    ),
    "SkyRL": (
        "token, 0.2, in its GSPO example too; no dual clip in gspo",
        "sums, of advantages divided beforehand",
        "all responses (`sequence_mean`)",
        "gspo: 10 above, none below; sapo: ±20",
        "off or on by option",
        "std + 1e-6; a group of one keeps its reward",
        "tokens, active",
    ),
    "AReaL": (
        "token; GSPO example 0.4; with a sequence ratio the response's advantages are averaged first",
        "token-mean, also with a sequence ratio",
        "tokens",
        "none",
        "in the reward only",
        "std + 1e-5",
        "tokens, active",
    ),
    "NeMo-RL": (
        "token, 0.2, in its GSPO recipe too",
        "GSPO: mean over responses",
        "valid responses",
        "none",
        "in the loss or the reward, by option",
        "leave-one-out baseline, std + 1e-6; a group of one gives 0",
        "none logged",
    ),
}
