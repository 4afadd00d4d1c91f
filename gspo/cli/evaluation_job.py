"""Opens the run or the model of `gspo evaluate`, samples responses, and reports the scores."""

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
    table,
    weights_digest,
)
from gspo.io import ownership
from gspo.io.errors import SettingError
from gspo.io.files import SETTINGS_FILE, check_run_directory, refuse_links
from gspo.model.chat.prompts import PromptFormat
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling
from gspo.rollout.engines.vllm import installed_version
from gspo.rollout.settings import RolloutSettings, engine_record
from gspo.rollout.sources.behaviour_logprobs import check_on_prompts
from gspo.run.build import (
    check_engine_start,
    local_engine,
    make_engine,
    print_sandbox_layers,
)
from gspo.run.code_state import code_state
from gspo.run.directory import exclusive, settings_and_checkpoint
from gspo.run.entry_point import Ended
from gspo.run.policies import open_policy, usable_device
from gspo.tasks.base import Task
from gspo.tracking.settings import TrackingSettings
from gspo.tracking.wandb_choice import (
    EVALUATION,
    OF_WANDB,
    About,
    check_variables,
    chosen_mode,
    server_run,
)
from gspo.train.checkpoint_files import read_state

# response tokens if neither the command, nor the benchmark, nor the run sets a limit
DEFAULT_RESPONSE_TOKENS = 2048
MAX_TRUNCATED_SHARE = 0.2  # a larger share of a set's responses prints a warning

# the metrics of one rated set
ELO = ("eval/elo", "eval/elo_stderr")


@dataclass
class Subject:
    """The policy that is evaluated, the sets, and the fields of the result."""

    engine: Engine
    # its part of the evaluation's settings, with the precision of sampling
    identity: dict
    remark: str  # the reason for the precision, or the engine, in words
    sets: list[EvaluationSet]
    step: int  # the step of training, 0 for a model
    name: str  # the user's name for the run or model
    folder: str  # the result's folder without its hash
    # for W&B: the settings, study and tags of the run, and its project
    config: dict = field(default_factory=dict)
    study: str = ""
    tags: list[str] = field(default_factory=list)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    checkpoint: Path | None = None


def evaluate_subject(command: EvaluateCommand) -> None:
    """Evaluate the run or the model that the command names."""
    device = usable_device(command.device, "device")
    subject = subject_of_run(command) if command.run else subject_of_model(command, device)
    with closing(subject.engine):
        layers: dict = {}
        for evaluation_set in subject.sets:
            layers |= evaluation_set.task.ready()
        print_sandbox_layers(layers)
        try:
            evaluate(command, subject)
        finally:
            for evaluation_set in subject.sets:
                evaluation_set.task.close()


def evaluate(command: EvaluateCommand, subject: Subject) -> None:
    """Sample the responses that the result's folder lacks, then write and print the numbers."""
    if command.wandb != "disabled":
        check_variables(subject.tracking)
    sets = subject.sets
    if not command.max_new_tokens:
        sets = [within_positions(s, subject.engine) for s in sets]
    sets = [with_room(s, subject.engine, s.limit) for s in sets]
    if command.rollout:
        check_on_prompts(subject.engine, sets[0].problems, command.rollout)
    base = read_finished(command.against) if command.against else None
    settings = settings_of(command, subject, sets)
    if base:
        check_same_problems(base, prompts_of(sets), settings["sets"], subject.name)
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
    rules = "".join(f"{rule} {value:g}, " for rule, value in command.rules.items())
    print(
        f"{subject.name}: {command.k} samples a problem at temperature {command.temperature:g}, "
        f"{rules}computed in {subject.identity['dtype']}{subject.remark}"
    )
    print(table(results, command.k))
    for warning in cut_short(results, sets, subject.engine.positions):
        print(f"warning: {warning}", file=sys.stderr)
    if comparison:
        print(comparison_table(comparison))
    upload_text = f"; to upload them: {upload}" if upload else ""
    print(f"numbers in {written}, responses beside it{upload_text}")


def settings_of(command: EvaluateCommand, subject: Subject, sets: list[EvaluationSet]) -> dict:
    """Return the settings that the numbers depend on.

    Their hash is part of the name of the result's folder. An evaluation can only be continued with
    the same settings."""
    policy = subject.engine.policy
    settings = subject.identity | {
        "weights": weights_digest(policy.model),
        "prompt": asdict(policy.prompts) | {"used": policy.prompt_format_used},
        "samples": command.k,
        "temperature": command.temperature,
    }
    settings |= command.rules
    if command.stop:
        settings["stop"] = command.stop
    return settings | {
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
    """Record the numbers in W&B, unless it is disabled, and return the command that uploads them.

    They become a W&B run of the job type "eval", in the group of the evaluated run. Its id is a
    function of the study and the settings, so the same command always writes the same W&B run.
    Returns None if there is nothing to upload."""
    mode = chosen_mode(command.wandb)
    if mode == "disabled":
        return None
    subject_name = subject.identity.get("run") or Path(subject.name).name
    about = About(
        subject.config | {"evaluated": settings | {"checkpoint": str(subject.checkpoint or "")}},
        subject.study,
        subject.tags,
        job_type="eval",
        name=f"{subject_name}-{folder.name}" if subject.checkpoint else folder.name,
        id=f"eval-{digest([subject.study, settings])}",
        record={"commit": code["commit"]},
    )
    # it imports W&B
    from gspo.tracking.wandb_run import WandbRun

    wandb_run = WandbRun(folder, subject.tracking, mode, about)
    if subject.checkpoint:
        wandb_run.lineage.record_input(subject.checkpoint, subject_name, (subject.checkpoint.name,))
    row: dict[str, float] = {"step": subject.step}
    rated = [name for name, result in results.items() if result["elo"]]
    if len(rated) > 1:
        print(f"W&B's eval/elo is of {rated[0]}; result.json has the Elo of {', '.join(rated)}")
    for name, result in results.items():
        metrics = as_metrics(name, result)
        if name in rated[1:]:
            metrics = {key: value for key, value in metrics.items() if key not in ELO}
        row |= metrics
        row[f"eval/{name}/prompt_too_long"] = float(result["prompt_too_long"])
    wandb_run.send(row, [])
    wandb_run.lineage.record_output(
        folder, f"{subject_name}-evaluation", EVALUATION, (folder.name,)
    )
    return wandb_run.finish(0)


def within_positions(evaluation_set: EvaluationSet, engine: Engine) -> EvaluationSet:
    """Return the set with its response limit reduced to the positions that the model has.

    The longest prompt and the response must fit together. The limit stays at least half of the
    positions, so that one long prompt does not shorten all responses. A reduced limit is
    printed."""
    if engine.positions is None:
        return evaluation_set
    old_limit = evaluation_set.limit
    room = engine.room(evaluation_set.problems, old_limit)
    limit = min(old_limit, max(room, engine.positions // 2))
    if limit == old_limit:
        return evaluation_set
    print(
        f"{evaluation_set.name}: up to {limit} response tokens in place of {old_limit}: "
        f"{engine.positions} positions"
    )
    return replace(evaluation_set, limit=limit)


def cut_short(
    results: dict[str, dict], sets: list[EvaluationSet], positions: int | None
) -> list[str]:
    """Return warnings about sets in which many responses were truncated.

    `positions` is the number of the model's positions, None without a limit."""
    warnings = []
    for s in sets:
        share = results[s.name]["verdicts"].get("truncated", 0.0)
        if share > MAX_TRUNCATED_SHARE:
            advice = f"set max_new_tokens={2 * s.limit} or more"
            if positions and 2 * s.limit >= positions:
                advice = f"the model has {positions} positions for a prompt and its response"
            consequence = "count as wrong"
            if results[s.name].get("episodes"):
                consequence = "keep the rewards of their turns"
            elif s.task.truncated_reward != 0:
                consequence = f"are graded with reward.truncated={s.task.truncated_reward}"
            warnings.append(
                f"{s.name}: {share:.1%} of the responses were cut off at {s.limit} tokens and "
                f"{consequence}; {advice}"
            )
    return warnings


def sample(
    command: EvaluateCommand, subject: Subject, sets: list[EvaluationSet], folder: Folder
) -> dict[str, dict]:
    """Sample and score the responses, with a progress bar, and return the summary of each set."""
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


def subject_of_run(command: EvaluateCommand) -> Subject:
    """Return a run's checkpoint as the subject, on benchmarks or on the run's task.

    It samples in the precision of the run's own evaluations."""
    check_run_directory(Path(command.run))
    if not command.out:
        refuse_links(Path(command.run), ("evaluations",))
    settings, checkpoint = settings_and_checkpoint(
        command.run,
        command.step,
        command.allow_weak_sandbox,
        command.allow_outside_code,
        command.addresses,
    )
    tasks = command.tasks or {settings.task.name: settings.task}
    sets = all_sets(command, tasks, settings.rollout.longest_limit)
    settings.prompt = command.prompt.applied_to(settings.prompt)
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
    tracking = TrackingSettings()
    if ownership.is_own_file(Path(command.run) / SETTINGS_FILE):
        entity, project, _ = server_run(Path(command.run))
        tracking.entity = entity or settings.tracking.entity
        tracking.project = project or settings.tracking.project
    if command.rollout:
        engine, identity, remark = with_engine(policy, rollout, command.stop, identity)
    else:
        engine = local_engine(policy, rollout, command.batch_rows)
        remark = " as during training (rollout.dtype)"
        if rollout.name != "local":
            remark = (
                f" (rollout.dtype); during training by {rollout.name}, whose sums round otherwise"
            )
    return Subject(
        engine,
        identity,
        remark,
        sets,
        step,
        name=f"{command.run}, step {step}",
        folder=f"{command.run}/evaluations/step_{step:06d}",
        config=asdict(settings),
        study=settings.study,
        tags=settings.tags(),
        tracking=tracking,
        checkpoint=checkpoint,
    )


def subject_of_model(command: EvaluateCommand, device: str) -> Subject:
    """Return a model as the subject, on benchmarks."""
    sets = all_sets(command, command.tasks)
    rollout = command.rollout
    if rollout:
        check_engine_start(rollout, command.model)
    model, tokenizer = command.model.make()
    prompts = command.prompt.applied_to(PromptFormat())
    policy = Policy(model.to(device), tokenizer, prompts=prompts)
    policy.stop_at(command.stop, "stop")
    identity = {"model": asdict(command.model), "dtype": rollout.dtype if rollout else "float32"}
    name = getattr(command.model, "path", command.model.name)
    if rollout:
        engine, identity, remark = with_engine(policy, rollout, command.stop, identity)
    else:
        engine = LocalEngine(policy, command.batch_rows or 256)
        remark = ""
    return Subject(
        engine,
        identity,
        remark,
        sets,
        step=0,
        name=name,
        folder=f"runs/evaluations/{Path(name).name}",
        config={"model": asdict(command.model)},
        tags=[command.model.name],
    )


def with_engine(
    policy: Policy, rollout: RolloutSettings, stop: list[str], identity: dict
) -> tuple[Engine, dict, str]:
    """Start the engine that rollout=... names, and return (engine, identity, remark).

    The engine gets the stop strings, so that it can end responses itself. The identity has the
    engine's record, and the remark names the engine."""
    engine = make_engine(policy, replace(rollout, stop=stop))
    identity = identity | {"engine": engine_record(rollout, engine.positions)}
    return engine, identity, f" by {rollout.name}"


def all_sets(
    command: EvaluateCommand, tasks: dict[str, Task], limit: int = DEFAULT_RESPONSE_TOKENS
) -> list[EvaluationSet]:
    """Return the chosen sets of all tasks, each with its response limit.

    The limit is max_new_tokens of the command, else of the benchmark, else `limit`. Raises
    ValueError for a set that no task has, or that two tasks have."""
    available = [name for task in tasks.values() for name in task.evaluation_sets()]
    unknown = [name for name in command.sets if name not in available]
    if unknown:
        raise SettingError(
            "sets", unknown[:1], f"there is no such set; there are {', '.join(available)}"
        )
    repeated = [name for name in available if available.count(name) > 1]
    if repeated:
        raise SettingError(
            "benchmark", list(tasks), f"more than one of them has the set {repeated[0]}"
        )
    sets: list[EvaluationSet] = []
    for task in tasks.values():
        names = [
            name for name in task.evaluation_sets() if not command.sets or name in command.sets
        ]
        if names:
            task_limit = command.max_new_tokens or task.max_new_tokens or limit
            task_sets = load_evaluation_sets(task, names, command.problems or None, command.seed)
            sets += [replace(evaluation_set, limit=task_limit) for evaluation_set in task_sets]
        left_out = task.left_out_of_evaluation()
        if left_out:
            print(left_out)
    return sets
