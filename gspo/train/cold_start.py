"""The cold start: supervised training on demonstrations, before reinforcement learning.

The paper starts from a fine-tuned "cold-start model" (arXiv:2507.18071, section 5.1). Here
demonstrations contain wrong steps at the rate cold_start.wrong_step_rate. The model learns the
format and most of the skill, but answers only a part of the problems correctly. The result is a
normal model folder, named by the hash of everything it depends on. It is trained only once, also if
several runs of a sweep need it at the same time. All seeds of a study start from it, so it is
written as carefully as a checkpoint, with checksums and a rename at the end, and checked each time
it is used.
"""

import fcntl
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.data.batch import TokenBatch
from gspo.data.pack import layout
from gspo.data.problems import Problem
from gspo.data.seeding import generator
from gspo.io.errors import SettingError
from gspo.io.files import append_to, removed_on_error, sync
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
WAIT_S = 0.5  # seconds between two looks at a model that another process trains
# The reward recorded with a cold start is the mean over this many problems.
CHECKED_PROBLEMS = 512
MAX_CHECKED_TOKENS = 128  # of each response to these problems
# the weight in the loss (nats per token) of the squared distance from cold_start.log_normalizer
NORMALIZER_WEIGHT = 1e-3


def cold_start(
    model: ModelSettings,
    task: Task,
    settings: ColdStartSettings,
    cache: Path,
    on_step: Callable[[int, int, float], None],
    *,
    device: str = "cpu",
    prompts: PromptFormat | None = None,
    on_wait: Callable[[float], None] = lambda seconds: None,
) -> Path:
    """Return the folder of the cold-started model in `cache`, and train the model if it is missing.

    `on_step(step, steps, loss)` is called after each supervised step. If another process trains
    the model, this one waits. Then `on_wait(seconds)` is called every WAIT_S seconds, first with 0.
    Raises ValueError if the folder is damaged.
    """
    prompts = prompts or PromptFormat()
    folder = folder_of(model, task, settings, cache, prompts)
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with append_to(folder.with_suffix(".lock")) as lock:
            wait_for_lock(lock, on_wait)
            if not folder.exists():
                _train_into(folder, model, task, settings, prompts, on_step, device)
    problem = damage(folder)
    if problem:
        raise ValueError(
            f"the cold start {folder} is damaged: {problem}; remove it, and it is made anew"
        )
    return folder


def wait_for_lock(file: TextIO, on_wait: Callable[[float], None]) -> None:
    """Lock a file. While another process has locked it, call on_wait(seconds waited so far)."""
    started = time.monotonic()
    waited = 0.0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            on_wait(waited)
            time.sleep(WAIT_S)
            waited = time.monotonic() - started


def folder_of(
    model: ModelSettings,
    task: Task,
    settings: ColdStartSettings,
    cache: Path,
    prompts: PromptFormat,
) -> Path:
    """Return the folder of the cold start in `cache`, whether it exists or not."""
    parts = (model, task, settings, prompts)
    key = json.dumps([as_hashed(part) for part in parts], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return cache / f"{model.name}-{task.name}-{digest[:10]}"


def _train_into(
    folder: Path,
    model: ModelSettings,
    task: Task,
    settings: ColdStartSettings,
    prompts: PromptFormat,
    on_step: Callable[[int, int, float], None],
    device: str,
) -> None:
    """Train the model into an unfinished folder, then rename it.

    The untrained model is written first: a full disk then shows before the training.
    """
    unfinished = folder.with_suffix(".unfinished")
    if unfinished.exists():  # left by a process that was killed
        shutil.rmtree(unfinished)
    network, tokenizer = model.make()
    unfinished.mkdir()
    with removed_on_error(unfinished):
        save(network, tokenizer, unfinished)
        started = time.perf_counter()
        network = network.to(device)
        # On a GPU, experts in float32 are multiplied one by one, and the CPU waits for each.
        precision = torch.bfloat16 if network.device.type == "cuda" else torch.float32
        policy = Policy(network, tokenizer, prompts=prompts, precision=precision)
        losses = _train(policy, task, settings, on_step)  # changes `network`
        save(network, tokenizer, unfinished)
        parts: list[Any] = [model, task, settings, prompts]  # every task is a dataclass
        record = {
            "settings": [asdict(part) for part in parts],
            "seconds": time.perf_counter() - started,
            "reward": sampled_reward(policy, task, settings.seed),
            "losses": losses[::10],
        }
        text = json.dumps(record, indent=1)
        (unfinished / RECORD).write_text(text, encoding="utf-8")
        seal(unfinished)
        unfinished.rename(folder)
        sync(folder.parent)


def recorded_reward(folder: Path) -> float:
    """Return the mean reward recorded with a cold start. Raises ValueError if it cannot be read."""
    try:
        return float(read_json(folder / RECORD)["reward"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / RECORD} cannot be read ({error}); remove {folder}, and it is made anew"
        ) from None


def _train(
    policy: Policy,
    task: Task,
    settings: ColdStartSettings,
    on_step: Callable[[int, int, float], None],
) -> list[float]:
    """Train next-token prediction on the demonstrations and return the loss of every step.

    The optimizer is AdamW. After a linear warm-up the learning rate follows a cosine to zero.
    """
    if not settings.steps:
        return []
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    warmup_steps = max(settings.warmup_steps, 1)
    decay_steps = max(settings.steps - settings.warmup_steps, 1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, warmup_steps)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, decay_steps)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [warmup_steps])
    losses = []
    for step in range(settings.steps):
        batch = demonstrations(policy, task, settings, step)
        totals = Totals.of(batch.mask_BT)
        batch_loss = 0.0
        for micro in batch.split(settings.micro_batch_size):
            logp_BT = policy.forward(micro).logp_BT
            mask_BT = micro.mask_BT.to(policy.device)
            loss = Aggregation("token-mean")(-logp_BT, mask_BT, totals)
            batch_loss += loss.item()
            if settings.log_normalizer is not None:
                distance = _squared_distance(policy, micro, settings.log_normalizer)
                loss = loss + NORMALIZER_WEIGHT * distance / totals.tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(batch_loss)
        on_step(step + 1, settings.steps, batch_loss)
    return losses


def _squared_distance(policy: Policy, micro: TokenBatch, log_normalizer: float) -> Tensor:
    """Return sum_t (log sum exp(logits_t) - log_normalizer)^2 over the response tokens."""
    micro = micro.to(policy.device)
    logits_BSV = policy.model(
        input_ids=micro.tokens_BS, attention_mask=micro.attention_BS.long()
    ).logits
    normalizer_BT = logits_BSV[:, micro.prompt_width - 1 : -1].logsumexp(-1)
    distance_N = normalizer_BT[micro.mask_BT] - log_normalizer
    return distance_N.square().sum()


def sampled_reward(policy: Policy, task: Task, seed: int) -> float:
    """Return the mean reward of one response to each of CHECKED_PROBLEMS training problems.

    Reinforcement learning starts from this level. Raises RuntimeError if none can be graded."""
    problems = [task.problem(seed, "train", i) for i in range(CHECKED_PROBLEMS)]
    engine = LocalEngine(policy)
    sampling = Sampling(max_new_tokens=engine.room(problems, MAX_CHECKED_TOKENS))
    request = SamplingRequest(problems, 1, sampling, (seed, "cold start"))
    groups = sample(engine, task, request)
    responses = list(chain.from_iterable(groups))
    scores = [response.score for response in score(task, responses)]
    rewards = [s.reward for s in scores if s.reward is not None]
    if not rewards:
        reason = scores[0].reason or scores[0].verdict
        raise RuntimeError(f"none of the cold start's responses could be graded: {reason}")
    return sum(rewards) / len(rewards)


@dataclass
class Demonstration:
    """The tokens of a demonstrated response or episode."""

    prompt_ids: list[int]
    token_ids: list[int]
    by_policy: np.ndarray  # bool, for each token, whether the policy writes it


def demonstrations(
    policy: Policy, task: Task, settings: ColdStartSettings, step: int
) -> TokenBatch:
    """Return the batch of a supervised step, a pure function of the settings and the step.

    Raises ValueError if a demonstration is longer than the model's positions.
    """
    batch: list[Demonstration] = []
    conversations: dict[str, Conversation] = {}
    for i in range(settings.batch_size):
        index = step * settings.batch_size + i
        problem = task.problem(settings.seed, "cold_start", index)
        rng = generator(settings.seed, "demonstration", index)
        environment_task = task.environments().get(problem.task)
        if isinstance(environment_task, EnvironmentTask):
            batch.append(_episode(policy, environment_task, problem, settings, rng, conversations))
        else:
            text = task.demonstration(problem, settings.wrong_step_rate, rng)
            prompt_ids = policy.encode_prompt(problem.prompt)
            token_ids = _turn_ids(policy, text)
            by_policy = np.ones(len(token_ids), dtype=bool)
            batch.append(Demonstration(prompt_ids, token_ids, by_policy))
    longest = max(len(d.prompt_ids) + len(d.token_ids) for d in batch)
    if policy.positions and longest > policy.positions:
        raise SettingError(
            "cold_start.steps",
            settings.steps,
            f"a demonstration of {longest} tokens exceeds the model's {policy.positions} positions",
            remedy="use a model with more of them, or cold_start.steps=0",
        )
    return layout(
        [d.prompt_ids for d in batch],
        [d.token_ids for d in batch],
        policy.pad_id,
        [d.by_policy for d in batch],
    )


def _turn_ids(policy: Policy, text: str) -> list[int]:
    """Return the tokens of a turn of the policy, which ends with the end-of-sequence token."""
    token_ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*token_ids, policy.tokenizer.eos_token_id]


def _episode(
    policy: Policy,
    task: EnvironmentTask,
    problem: Problem,
    settings: ColdStartSettings,
    rng: random.Random,
    conversations: dict[str, Conversation],
) -> Demonstration:
    """Return the tokens of a demonstrated episode, as if it were played.

    The environment gives the first messages and the role of its observations. An observation keeps
    its first `task.observation_tokens` tokens, as in an episode. Raises ValueError if the
    environment fails."""
    position = (settings.seed, "cold_start", problem.task, problem.index, 0)
    player = Player(lambda: task.environment(problem, position), task.step_seconds)
    try:
        beginning = player.finish(player.begin("reset", problem))
        prompt = prompt_text(policy, beginning, policy.positions)
    except EnvironmentFailed as error:
        raise SettingError(
            "cold_start.steps",
            settings.steps,
            f"problem {problem.index} of task {problem.task!r} does not begin: {error}",
        ) from error
    finally:
        all_closed([player.close()])
    if beginning.role not in conversations:
        conversations[beginning.role] = Conversation(
            policy.tokenizer, policy.prompts, policy.stop_ids, beginning.role
        )
    conversation = conversations[beginning.role]
    token_ids: list[int] = []
    is_policy: list[bool] = []  # for each turn
    lengths: list[int] = []
    turns = task.demonstrated_turns(problem, settings.wrong_step_rate, rng)
    for number, text in enumerate(turns):
        is_policy.append(number % 2 == 0)
        if is_policy[-1]:
            turn_ids = _turn_ids(policy, text)
        else:
            reply = conversation.reply(text, token_ids[-1], task.observation_tokens)
            turn_ids = reply.token_ids
        token_ids += turn_ids
        lengths.append(len(turn_ids))
    prompt_ids = policy.prompts.encode_written(policy.tokenizer, prompt)
    return Demonstration(prompt_ids, token_ids, np.repeat(is_policy, lengths))
