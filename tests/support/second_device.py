"""Training on the simulated second device beside the CPU: whether both compute the same, and what a
GPU would do.

    python tests/support/second_device.py                 a table of waits, launches and copies
    python tests/support/second_device.py --json          the same, and the comparisons, for the
                                                          tests

Rows of the table: a decoded token (of all rows together), the pass for the old policy, the updates
of the first mini-batch and of a later one, the rest of a step, a checkpoint. Launches are given per
layer where layers make them.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402

from builders import recorded_gradients  # noqa: E402
from gspo.checking.bench import Digits  # noqa: E402
from gspo.cli.option_files import composed_settings  # noqa: E402
from gspo.config.settings import Settings  # noqa: E402
from gspo.evaluation.evaluate import evaluate  # noqa: E402
from gspo.rollout.sources.base import Rollout  # noqa: E402
from gspo.run.build import build_trainer, evaluation_engine  # noqa: E402
from gspo.run.loop import checkpoint_writer  # noqa: E402
from gspo.train.checkpoint_files import latest_checkpoint  # noqa: E402
from gspo.train.trainer import Trainer  # noqa: E402

COMMON = (
    "task=math", "cold_start.steps=0", "tracking.wandb=disabled", "objective=gspo_tiny", "evaluation.problems=4",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=9", "trainer.micro_batch_size=4",
    "trainer.minibatches=2", "optim.lr=1e-3", "optim.warmup_updates=1", "threads=1",
)  # fmt: skip
DENSE = ("model=tiny_dense", "model.hidden=32", "model.heads=2", "model.width=64", "model.layers=2")
SPARSE = ("model=tiny_moe", "model.hidden=32", "model.heads=2", "model.experts=8", "model.layers=2")
CASES = {
    "dense": DENSE,
    "MoE": SPARSE,
    "R3": (
        "policy.routing_replay=r3",
        "rollout.routes=true",
        "trainer.router_aux_loss_coef=0.01",
        *SPARSE,
    ),
    "LoRA": ("policy.lora.rank=4", *DENSE),
    "critic and KL": ("advantage=gae", "objective=grpo", "kl=loss", *DENSE),
    "episodes": ("task=guessing", "trainer.entropy_coef=0.01", *DENSE),
    "bfloat16, R2": (
        "policy.precision=bfloat16",
        "rollout.dtype=bfloat16",
        "policy.routing_replay=r2",
        *SPARSE,
    ),
    "stop strings": ("rollout.stop=['5','3']", "rollout.top_p=0.9", *DENSE),
    "kept tokens": ("rollout.top_p=0.9", "rollout.keep_mask=true", *DENSE),
    "overlap, R2": (
        "rollout.staleness=1",
        "rollout.overlap=true",
        "policy.routing_replay=r2",
        *SPARSE,
    ),
}
STEPS = 2  # of the cases that are shown; the others make one
SHOWN = ("dense", "MoE")  # the cases of the table


def settings_of(case: str, device: str) -> Settings:
    """Return the settings of a case on a device. All but the game have the task that random models
    can learn from.
    """
    settings = composed_settings([*COMMON, *CASES[case]])
    settings.policy.device = device
    if case != "episodes":
        settings.task = Digits()
    return settings


class Phases:
    """Adds up what an observer counts by phase of a trainer's steps, and the seconds."""

    def __init__(self, trainer: Trainer, observer):
        self.observer, self.counts, self.times = observer, {}, Counter()
        self.seconds: Counter[str] = Counter()
        self.inner = [Counter()]  # for each piece of work under way: what the pieces within it did
        self.longest = 0
        self.source = trainer.source
        update = trainer.update
        old = trainer.old_policy.add
        step = trainer.train_step

        def one_update(minibatch, own, update_number, accumulator):
            name = "first mini-batch" if update_number == 1 else "a later mini-batch"
            return self.within(name, update, minibatch, own, update_number, accumulator)

        trainer.update = one_update
        trainer.old_policy.add = lambda *words: self.within("pass for the old policy", old, *words)
        trainer.train_step = lambda *words: self.within("rest of a step", step, *words)

    def rollout(self, step: int) -> Rollout:
        """Return the source's groups of a step, and count their tokens."""
        rollout = self.within("a decoded token", self.source.next, step)
        self.longest += max(len(r.token_ids) for r in rollout.responses)
        return rollout

    def within(self, name: str, work, *words):
        """Call some work and add to a phase what it does, without what belongs to phases within it."""
        before = self.totals()
        self.inner.append(Counter())
        result = work(*words)
        whole = self.totals() - before
        own = whole - self.inner.pop()
        self.inner[-1] += whole
        self.seconds[name] += own.pop("seconds")
        self.times[name] += 1
        self.counts[name] = self.counts.get(name, Counter()) + own
        return result

    def totals(self) -> Counter[str]:
        """Return what was counted so far, and the time."""
        return self.observer.counts() + Counter(seconds=time.perf_counter())

    def rows(self, layers: int) -> dict[str, dict[str, float]]:
        """Return the counts of each phase for one token, mini-batch or step."""
        rows = {}
        for name, counts in self.counts.items():
            times = self.longest if name == "a decoded token" else self.times[name]
            row = {key: counts[key] / times for key in ("waits", "launches", "pageable", "pinned")}
            rows[name] = row | {
                "per_layer": row["launches"] / layers,
                "ms": 1e3 * self.seconds[name] / times,
            }
        return rows


def trained(case: str, device: str, observer=None) -> dict:
    """Train a case for some steps; return tokens, log-probs of the engine, gradients, held-out
    rewards, and phases.
    """
    settings = settings_of(case, device)
    trainer = build_trainer(settings)
    # with overlap a rollout is counted in whichever phase it falls
    phases = Phases(trainer, observer) if observer and not settings.rollout.overlap else None
    tokens, rewards = [], []
    next_rollout = phases.rollout if phases else trainer.source.next
    with recorded_gradients() as gradients:
        for step in range(1, 1 + (STEPS if case in SHOWN else 1)):
            rollout = next_rollout(step)
            tokens.append([r.token_ids for r in rollout.responses])
            metrics = trainer.train_step(step, rollout)
            rewards.append(metrics["reward/mean"])
    result = {
        "tokens": tokens,
        "rewards": rewards,
        "gradients": [[g.detach().cpu().double() for g in update] for update in gradients],
        "held_out": held_out(trainer, settings) if case == "episodes" else {},
    }
    rows = phases.rows(settings.model.layers) if phases else {}
    if case == "MoE" and phases:
        result |= resumed(trainer, settings, phases)
        rows["checkpoint"] = phases.rows(settings.model.layers)["checkpoint"]
    trainer.source.close()
    return result | {"phases": rows}


def held_out(trainer: Trainer, settings: Settings) -> dict[str, float]:
    """Return the metrics of a few held-out problems."""
    engine = evaluation_engine(trainer, settings)
    metrics, _ = evaluate(
        engine, settings.task, settings.evaluation, settings.rollout.longest_limit, STEPS
    )
    return metrics


def resumed(trainer: Trainer, settings: Settings, phases: Phases) -> dict:
    """Save a checkpoint, go on for a step, go on from the checkpoint for the same step, and return
    whether the weights are the same."""
    with tempfile.TemporaryDirectory() as folder:
        writer = checkpoint_writer(Path(folder), trainer, settings)
        trainer.state.source = trainer.source.state()
        phases.within("checkpoint", writer.save, trainer.state)
        writer.wait()
        step = trainer.state.step + 1
        again = build_trainer(settings, latest_checkpoint(Path(folder)))
        ends = []
        for one in (trainer, again):
            one.train_step(step, one.source.next(step))
            ends.append([p.detach().cpu().clone() for p in one.policy.parameters()])
        writer.close()
        again.source.close()
    return {"resumed": all(torch.equal(a, b) for a, b in zip(*ends, strict=True))}


def compared(case: str) -> dict:
    """Train a case on the CPU and on the second device, and compare them."""
    import simulated_device as simulated

    wanted = trained(case, "cpu")
    with simulated.Observer() as observer:
        found = trained(case, simulated.NAME, observer)
    pairs = [
        (a, b)
        for one, other in zip(found["gradients"], wanted["gradients"], strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    largest = max(float(b.abs().max()) for _, b in pairs)
    return {
        "same_tokens": found["tokens"] == wanted["tokens"],
        "same_rewards": found["rewards"] == wanted["rewards"],
        "updates": len(found["gradients"]),
        "largest_gradient": largest,
        "off": max(float((a - b).abs().max()) for a, b in pairs) / largest,
        "resumed": found.get("resumed"),
        "held_out": [found["held_out"], wanted["held_out"]],
        "phases": found["phases"],
        "waits": dict(observer.waits),
        "pageable": dict(observer.pageable),
    }


def table(found: dict[str, dict]) -> str:
    """Return waits, launches and copies by phase as text."""
    head = f"{'':<40}{'waits':>8}{'launches':>10}{'per layer':>11}{'pageable':>10}{'pinned':>8}{'host ms':>9}"
    lines = [head]
    for case, result in found.items():
        lines += [
            f"{f'{case}: {phase}':<40}{row['waits']:>8.2f}{row['launches']:>10.0f}{row['per_layer']:>11.1f}"
            f"{row['pageable']:>10.1f}{row['pinned']:>8.1f}{row['ms']:>9.1f}"
            for phase, row in result["phases"].items()
        ]
    return "\n".join(lines)


def main() -> None:
    """Print the table, or with --json all comparisons. Cases that are named are run alone."""
    torch.set_num_threads(1)
    as_json = "--json" in sys.argv
    named = [word for word in sys.argv[1:] if word in CASES]
    found = {case: compared(case) for case in named or (CASES if as_json else SHOWN)}
    if as_json:
        print(json.dumps(found))
        return
    print(table(found))
    for case, result in found.items():
        print(f"\n{case}: places of waits")
        for place, count in sorted(result["waits"].items(), key=lambda item: -item[1]):
            print(f"{count:>6}  {place}")


if __name__ == "__main__":
    main()
