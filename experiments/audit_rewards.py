"""What the verifiers of this machine withstand: attacks on the sandbox, hostile answers, and your
own cases.

    python experiments/audit_rewards.py                       # the built-in suites, about a minute
    python experiments/audit_rewards.py pairs=FILE.jsonl      # your answers and golds
    python experiments/audit_rewards.py programs=FILE.jsonl suite=true

A line of `pairs` has "id", "prediction", "gold", "expected" (true, false or null) and "tags". With
the tag "hash" the answer is after ####, else in the last \\boxed{}. A line of `programs` has "id",
"kind" ("function" or "stdin"), "code", "entry_point", "tests" (of "args" and "expected", or of
"stdin" and "expected_stdout"), "expected_verdict" and "also_ok", a list.

Exit code 0 if everything is as expected, 1 if not, 2 if the command or a file is wrong.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from audit import cases
from audit.attacks import SUITE_LIMITS, run_attacks
from audit.cases import CaseResult
from audit.hostile import HOSTILE_RESPONSES, hacks, poisons
from audit.tool import ToolRunner, suite_tool
from gspo.io.arguments import HELP, help_text, option, parsed
from gspo.io.escaping import escape_output
from gspo.rewards.code.grader import CodeGrader
from gspo.rewards.math.verifier import MathVerifier
from gspo.rewards.sandbox.runner import CodeRunner

POISONS = 100  # number of different answers that would keep a naive verifier busy
LONGEST = 5.0  # every hostile answer must be judged within so many seconds


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this script."""

    pairs: str = option("", "a file of answers with their golds")
    programs: str = option("", "a file of programs with their tests")
    suite: bool = option(False, "run the built-in suites too; without files they always run")
    slots: int = option(2, "programs at a time", least=1)
    weak: bool = option(False, "go on if the machine cannot confine programs")
    json: str = option("", "a file for all outcomes")


def main(arguments: list[str]) -> int:
    if HELP & set(arguments):
        print(help_text(Options, __doc__))
        return 0
    try:
        outcomes = run(parsed(Options, arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(outcome.agrees for part in outcomes.values() for outcome in part) else 1


def run(options: Options) -> dict[str, list[CaseResult]]:
    """Run every part that was asked for, and print each when it is done."""
    parts: dict[str, list[CaseResult]] = {}
    if options.suite or not (options.pairs or options.programs):
        runner = CodeRunner(SUITE_LIMITS, slots=1, allow_weak_sandbox=options.weak)
        print("layers of the sandbox")
        for layer, state in runner.layers().items():
            print(f"  {layer:<10}  {state}")
        parts["attacks on the sandbox"] = attacks(runner, "attacks on the sandbox")
        parts["attacks through a tool"] = attacks(
            suite_tool(options.weak), "attacks through the tool of an environment"
        )
        parts["hostile answers"] = hostile(options.slots)
    if options.pairs:
        verifiers = {
            form: MathVerifier(form=form, workers=options.slots) for form in ("boxed", "hash")
        }
        try:
            parts["pairs"] = cases.audit_pairs(Path(options.pairs), verifiers)
        finally:
            for verifier in verifiers.values():
                verifier.close()
        show("pairs", parts["pairs"], table=True)
    if options.programs:
        grader = CodeGrader(slots=options.slots, allow_weak_sandbox=options.weak)
        try:
            parts["programs"] = cases.audit_programs(Path(options.programs), grader)
        finally:
            grader.close()
        show("programs", parts["programs"], table=True)
    if options.json:
        content = {name: [asdict(outcome) for outcome in part] for name, part in parts.items()}
        Path(options.json).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return parts


def attacks(runner: CodeRunner | ToolRunner, title: str) -> list[CaseResult]:
    """Run the suite of attacks on a runner, and close it."""
    try:
        results = run_attacks(runner)
    finally:
        runner.close()
    outcomes = [
        CaseResult(r.name, "stopped", "stopped" if r.stopped else r.seen, r.stopped)
        for r in results
    ]
    show(title, outcomes)
    return outcomes


def hostile(workers: int) -> list[CaseResult]:
    """Judge answers that make other verifiers hang, crash or give in. None may be judged correct,
    nor take long.
    """
    boxed = [*hacks(), *poisons(POISONS)]
    responses = [(f"{answer} for {gold}", rf"\boxed{{{answer}}}", gold) for gold, answer in boxed]
    responses += [
        (f"{len(text)} characters: {text[:20]!r}", text, "7") for text in HOSTILE_RESPONSES
    ]
    verifier = MathVerifier(workers=workers)
    outcomes = []
    slowest = 0.0
    try:
        for name, response, gold in responses:
            started = time.perf_counter()
            verdict = verifier.verify([(response, gold)])[0].verdict
            seconds = time.perf_counter() - started
            slowest = max(slowest, seconds)
            said = verdict if seconds < LONGEST else f"{verdict} after {seconds:.0f} s"
            agrees = seconds < LONGEST and verdict != "correct"
            outcomes.append(CaseResult(name, "not correct", said, agrees))
    finally:
        verifier.close()
    show("hostile answers", outcomes, table=True)
    print(f"the slowest took {slowest:.2f} s")
    return outcomes


def show(title: str, outcomes: list[CaseResult], table: bool = False) -> None:
    bad = cases.disagreements(outcomes)
    print(f"\n{title}: {len(outcomes) - len(bad)} of {len(outcomes)} as expected")
    if table:
        print(cases.confusion(outcomes))
    for outcome in bad if table else outcomes:
        mark = "  " if outcome.agrees else "! "
        tags = f"  [{', '.join(outcome.tags)}]" if outcome.tags else ""
        expected = "" if outcome.agrees else f"  (expected {outcome.expected})"
        print(f"{mark}{outcome.case:<40}{outcome.said}{expected}{tags}")


if __name__ == "__main__":
    escape_output()
    sys.exit(main(sys.argv[1:]))
