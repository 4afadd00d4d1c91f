r"""Judges the answer of a response, in \boxed{} or after #### or "Answer:", against a gold.

Numbers, lists of numbers, texts and choices are settled here, in microseconds. Other formulas go to
workers, which are processes of their own (worker.py). They start with the first formula, and
others replace them when they end. Verdicts:

correct, wrong
no-answer    there is no box (####, "Answer:"), or it is empty
malformed    a box that is not closed, more boxes in it, more than 300 characters, look-alike or
             invisible characters
timeout      the comparison used up its CPU seconds or its memory (later the cache answers it)
unreadable-gold   the gold is empty, or cannot be parsed: no fault of the response, which is left
                  ungraded

The rules of judgement are in gspo/rewards/math/agree.py.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path

from gspo.rewards.child_process import ChildProcess, ProcessOwner, bare_environment, start_child
from gspo.rewards.math.agree import agree
from gspo.rewards.math.extract import (
    FORMS,
    MAX_RESPONSE_CHARS,
    UnusableAnswer,
    extract,
    listed_boxes,
    normal,
)
from gspo.rewards.math.text import Node, TooManyElements, spelling, structure

WORKER = Path(__file__).with_name("worker.py")
# A question's CPU time as a share of `seconds`. The rest is for ending the worker and starting the
# next.
CPU_SHARE = 0.4
HANG_FACTOR = 4  # a worker that uses no CPU time for this many times `seconds` hangs

Question = tuple[str, str, str]  # kind, gold, answer


@dataclass(frozen=True)
class MathVerdict:
    """The verdict on an answer. `answer` is its normal form, "" if there is none."""

    verdict: str
    answer: str = ""


class _NeedsWorker(Exception):
    """Raised with a question that only a worker can answer."""


class _UnreadableGold(Exception):
    """Raised for a question whose gold cannot be parsed."""


class _Unsettled(Exception):
    """Raised for a question whose worker ran out of CPU time or memory."""


@dataclass
class MathVerifier(ProcessOwner):
    """A judge of answers of one form, with up to `workers` workers.

    A forked or unpickled copy starts workers of its own. Threads may share a verifier and take
    turns.
    """

    form: str = "boxed"  # boxed | hash (GSM8K's ####) | answer ("Answer: ...")
    workers: int = 1
    # an idle machine judges an answer within these, and its CPU limit is 0.4 of them
    seconds: float = 5.0
    memory_mb: int = 2048  # the address space of a worker
    cache: int = 65536  # number of comparisons that are remembered

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form={self.form!r} must be one of {', '.join(FORMS)}")
        for key, minimum in (("workers", 1), ("memory_mb", 256), ("cache", 1)):
            if getattr(self, key) < minimum:
                raise ValueError(f"{key}={getattr(self, key)!r} must be at least {minimum}")
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds!r} must be positive")
        super().__post_init__()

    def verify(self, items: list[tuple[str, str]]) -> list[MathVerdict]:
        """Return the verdicts in the order of `items` = (response text, gold)."""
        self._renew_copy()
        verdicts = {}  # by the index of the item
        undecided = {}  # gold and answer, by the index of the item
        for index, (text, gold) in enumerate(items):
            nodes_or_verdict = _read(text[-MAX_RESPONSE_CHARS:], gold, self.form)
            if isinstance(nodes_or_verdict, MathVerdict):
                verdicts[index] = nodes_or_verdict
            else:
                undecided[index] = nodes_or_verdict
        with self._lock:
            while undecided:  # each round settles one more question of every undecided answer
                questions = {}  # a dict keeps the order and holds each once
                for index, (gold_node, answer_node) in undecided.items():
                    try:
                        verdicts[index] = self._judge(gold_node, answer_node)
                    except _NeedsWorker as need:
                        questions[need.args[0]] = None
                try:
                    self._ask_workers(list(questions))
                # after Ctrl-C a worker that still computes would answer the next question with this
                # result
                except BaseException:
                    for worker in self._pool:
                        worker.stop()
                    raise
                undecided = {
                    index: nodes for index, nodes in undecided.items() if index not in verdicts
                }
            # only now, since answers that this call uses may not be forgotten before it ends
            while len(self._answers) > self.cache:
                self._answers.popitem(last=False)
        return [verdicts[index] for index in range(len(items))]

    def _stop(self) -> None:
        with self._lock:
            for worker in self._pool:
                worker.stop()

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers that were started and not stopped."""
        return [worker.running.process.pid for worker in self._pool if worker.running]

    def _start_over(self) -> None:
        super()._start_over()
        self._lock = threading.Lock()
        # an answer is True, False, "gold", "timeout" or "lost", as in _Worker.receive
        self._answers: OrderedDict[Question, bool | str] = OrderedDict()
        self._pool = [_Worker(self.seconds, self.memory_mb) for _ in range(self.workers)]

    def _judge(self, gold: Node, answer: Node) -> MathVerdict:
        """Return the verdict by the answers so far. Raises _NeedsWorker if it needs another."""
        try:
            verdict = "correct" if agree(gold, answer, self._known_answer) else "wrong"
        except _Unsettled:
            verdict = "timeout"
        except _UnreadableGold:
            verdict = "unreadable-gold"
        return MathVerdict(verdict, spelling(answer))

    def _known_answer(self, kind: str, gold: str, other: str) -> bool:
        """Return the answer to a question.

        Raises _NeedsWorker if there is none yet, _Unsettled if there can be none, and
        _UnreadableGold if its gold cannot be parsed."""
        question = (kind, gold, other)
        if question not in self._answers:
            raise _NeedsWorker(question)
        self._answers.move_to_end(question)
        answer = self._answers[question]
        if answer == "gold":
            raise _UnreadableGold
        if isinstance(answer, str):
            raise _Unsettled
        return answer

    def _ask_workers(self, questions: list[Question]) -> None:
        """Keep the workers busy until every question has an answer.

        The question of a lost worker is asked once more.
        """
        waiting = deque(questions)
        retried = set()
        idle = list(self._pool)
        running = {}
        while waiting or running:
            while waiting and idle:
                worker = idle.pop()
                question = waiting.popleft()
                worker.send(question)
                running[worker] = question
            for worker in _ready(list(running)):
                question = running.pop(worker)
                idle.append(worker)
                answer = worker.receive()
                if answer == "lost" and question not in retried:
                    retried.add(question)
                    waiting.append(question)
                else:
                    self._answers[question] = answer


def _read(text: str, gold: str, form: str) -> MathVerdict | tuple[Node, Node]:
    """Return the pieces of gold and answer, or the verdict if there is nothing to compare."""
    gold_node = gold_structure(gold)
    if gold_node is None:
        return MathVerdict("unreadable-gold")
    try:
        answer = normal(extract(text, form))
        if not answer:
            return MathVerdict("no-answer")
        contents = listed_boxes(text) if form == "boxed" else []
        boxes = [structure(normal(content)) for content in contents]
        answer_node = structure(answer)
    except UnusableAnswer as error:
        return MathVerdict(str(error))
    except TooManyElements:
        return MathVerdict("malformed")
    if boxes:
        answer_node = Node("boxes", answer_node.text, (answer_node, *boxes))
    return gold_node, answer_node


@lru_cache(maxsize=16384)
def gold_structure(gold: str) -> Node | None:
    """Return the pieces of a gold, or None if it has none."""
    try:
        text = normal(extract(gold, "boxed") if "\\boxed" in gold else gold)
        return structure(text) if text else None
    except (UnusableAnswer, TooManyElements):
        return None


@dataclass(eq=False)
class _Worker:
    """A worker process, which is started when it is needed."""

    seconds: float
    memory_mb: int
    running: ChildProcess | None = None
    # its CPU time when that was last seen to change, and the clock at that moment
    cpu: float = 0.0
    cpu_changed: float = 0.0

    def send(self, question: Question) -> None:
        """Hand over a question, and start the worker if it is not running."""
        running = self.running
        if running is None or running.process.poll() is not None:
            self.stop()
            running = self.start()
        self.cpu = 0.0
        self.cpu_changed = time.monotonic()
        # it died just now, and receive() will find the end of its output
        with contextlib.suppress(OSError):
            running.connection.send_bytes(json.dumps(question).encode())

    def receive(self) -> bool | str:
        """Return the worker's answer: true, false or "gold".

        Return "timeout" if the kernel ended it for its CPU time. Return "lost" if it died or hangs
        otherwise, or has no memory left, perhaps because of earlier questions."""
        running = self.started()
        reply = running.receive()
        if reply:
            with contextlib.suppress(ValueError):
                answer = json.loads(reply)
                if answer in (True, False, "gold"):
                    return answer
        timed_out = not reply and not self.hangs() and running.process.wait() == -signal.SIGPROF
        self.stop()
        return "timeout" if timed_out else "lost"

    def hangs(self) -> bool:
        """Return whether it has used no CPU time for long, and so is stopped or waits in vain."""
        cpu = _cpu_time(self.started().process.pid)
        now = time.monotonic()
        if cpu != self.cpu:
            self.cpu = cpu
            self.cpu_changed = now
        return now - self.cpu_changed > HANG_FACTOR * self.seconds

    def started(self) -> ChildProcess:
        """Return the process. Raises RuntimeError if `send` was not called before."""
        if self.running is None:
            raise RuntimeError("the math worker is not running")
        return self.running

    def start(self) -> ChildProcess:
        """Start the worker and wait until it has loaded math-verify.

        Raises RuntimeError if it cannot load it.
        """
        arguments = ["-s", str(WORKER), str(self.memory_mb), str(CPU_SHARE * self.seconds)]
        environment = bare_environment() | {"OMP_NUM_THREADS": "1"}
        running = start_child(arguments, environment, stdout=subprocess.DEVNULL)
        self.running = running
        if running.receive(None) != b"ready":
            status = running.process.wait()
            self.stop()
            raise RuntimeError(
                f"the math worker did not start (exit status {status}): is math-verify installed?"
            )
        return running

    def stop(self) -> None:
        """End the worker, if it is running."""
        if self.running:
            self.running.stop()
        self.running = None


def _ready(workers: list[_Worker]) -> list[_Worker]:
    """Wait until a worker has answered, ended or hangs, and return all such workers."""
    while True:
        readable = wait([worker.started().connection for worker in workers], timeout=0.5)
        ready = [
            worker
            for worker in workers
            if worker.started().connection in readable or worker.hangs()
        ]
        if ready:
            return ready


def _cpu_time(pid: int) -> float:
    """Return the CPU seconds of a process so far, or 0 if the system cannot tell."""
    if sys.platform != "linux":
        return 0.0
    with contextlib.suppress(OSError):
        # the kernel's number for the CPU clock of a process
        return time.clock_gettime((~pid << 3) | 2)
    return -1.0
