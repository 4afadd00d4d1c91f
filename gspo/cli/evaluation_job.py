"""What `gspo evaluate` does once its settings are in order: it opens the run or the model, samples,
and reports.
"""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gspo.config.commands import EvaluateCommand
from gspo.evaluation.comparison import (
    check_same_problems,
    compared,
    comparison_table,
    prompts_of,
    read_finished,
)
from gspo.evaluation.evaluate import EvaluationSet, as_metrics, load_evaluation_sets, with_room
from gspo.evaluation.progress import Bar
from gspo.evaluation.resumable import (
    WRITTEN,
    Folder,
    describe,
    digest,
    evaluate_into,
    fingerprint,
    table,
)
from gspo.io import ownership
from gspo.io.files import refuse_links
from gspo.model.chat.prompts import PromptFormat
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling
from gspo.rollout.engines.vllm import installed_version
from gspo.rollout.settings import RolloutSettings, engine_record
from gspo.run.build import (
    check_engine_start,
    local_engine,
    make_engine,
    print_sandbox_layers,
)
from gspo.run.code_state import code_state
from gspo.run.directory import SETTINGS, exclusive, settings_and_checkpoint
from gspo.run.entry_point import Ended
from gspo.run.policies import open_policy, usable_device
from gspo.tasks.base import Task
from gspo.tracking.settings import TrackingSettings
from gspo.tracking.wandb_choice import EVALUATION, OF_WANDB, About, chosen_mode, server_run
from gspo.train.checkpoint_files import read_state

# tokens of a response where neither the command nor the benchmark nor a run says how many
LONGEST = 2048
TRUNCATED = 0.2  # a remark is printed when a larger share of a set's responses is cut off


@dataclass
class Subject:
    """What is evaluated, and on what."""

    engine: Engine
    # its part of the evaluation's settings, with the precision that it is sampled in
    identity: dict
    why: str  # why this precision is used, or by which engine, in words
    sets: list[EvaluationSet]
    step: int  # the step of training, 0 for a model
    name: str  # the name by which the user calls it
    folder: str  # the result's folder without its hash
    # what W&B is told: the settings, the study and the tags of the run, and the project that it is
    # in
    config: dict = field(default_factory=dict)
    study: str = ""
    tags: list[str] = field(default_factory=list)
    place: TrackingSettings = field(default_factory=TrackingSettings)
    checkpoint: Path | None = None


def evaluate_subject(command: EvaluateCommand) -> None:
    """Evaluate what the command names."""
    device = usable_device(command.device, "device")
    subject = of_run(command) if command.run else of_model(command, device)
    with closing(subject.engine):
        print_sandbox_layers(
            {name: state for s in subject.sets for name, state in s.task.ready().items()}
        )
        try:
            evaluate(command, subject)
        finally:
            for evaluation_set in subject.sets:
                evaluation_set.task.close()


def evaluate(command: EvaluateCommand, subject: Subject) -> None:
    """Sample what the result's folder does not hold yet, write the numbers, and print them."""
    sets = (
        subject.sets
        if command.max_new_tokens
        else [within_positions(s, subject.engine) for s in subject.sets]
    )
    sets = [with_room(s, subject.engine, s.limit) for s in sets]
    base = read_finished(command.against) if command.against else None
    if base:
        check_same_problems(base, prompts_of(sets), subject.name)
    settings = settings_of(command, subject, sets)
    path = Path(command.out or f"{subject.folder}-{digest(settings)}")
    with exclusive(path, (*WRITTEN, *OF_WANDB)):
        folder = Folder(path, settings)
        try:
            results = sample(command, subject, sets, folder)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on from what is in {path}", file=sys.stderr)
            sys.exit(130)
        except EngineEnded as error:
            raise Ended(f"{error}; the same command goes on from what is in {path}") from error
        code = {
            key: value
            for key, value in code_state().items()
            if key in ("commit", "python", "versions")
        }
        if command.rollout and command.rollout.name == "vllm":
            code["versions"] |= {"vllm": installed_version()}
        written = folder.finish(results, code)
        comparison = compared(base, read_finished(path)) if base else None
        if comparison:
            folder.finish(results, code, comparison)
        upload = track(command, subject, settings, results, path, code)
    print(
        f"{subject.name}: {command.k} samples a problem at temperature {command.temperature:g}, "
        + "".join(f"{rule} {value:g}, " for rule, value in command.rules.items())
        + f"computed in {subject.identity['dtype']}{subject.why}"
    )
    print(table(results, command.k))
    for warning in cut_short(results, subject.sets):
        print(f"warning: {warning}", file=sys.stderr)
    if comparison:
        print(comparison_table(comparison))
    print(
        f"numbers in {written}, responses beside it"
        + (f"; to upload them: {upload}" if upload else "")
    )


def settings_of(command: EvaluateCommand, subject: Subject, sets: list[EvaluationSet]) -> dict:
    """Return the settings that the numbers depend on. They name the result's folder, and an
    evaluation that goes on must have the same."""
    policy = subject.engine.policy
    return {
        **subject.identity,
        "weights": fingerprint(policy.model),
        "prompt": asdict(policy.prompts) | {"used": policy.prompt_format_used},
        "samples": command.k,
        "temperature": command.temperature,
        **command.rules,
        **({"stop": command.stop} if command.stop else {}),
        "max_new_tokens": {s.name: s.limit for s in sets},
        "seed": command.seed,
        "sets": {s.name: describe(s) for s in sets},
    }


def track(
    command: EvaluateCommand,
    subject: Subject,
    settings: dict,
    results: dict[str, dict],
    folder: Path,
    code: dict,
) -> str | None:
    """Show the numbers in W&B, if that is asked for, as a run of the job type "eval" in the group
    of the evaluated run.

    The id of the W&B run is a function of the study and of all that the numbers depend on, so the
    same command always writes the same one. Returns the command that uploads it, None if there is
    nothing to upload."""
    mode = chosen_mode(command.wandb)
    if mode == "disabled":
        return None
    what = subject.identity.get("run") or Path(subject.name).name
    about = About(
        subject.config | {"evaluated": settings | {"checkpoint": str(subject.checkpoint or "")}},
        subject.study,
        subject.tags,
        job_type="eval",
        name=f"{what}-{folder.name}" if subject.checkpoint else folder.name,
        id=f"eval-{digest([subject.study, settings])}",
        record={"commit": code["commit"]},
    )
    from gspo.tracking.wandb_run import WandbRun  # it imports W&B

    tracked = WandbRun(folder, subject.place, mode, about)
    if subject.checkpoint:
        tracked.lineage.used(subject.checkpoint, what, (subject.checkpoint.name,))
    row: dict[str, float] = {"step": subject.step}
    for name, result in results.items():
        row |= as_metrics(name, result) | {
            f"eval/{name}/prompt_too_long": float(result["prompt_too_long"])
        }
    tracked.send(row, [])
    tracked.lineage.made(folder, f"{what}-evaluation", EVALUATION, (folder.name,))
    return tracked.finish(0)


def within_positions(whole: EvaluationSet, engine: Engine) -> EvaluationSet:
    """Return the set with as much of its own response length as the model has positions for beside
    the longest prompt, but at least half of the positions, so that one long prompt does not shorten
    all responses. Prints a remark where that is less."""
    room = engine.room(whole.problems, whole.limit)
    if room == whole.limit:
        return whole
    limit = min(whole.limit, max(room, engine.positions // 2))
    print(
        f"{whole.name}: up to {limit} response tokens in place of {whole.limit}: {engine.positions} positions"
    )
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


def sample(
    command: EvaluateCommand, subject: Subject, sets: list[EvaluationSet], folder: Folder
) -> dict[str, dict]:
    """Sample, score and summarise, with a progress bar."""
    sampling = Sampling(
        command.temperature,
        stop=tuple(command.stop),
        top_p=command.top_p,
        top_k=command.top_k,
        min_p=command.min_p,
    )
    requests = [s.request(command.k, sampling, subject.step, command.seed) for s in sets]
    with closing(Bar(sum(len(s.problems) for s in sets))) as bar:
        return evaluate_into(folder, subject.engine, sets, requests, bar)


def of_run(command: EvaluateCommand) -> Subject:
    """Return a run's checkpoint as the subject, on benchmarks or on its own task, in the precision
    of the run's own evaluations."""
    if not command.out:
        refuse_links(Path(command.run), ("evaluations",))
    settings, checkpoint = settings_and_checkpoint(
        command.run,
        command.step,
        command.allow_weak_sandbox,
        command.allow_outside_code,
        command.addresses,
    )
    own = {settings.task.name: settings.task}
    sets = all_sets(command, command.tasks or own, settings.rollout.longest_limit)
    if command.prompt != PromptFormat():
        settings.prompt = command.prompt
    if command.device != "auto":
        settings.policy.device = command.device
    command.stop = command.stop or settings.rollout.stop
    rollout = command.rollout or settings.rollout
    if command.rollout:
        check_engine_start(rollout, settings.model)
    policy = open_policy(settings, checkpoint, on_cold_start_step=lambda *_: None)
    policy.stop_at(command.stop, "stop")
    step = read_state(checkpoint)["step"] if checkpoint else 0
    identity = {"run": Path(command.run).resolve().name, "step": step, "dtype": rollout.dtype}
    folder, name = f"{command.run}/evaluations/step_{step:06d}", f"{command.run}, step {step}"
    place = TrackingSettings()
    if ownership.is_own_file(Path(command.run) / SETTINGS):
        entity, project, _ = server_run(Path(command.run))
        place.entity, place.project = (
            entity or settings.tracking.entity,
            project or settings.tracking.project,
        )
    about = asdict(settings), settings.study, settings.tags(), place, checkpoint
    if command.rollout:
        return Subject(
            *with_engine(policy, rollout, command.stop, identity), sets, step, name, folder, *about
        )
    why = " as during training (rollout.dtype)"
    if rollout.name != "local":
        why = f" (rollout.dtype); during training by {rollout.name}, whose sums round otherwise"
    engine = local_engine(policy, rollout, command.batch_rows)
    return Subject(engine, identity, why, sets, step, name, folder, *about)


def of_model(command: EvaluateCommand, device: str) -> Subject:
    """Return a model as the subject, on benchmarks."""
    sets, rollout = all_sets(command, command.tasks), command.rollout
    if rollout:
        check_engine_start(rollout, command.model)
    model, tokenizer = command.model.make()
    policy = Policy(model.to(device), tokenizer, prompts=command.prompt)
    policy.stop_at(command.stop, "stop")
    identity = {"model": asdict(command.model), "dtype": rollout.dtype if rollout else "float32"}
    name = getattr(command.model, "path", command.model.name)
    folder = f"runs/evaluations/{Path(name).name}"
    about = {"config": {"model": asdict(command.model)}, "tags": [command.model.name]}
    if rollout:
        return Subject(
            *with_engine(policy, rollout, command.stop, identity), sets, 0, name, folder, **about
        )
    return Subject(
        LocalEngine(policy, command.batch_rows or 256), identity, "", sets, 0, name, folder, **about
    )


def with_engine(
    policy: Policy, rollout: RolloutSettings, stop: list[str], identity: dict
) -> tuple[Engine, dict, str]:
    """Start the engine that rollout=... names; it is told of the stop strings, so that it can end
    responses itself. Returns it, the identity with what is recorded of it, and the words for it."""
    engine = make_engine(policy, replace(rollout, stop=stop))
    return (
        engine,
        identity | {"engine": engine_record(rollout, engine.positions)},
        f" by {rollout.name}",
    )


def all_sets(
    command: EvaluateCommand, tasks: dict[str, Task], limit: int = LONGEST
) -> list[EvaluationSet]:
    """Return the chosen sets of all tasks, each with its response limit: the command's, the
    benchmark's own, or `limit`.

    Raises ValueError for a set that no task has, or that two tasks have.
    """
    available = [name for task in tasks.values() for name in task.evaluation_sets()]
    unknown = [name for name in command.sets if name not in available]
    if unknown:
        raise ValueError(
            f"sets=[{unknown[0]}]: there is no such set; there are {', '.join(available)}"
        )
    twice = [name for name in available if available.count(name) > 1]
    if twice:
        raise ValueError(f"benchmark={list(tasks)}: more than one of them has the set {twice[0]}")
    sets = []
    for task in tasks.values():
        names = [
            name for name in task.evaluation_sets() if not command.sets or name in command.sets
        ]
        if names:
            own = command.max_new_tokens or task.max_new_tokens or limit
            found = load_evaluation_sets(task, names, command.problems or None, command.seed)
            sets += [replace(evaluation_set, limit=own) for evaluation_set in found]
        if words := task.left_out_of_evaluation():
            print(words)
    return sets
