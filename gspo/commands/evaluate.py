"""Evaluates a run's checkpoint or any model on held-out sets and benchmarks; prints a table. `--help` says more."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from omegaconf import DictConfig
from tqdm import tqdm

from gspo.commands.option_files import CONF, composed
from gspo.config.commands import EvaluateCommand
from gspo.config.schema import to_dataclass
from gspo.core.files import refuse_links
from gspo.evaluation.evaluate import EvaluationSet, load_evaluation_sets, with_room
from gspo.evaluation.resumable import WRITTEN, Folder, describe, digest, evaluate_into, fingerprint, table
from gspo.model.policy import Policy
from gspo.model.prompts import PromptFormat
from gspo.rollout.engine import LocalEngine
from gspo.rollout.requests import Sampling
from gspo.run.build import local_engine, open_policy, print_sandbox_layers, usable_device
from gspo.run.cli import command_line, one_line
from gspo.run.directory import code_state, exclusive, settings_and_checkpoint
from gspo.tasks.base import Task
from gspo.train.checkpoint import read_state

LONGEST = 2048  # tokens of a response where neither the command nor the benchmark nor a run says how many
TRUNCATED = 0.2  # a remark is printed when a larger share of a set's responses is cut off


@dataclass
class Subject:
    """What is evaluated, and on what."""

    engine: LocalEngine
    sets: list[EvaluationSet]
    step: int  # the step of training, 0 for a model
    identity: dict  # its part of the evaluation's settings, with the precision that it is sampled in
    name: str  # the name by which the user calls it
    folder: str  # the result's folder without its hash
    why: str = ""  # why this precision is used, in words


def main() -> None:
    """Make the evaluation that the command line asks for."""
    command_line(start)


def start() -> None:
    """Compose the settings and evaluate."""
    sys.argv[1:] = with_benchmarks(sys.argv[1:])
    composed("evaluate", job)()


@one_line
def job(config: DictConfig) -> None:
    """Evaluate, print a table, and write the numbers and the responses."""
    find_data(config)
    command: EvaluateCommand = to_dataclass(config)
    for name, task in command.tasks.items():
        task.key = f"tasks.{name}"
    device = usable_device(command.device, "device")
    subject = of_run(command) if command.run else of_model(command, device)
    print_sandbox_layers({name: state for s in subject.sets for name, state in s.task.ready().items()})
    sets = subject.sets if command.max_new_tokens else [within_positions(s, subject.engine) for s in subject.sets]
    policy, sets = subject.engine.policy, [with_room(s, subject.engine, s.limit) for s in sets]
    settings = {
        **subject.identity,
        "weights": fingerprint(policy.model),
        "prompt": asdict(policy.prompts) | {"used": policy.prompt_format_used},
        "samples": command.k,
        "temperature": command.temperature,
        "max_new_tokens": {s.name: s.limit for s in sets},
        "seed": command.seed,
        "sets": {s.name: describe(s) for s in sets},
    }
    path = Path(command.out or f"{subject.folder}-{digest(settings)}")
    with exclusive(path, WRITTEN):
        folder = Folder(path, settings)
        try:
            results = sample(command, subject, sets, folder)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on from what is in {path}", file=sys.stderr)
            sys.exit(130)
        finally:
            for evaluation_set in sets:
                evaluation_set.task.close()
        code = {key: value for key, value in code_state().items() if key in ("commit", "python", "versions")}
        written = folder.finish(results, code)
    print(
        f"{subject.name}: {command.k} samples a problem at temperature {command.temperature:g}, "
        f"computed in {subject.identity['dtype']}{subject.why}"
    )
    print(table(results, command.k))
    for warning in cut_short(results, subject.sets):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"numbers in {written}, responses beside it")


def within_positions(whole: EvaluationSet, engine: LocalEngine) -> EvaluationSet:
    """Return the set with as much of its own response length as the model has positions for beside the longest prompt,
    but at least half of the positions, so that one long prompt does not shorten all responses. Prints a remark where
    that is less."""
    room = engine.room(whole.problems, whole.limit)
    if room == whole.limit:
        return whole
    limit = min(whole.limit, max(room, engine.positions // 2))
    print(f"{whole.name}: up to {limit} response tokens in place of {whole.limit}: {engine.positions} positions")
    return replace(whole, limit=limit)


def cut_short(results: dict[str, dict], sets: list[EvaluationSet]) -> list[str]:
    """Return remarks on sets that a longer limit would score differently."""
    found = []
    for s in sets:
        share = results[s.name]["verdicts"].get("truncated", 0.0)
        if share > TRUNCATED:
            found.append(
                f"{s.name}: {share:.1%} of the responses were cut off at {s.limit} tokens and count as wrong; say "
                f"max_new_tokens={2 * s.limit} or more"
            )
    return found


def find_data(config: DictConfig) -> None:
    """Turn data=DIR into the benchmarks' paths where they are not given: DIR/<name>, or a file DIR/<name>.*.

    Raises ValueError where that changes nothing.
    """
    tasks = {name: task for name, task in config.tasks.items() if isinstance(task, DictConfig)}
    wanting = {name: task for name, task in tasks.items() if task.get("path") == ""}
    if config.data and not wanting:
        raise ValueError(f"data={config.data} is read by none of benchmark={list(config.benchmark)}")
    for name, task in wanting.items() if config.data else ():
        folder = Path(config.data) / name
        files = [] if folder.exists() else sorted(folder.parent.glob(f"{name}.*"))
        task.path = str(files[0] if files else folder)


def sample(command: EvaluateCommand, subject: Subject, sets: list[EvaluationSet], folder: Folder) -> dict[str, dict]:
    """Sample, score and summarise, with a progress bar."""
    sampling, total = Sampling(command.temperature), sum(len(s.problems) for s in sets)
    with tqdm(total=total, unit="problem", dynamic_ncols=True, disable=None) as bar:

        def report(name: str, problems: int, sampled: bool) -> None:
            bar.set_description(name)
            if problems and not sampled:
                bar.write(f"{name}: {problems} problems were there already")
            if not sampled and not bar.disable:
                # they took no time, so they must not count in the estimate of the time that is left
                bar.initial += problems
            bar.update(problems)

        return evaluate_into(
            folder, subject.engine, sets, command.k, sampling, seed=command.seed, step=subject.step, on_progress=report
        )


def of_run(command: EvaluateCommand) -> Subject:
    """Return a run's checkpoint as the subject, on benchmarks or on its own task, in the precision of the run's own
    evaluations."""
    if not command.out:
        refuse_links(Path(command.run), ("evaluations",))
    settings, checkpoint = settings_and_checkpoint(
        command.run, command.step, command.allow_weak_sandbox, command.allow_outside_code
    )
    own = {settings.task.name: settings.task}
    sets = all_sets(command, command.tasks or own, settings.rollout.longest_limit)
    if command.prompt != PromptFormat():
        settings.prompt = command.prompt
    if command.device != "auto":
        settings.policy.device = command.device
    policy = open_policy(settings, checkpoint, on_cold_start_step=lambda *_: None)
    step = read_state(checkpoint)["step"]
    engine = local_engine(policy, settings.rollout, command.batch_rows)
    identity = {"run": Path(command.run).resolve().name, "step": step, "dtype": settings.rollout.dtype}
    folder, name = f"{command.run}/evaluations/step_{step:06d}", f"{command.run}, step {step}"
    why = " as during training (rollout.dtype)"
    if settings.rollout.name != "local":
        why = f" (rollout.dtype); during training by {settings.rollout.name}, whose sums round otherwise"
    return Subject(engine, sets, step, identity, name, folder, why)


def of_model(command: EvaluateCommand, device: str) -> Subject:
    """Return a model as the subject, on benchmarks."""
    sets = all_sets(command, command.tasks)
    model, tokenizer = command.model.make()
    policy = Policy(model.to(device), tokenizer, prompts=command.prompt)
    identity = {"model": asdict(command.model), "dtype": "float32"}
    name = getattr(command.model, "path", command.model.name)
    engine = LocalEngine(policy, command.batch_rows or 256)
    return Subject(engine, sets, 0, identity, name, f"runs/evaluations/{Path(name).name}")


def all_sets(command: EvaluateCommand, tasks: dict[str, Task], limit: int = LONGEST) -> list[EvaluationSet]:
    """Return the chosen sets of all tasks, each with its response limit: the command's, the benchmark's own, or
    `limit`.

    Raises ValueError for a set that no task has, or that two tasks have.
    """
    available = [name for task in tasks.values() for name in task.evaluation_sets()]
    unknown = [name for name in command.sets if name not in available]
    if unknown:
        raise ValueError(f"sets=[{unknown[0]}]: there is no such set; there are {', '.join(available)}")
    twice = [name for name in available if available.count(name) > 1]
    if twice:
        raise ValueError(f"benchmark={list(tasks)}: more than one of them has the set {twice[0]}")
    sets = []
    for task in tasks.values():
        names = [name for name in task.evaluation_sets() if not command.sets or name in command.sets]
        if names:
            own = command.max_new_tokens or task.max_new_tokens or limit
            found = load_evaluation_sets(task, names, command.problems or None, command.seed)
            sets += [replace(evaluation_set, limit=own) for evaluation_set in found]
    return sets


def with_benchmarks(arguments: list[str]) -> list[str]:
    """Return the command line with one option file for each name of benchmark=[...]. `+task@tasks.NAME=NAME` makes
    Hydra put conf/task/NAME.yaml at tasks.NAME, so that it composes, types and refuses tasks.NAME.KEY=... like any
    setting.

    Raises ValueError for a name without an option file.
    """
    result, options = [], sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    for argument in arguments:
        if not argument.startswith("benchmark="):
            result.append(argument)
            continue
        value = OverridesParser.create().parse_override(argument).value()
        names = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
        for name in names:
            if name not in options:
                raise ValueError(f"benchmark={name}: there is no such benchmark; there are {', '.join(options)}")
        result += [f"benchmark=[{','.join(names)}]", *(f"+task@tasks.{name}={name}" for name in names)]
    return result
