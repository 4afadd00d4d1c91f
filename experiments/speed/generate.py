"""The in-process engine beside transformers' `generate`: the same weights, prompts, limit and
number of responses.
"""

import time
from statistics import median

import torch

from gspo.config.settings import Settings
from gspo.data.problems import Problem
from gspo.model.policy import Policy
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import SamplingRequest
from gspo.run.policies import load_model, training_device


def compare_generation(settings: Settings, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Return tokens, seconds and tokens per second of both, measured in alternation after one round
    to warm up.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    kind, rollout = getattr(torch, settings.rollout.dtype), settings.rollout
    model, tokenizer = load_model(settings, None)
    policy = Policy(model, tokenizer)
    policy = policy if kind == torch.float32 else policy.copy(kind)
    policy.model.requires_grad_(False)
    engine = LocalEngine(policy, rollout.batch_rows, kind)
    problems = [
        settings.task.problem(settings.seed, "train", i) for i in range(rollout.prompts_per_step)
    ]
    measured = []
    for number in range(rounds + 1):
        measured.append({})
        for name in ("transformers", "ours"):
            started = time.perf_counter()
            if name == "ours":
                groups = engine.generate(
                    SamplingRequest(
                        problems, rollout.group_size, rollout.sampling(1), (number, "benchmark")
                    )
                )
                tokens = sum(len(r.token_ids) for group in groups for r in group)
            else:
                tokens = generated(policy, problems, settings)
            if "cuda" in training_device(settings):
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            measured[-1][name] = {
                "seconds": seconds,
                "tokens": tokens,
                "tokens_per_s": tokens / seconds,
            }
    return measured[1:]


def generated(policy: Policy, problems: list[Problem], settings: Settings) -> int:
    """Return the number of response tokens that `generate` samples, batch by batch."""
    rollout, pad = settings.rollout, policy.tokenizer.pad_token_id
    at_once, tokens = max(1, rollout.batch_rows // rollout.group_size), 0
    for start in range(0, len(problems), at_once):
        prompts = [policy.encode_prompt(p.prompt) for p in problems[start : start + at_once]]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=policy.device)
        out = policy.model.generate(
            input_ids=ids,
            attention_mask=torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=ids.device
            ),
            do_sample=True,
            temperature=rollout.temperature,
            top_k=0,
            max_new_tokens=rollout.max_new_tokens,
            num_return_sequences=rollout.group_size,
            eos_token_id=sorted(policy.stop_ids),
            pad_token_id=pad,
        )
        sampled = out[:, width:]
        ended = torch.isin(sampled, torch.tensor(sorted(policy.stop_ids), device=ids.device)).int()
        tokens += int((ended.cumsum(1) - ended == 0).sum())
    return tokens


def generation_table(rounds: list[dict[str, dict[str, float]]]) -> str:
    lines = [f"{'round':<7}{'side':<14}{'seconds':>9}{'tokens':>9}{'tokens/s':>10}"]
    for number, sides in enumerate(rounds, 1):
        for name, r in sides.items():
            lines.append(
                f"{number:<7}{name:<14}{r['seconds']:>9.2f}{r['tokens']:>9,.0f}{r['tokens_per_s']:>10,.0f}"
            )
    ratios = [
        sides["ours"]["tokens_per_s"] / sides["transformers"]["tokens_per_s"] for sides in rounds
    ]
    spread = f"median {median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f})"
    lines.append(f"ours / transformers, tokens/s: {spread}")
    return "\n".join(lines)
