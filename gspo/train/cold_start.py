"""The cold start: supervised training on demonstrations, so that reinforcement learning has
something to improve.

The paper starts from a fine-tuned "cold-start model" (arXiv:2507.18071, section 5.1). Here
demonstrations contain wrong steps at a set rate, so that the model learns the format and most of
the skill but answers only about half of the problems. The result is a normal model folder, named by
the hash of everything it depends on. It is made only once, also when several runs of a sweep need
it at the same time. All seeds of a study start from it, so it is written as carefully as a
checkpoint, with checksums and a rename at the end, and checked each time it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.data.batch import TrainBatch, layout
from gspo.data.samples import Problem
from gspo.data.seeding import generator
from gspo.io.files import append_to, sync
from gspo.io.ranges import as_hashed
from gspo.io.untrusted import read_json
from gspo.model.chat.conversation import Conversation
from gspo.model.chat.prompts import PromptFormat
from gspo.model.loading import save
from gspo.model.policy import Policy
from gspo.model.settings import ModelSettings
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.episodes.beginning import prompt_text
from gspo.rollout.scoring import sample, score
from gspo.tasks.base import Task
from gspo.tasks.environments.player import EnvironmentFailed, Player, all_closed
from gspo.tasks.environments.protocol import EnvironmentTask
from gspo.train.checkpoint_files import damage, seal
from gspo.train.settings import ColdStartSettings

RECORD = "cold_start.json"
# the reward recorded with a cold start is the mean over this many problems, with responses of at
# most this many tokens
CHECKED_PROBLEMS, CHECKED_TOKENS = 512, 128
# of the squared distance from cold_start.log_normalizer, beside nats per token
NORMALIZER_WEIGHT = 1e-3


def cold_start(
    model: ModelSettings,
    task: Task,
    settings: ColdStartSettings,
    cache: Path,
    on_step: Callable[[int, int, float], None],
    device: str = "cpu",
    prompts: PromptFormat | None = None,
) -> Path:
    """Return the folder of the cold-started model in `cache`, which is trained first if it does not
    exist yet.

    `on_step(step, steps, loss)` is called after each supervised step. Raises ValueError if the
    folder is damaged.
    """
    prompts = prompts or PromptFormat()
    folder = folder_of(model, task, settings, cache, prompts)
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with append_to(folder.with_suffix(".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits here until the first has made it
            if not folder.exists():
                _make(model, task, settings, prompts, folder, on_step, device)
    if problem := damage(folder):
        raise ValueError(
            f"the cold start {folder} is damaged: {problem}; remove it, and it is made anew"
        )
    return folder


def folder_of(
    model: ModelSettings,
    task: Task,
    settings: ColdStartSettings,
    cache: Path,
    prompts: PromptFormat,
) -> Path:
    """Return the folder that the cold start has, or will have, in `cache`."""
    key = json.dumps([as_hashed(part) for part in (model, task, settings, prompts)], sort_keys=True)
    return cache / f"{model.name}-{task.name}-{hashlib.sha256(key.encode()).hexdigest()[:10]}"


def _make(
    model: ModelSettings,
    task: Task,
    settings: ColdStartSettings,
    prompts: PromptFormat,
    folder: Path,
    on_step: Callable[[int, int, float], None],
    device: str,
) -> None:
    """Train the model into an unfinished folder, then rename it.

    The untrained model is written there first: if the disk is full, this shows before the training.
    """
    unfinished = folder.with_suffix(".unfinished")
    if unfinished.exists():  # left by a process that was killed
        shutil.rmtree(unfinished)
    network, tokenizer = model.make()
    unfinished.mkdir()
    try:
        save(network, tokenizer, unfinished)
        started = time.perf_counter()
        # On a GPU experts in float32 are multiplied one by one, and each is waited for.
        precision = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        policy = Policy(network.to(device), tokenizer, prompts=prompts, precision=precision)
        losses = _train(policy, task, settings, on_step)
        save(network, tokenizer, unfinished)
        record = {
            "settings": [asdict(group) for group in (model, task, settings, prompts)],
            "seconds": time.perf_counter() - started,
            "reward": sampled_reward(policy, task, settings.seed),
            "losses": losses[::10],
        }
        (unfinished / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        seal(unfinished)
        unfinished.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def recorded_reward(folder: Path) -> float:
    """Read the mean reward that was sampled when the cold start was made. Raises ValueError if it
    cannot be read.
    """
    try:
        return float(read_json(folder / RECORD)["reward"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / RECORD} cannot be read ({error}); remove {folder}, and it is made anew"
        ) from None


def _train(
    policy: Policy, task: Task, settings: ColdStartSettings, on_step: Callable
) -> list[float]:
    """Train next-token prediction on the demonstrations and return the loss of every step.

    The optimizer is AdamW; after a linear warm-up the learning rate follows a cosine to zero.
    """
    if not settings.steps:
        return []
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, max(settings.warmup_steps, 1))
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, max(settings.steps - settings.warmup_steps, 1)
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warm_up, decay], [max(settings.warmup_steps, 1)]
    )
    losses = []
    for step in range(settings.steps):
        batch = demonstrations(policy, task, settings, step)
        totals, batch_loss = Totals.of(batch.mask_BT), 0.0
        for micro in batch.split(settings.micro_batch_size):
            logp_BT = policy.forward(micro).logp_BT
            loss = Aggregation("token-mean")(-logp_BT, micro.mask_BT.to(policy.device), totals)
            batch_loss += loss.item()
            if settings.log_normalizer is not None:
                loss = loss + NORMALIZER_WEIGHT * _distance(policy, micro, settings.log_normalizer)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(batch_loss)
        on_step(step + 1, settings.steps, losses[-1])
    return losses


def _distance(policy: Policy, micro: TrainBatch, log_normalizer: float) -> Tensor:
    """Return the mean squared distance of log sum exp(logits) from a number, over the response
    tokens of a micro-batch."""
    micro = micro.to(policy.device)
    logits_BSV = policy.model(
        input_ids=micro.tokens_BS, attention_mask=micro.attention_BS.long()
    ).logits
    predicting_BT = logits_BSV[:, micro.prompt_width - 1 : -1].logsumexp(-1)
    return (predicting_BT[micro.mask_BT] - log_normalizer).square().mean()


def sampled_reward(policy: Policy, task: Task, seed: int) -> float:
    """Sample one response to each of 512 training problems and return the mean reward.

    Reinforcement learning starts from this level.
    """
    problems = [task.problem(seed, "train", i) for i in range(CHECKED_PROBLEMS)]
    engine = LocalEngine(policy)
    sampling = Sampling(max_new_tokens=engine.room(problems, CHECKED_TOKENS))
    groups = sample(engine, task, SamplingRequest(problems, 1, sampling, (seed, "cold start")))
    score(task, [r for group in groups for r in group])
    rewards = [group[0].score.reward for group in groups if group[0].score.reward is not None]
    return sum(rewards) / len(rewards)


def demonstrations(
    policy: Policy, task: Task, settings: ColdStartSettings, step: int
) -> TrainBatch:
    """Build the batch of a supervised step, a pure function of the settings and the step.

    Raises ValueError if a demonstration is longer than the model's positions.
    """
    rows = []
    conversations: dict[str, Conversation] = {}
    for i in range(settings.batch_size):
        index = step * settings.batch_size + i
        problem = task.problem(settings.seed, "cold_start", index)
        rng = generator(settings.seed, "demonstration", index)
        played = task.environments().get(problem.task)
        if played:
            rows.append(_episode(policy, played, problem, settings, rng, conversations))
        else:
            text = task.demonstration(problem, settings.wrong_step_rate, rng)
            rows.append((policy.encode_prompt(problem.prompt), *demonstrated(policy, [text])))
    longest = max(len(prompt_ids) + len(response_ids) for prompt_ids, response_ids, _ in rows)
    if policy.positions and longest > policy.positions:
        raise ValueError(
            f"cold_start.steps={settings.steps}: a demonstration of {longest} tokens exceeds the model's "
            f"{policy.positions} positions; use a model with more of them, or cold_start.steps=0"
        )
    batch = layout([row[:2] for row in rows], policy.pad_id)
    for i, (_, _, own) in enumerate(rows):
        batch.mask_BT[i, : len(own)] &= torch.tensor(own)
    batch.sampled_BT = batch.mask_BT.clone()
    return batch


def _episode(
    policy: Policy,
    task: EnvironmentTask,
    problem: Problem,
    settings: ColdStartSettings,
    rng: random.Random,
    conversations: dict[str, Conversation],
) -> tuple[list[int], list[int], list[bool]]:
    """Return the tokens of a demonstrated episode, as it would be played: the prompt, the turns,
    and which tokens of these are the policy's. What the policy reads first and whose turn an
    observation is, the environment says. Raises ValueError if it fails."""
    position = (settings.seed, "cold_start", problem.task, problem.index, 0)
    player = Player(lambda: task.environment(problem, position), task.step_seconds)
    try:
        beginning = player.finish(player.begin("reset", problem))
        prompt = prompt_text(policy, beginning, policy.positions)
    except EnvironmentFailed as error:
        where = f"problem {problem.index} of task {problem.task!r}"
        raise ValueError(
            f"cold_start.steps={settings.steps}: {where} does not begin: {error}"
        ) from error
    finally:
        all_closed([player.close()])
    if beginning.role not in conversations:
        conversations[beginning.role] = Conversation(
            policy.tokenizer, policy.prompts, policy.stop_ids, beginning.role
        )
    turns = task.demonstrated_turns(problem, settings.wrong_step_rate, rng)
    own = demonstrated(policy, turns, conversations[beginning.role], task.observation_tokens)
    return policy.prompts.encode_written(policy.tokenizer, prompt), *own


def demonstrated(
    policy: Policy, turns: list[str], conversation: Conversation | None = None, most: int = 0
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a demonstration's turns, the policy's and the environment's in turn, and
    which of them are the policy's: each of its turns ends with the end-of-sequence token. Of what
    the environment says `most` tokens are kept, as in an episode."""
    token_ids: list[int] = []
    own: list[bool] = []
    for number, text in enumerate(turns):
        if number % 2:
            new = conversation.reply(text, token_ids[-1], most).token_ids
        else:
            new = [
                *policy.tokenizer(text, add_special_tokens=False)["input_ids"],
                policy.tokenizer.eos_token_id,
            ]
        token_ids += new
        own += [number % 2 == 0] * len(new)
    return token_ids, own
