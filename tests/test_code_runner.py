"""Programs that cheat, hang, hog and crash, run for real; and what the runner does when its server is killed."""

import json
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gspo.rewards.code_runner import CodeRunner, Program, read_result

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CALLS = [[1], [2], [3]]


@pytest.fixture(scope="module")
def runner():
    with CodeRunner(cpu_seconds=0.2, wall_seconds=0.6, memory_mb=96) as runner:
        yield runner


def function(body: str) -> Program:
    return Program("def f(x):\n" + "\n".join(f" {line}" for line in body.split("\n")), "f", CALLS)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, seconds: float = 3.0) -> bool:
    """Waits for a process to end."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def test_values_come_back_as_plain_data_in_the_order_of_the_programs(runner):
    programs = [
        function("return x*2"),
        function("return [x, 'é', None, True, 1.5]"),
        function("return (x, (x,))"),
        function("return x*2"),
    ]
    values = [result.values for result in runner.run(programs)]
    assert values[0] == values[3] == [2, 4, 6]
    assert json.dumps(values[1][0], ensure_ascii=False) == '[1, "é", null, true, 1.5]'
    assert values[2] == [[1, [1]], [2, [2]], [3, [3]]]
    assert runner.run([]) == []


FAILURES = {
    "timeout": [
        "while True: pass",
        "return 9**9**9",  # one long computation in C, deaf to signals
        "import signal\nfor s in range(1, 30):\n  if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\nwhile 1: pass",
        "while True:\n  try:\n   while True: pass\n  except BaseException: pass",
    ],
    "memory": ["return len([0]*10**10)", "a='a'\nwhile 1: a=a+a", "raise MemoryError"],
    "runtime_error": [
        "return 1//0",
        "return f(x)",
        "import ctypes\nreturn ctypes.string_at(0)",  # a segmentation fault
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise KeyboardInterrupt",
        "import os\nos.kill(os.getpid(), 9)",
        "class E(BaseException):\n  def __str__(self): 1//0\nraise E",
        "return g(x)",
    ],
    "compile_error": ["return (", "return '\0'", "return '\ud800'", "return 1\n  x=2", "return " + "(" * 500],
    "unserialisable": [
        "return {x}",
        "return float('nan')",
        "return 1e999",
        "a=[]\na.append(a)\nreturn a",
        "return 7**5000",
        "return lambda: 1",
        "class I(int):\n  __eq__=lambda s, o: True\n  __hash__=None\nreturn I(x)",
        "class S(str): pass\nreturn [S('a')]",
        "class L(list): pass\nreturn L()",
        "class A:\n  def __eq__(self, o): return True\nreturn A()",
    ],
    "output_limit": ["return 'a'*10**6", "import os\nwhile 1: os.write(3, b'x'*10000)"],
    "protocol": [
        "import os\nfor fd in range(64):\n  try: os.write(fd, b'[\"ok\",[2,4,6]]')\n  except OSError: pass\nreturn x*2",
        "import os\nos.write(3, b'[' * 50000)\nos._exit(0)",  # too deep to parse
        "import os\nos.write(3, b'[\"ok\",[1,2]]')\nos._exit(0)",  # a value too few
        "import os\nos.write(3, b'[\"ok\",[1,2,3,4]]')\nos._exit(0)",
        "import os\nos.write(3, b'[\"ok\",[1,2,NaN]]')\nos._exit(0)",
        "import os\nos.write(3, b'[\"ok\",[1,2,' + b'9'*9000 + b']]')\nos._exit(0)",
        "import os\nos.write(3, b'[\"timeout\",[]]')\nos._exit(0)",  # not the child's to say
        "import os\nos.write(3, b'\\xff\\xfe')\nos._exit(0)",
    ],
}


@pytest.mark.parametrize("status", FAILURES)
def test_failures_are_named_and_the_next_program_runs(runner, status):
    programs = [function(body) for body in FAILURES[status]]
    assert [result.status for result in runner.run(programs)] == [status] * len(programs)
    assert runner.run([function("return x")])[0].values == [1, 2, 3]


def test_recursion_without_a_limit_hits_another(runner):
    (result,) = runner.run([function("import sys\nsys.setrecursionlimit(10**9)\nreturn f(x)")])
    assert result.status in ("timeout", "memory", "runtime_error")


def test_a_program_that_only_waits_is_tried_twice_and_then_timed_out(runner):
    start = time.monotonic()
    assert runner.run([function("import time\ntime.sleep(60)")])[0].status == "timeout"
    assert 2 * 0.6 <= time.monotonic() - start < 10


def test_time_outs_count_cpu_seconds_not_waiting(runner):
    waits = "import time\ntime.sleep(0.12)\nreturn x"  # three calls: 0.36 s, past the CPU limit of 0.2 s
    assert runner.run([function(waits)])[0].values == [1, 2, 3]


def test_prints_and_patched_modules_do_not_reach_the_result(runner):
    flood = "print('[\"ok\",[0,0,0]]'*1000)\nimport sys\nsys.stderr.write('noise')\nreturn x*2"
    patched = "import json\njson.dumps=lambda *a, **k: '[\"ok\", [9, 9, 9]]'\nreturn x*2"
    reads_input = "import sys\nreturn x*2 if sys.stdin.read()=='' else 0"
    statuses = [(result.status, result.values) for result in runner.run([*map(function, (flood, reads_input))])]
    assert statuses == [("ok", [2, 4, 6])] * 2
    # patching json only changes what the program says of itself: a value like any other, which the parent compares
    assert runner.run([function(patched)])[0].values in ([2, 4, 6], [9, 9, 9])


def test_a_program_leaves_nothing_for_the_next(runner):
    leave = "import builtins, math\nbuiltins.left=math.left=1\nreturn x"
    look = "import builtins, math\nreturn hasattr(builtins, 'left') or hasattr(math, 'left')"
    assert [result.values for result in runner.run([function(leave), function(look)])] == [[1, 2, 3], [False] * 3]


def test_children_are_confined(runner):
    forks = (  # at most 20 children, all of which end at once: harmless if the limit fails
        "import os\nmade=0\nfor _ in range(20):\n  try:\n   if os.fork()==0: os._exit(0)\n   made+=1\n"
        "  except OSError: pass\nreturn made"
    )
    files = "try:\n  f=open('/dev/shm/gspo-test','w'); f.write('a'); f.close()\nexcept OSError: return 'refused'"
    inherited = "import os\nreturn [fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')][4:]"
    environment = "import os\nreturn len(os.environ)"
    session = "import os\nreturn os.getsid(0)==os.getpid()"
    limits = "import resource as r\nreturn [r.getrlimit(k)[1] for k in (r.RLIMIT_FSIZE, r.RLIMIT_CORE, r.RLIMIT_NPROC)]"
    programs = [forks, files, inherited, environment, session, limits]
    results = [(result.status, *result.values[:1]) for result in runner.run([function(text) for text in programs])]
    assert results == [("ok", 0), ("ok", "refused"), ("ok", []), ("ok", 0), ("ok", True), ("ok", [0, 0, 0])]
    Path("/dev/shm/gspo-test").unlink(missing_ok=True)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can change its user")
def test_started_by_root_programs_run_as_nobody(runner):
    memory = f"try: open('/proc/{os.getpid()}/mem','rb'); return 'read'\nexcept OSError: return 'refused'"
    user = "import os\nreturn [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()]"
    found = [result.values[0] for result in runner.run([function(memory), function(user)])]
    assert found == ["refused", [65534, 65534, 65534, []]]


def test_a_program_sees_its_own_request_and_no_other(runner):
    secret = 918273645
    other = Program(f"def f(x):\n return {secret}", "f", [[0]])
    # all objects and frames in reach; the number is spelled so that the program itself does not contain it
    look = (
        "import gc, sys\nframe=sys._getframe().f_back\nseen=repr(gc.get_objects())\n"
        "while frame: seen+=repr(frame.f_locals); frame=frame.f_back\n"
        "return [str(x) in seen, ''.join(reversed('546372819')) in seen]"
    )
    results = runner.run([other, replace(function(look), arguments=[[555121]])])
    assert [result.values for result in results] == [[secret], [[True, False]]]


def test_identical_programs_run_once(runner):
    clock = function("import time\nreturn time.monotonic_ns()")
    first, second = runner.run([clock, clock])
    assert first.values == second.values and first.values[0] != runner.run([clock])[0].values[0]


def test_sets_have_the_same_order_in_every_server():
    orders = set()
    for _ in range(3):
        with CodeRunner() as runner:
            orders.add(str(runner.run([function("return list(set('abcdefghij'))")])[0].values))
    assert len(orders) == 1


@LINUX
def test_servers_start_late_restart_when_killed_and_leave_no_process():
    runner = CodeRunner(slots=2)
    assert runner.server_pids() == []
    programs = [function(f"return x+{i}") for i in range(10)]
    assert all(result.status == "ok" for result in runner.run(programs))
    first = runner.server_pids()
    assert len(first) == 2 and all(map(alive, first))
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    assert all(result.status == "ok" for result in runner.run(programs))
    second = runner.server_pids()
    assert not set(first) & set(second)
    runner.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in (*first, *second))  # not even a zombie
    assert runner.run(programs)[3].values == [4, 5, 6]  # usable again
    runner.close()


@LINUX
def test_a_server_killed_mid_way_is_replaced_and_its_program_dies_with_it(tmp_path):
    with CodeRunner(cpu_seconds=5, wall_seconds=10) as runner:
        runner.run([function("return x")])
        killer = os.fork()
        if killer == 0:
            time.sleep(0.3)
            os.kill(runner.server_pids()[0], signal.SIGKILL)
            os._exit(0)
        before = runner.server_pids()
        results = runner.run([function(f"import time\ntime.sleep(0.2)\nreturn {i}") for i in range(2)])
        os.waitpid(killer, 0)
        assert runner.server_pids() != before
        assert [result.values for result in results] == [[0] * 3, [1] * 3]
        sleeper = function("import os, time\nos.write(3, str(os.getpid()).encode())\ntime.sleep(60)")
        pid = _start_and_find_child(runner, sleeper)
        os.kill(runner.server_pids()[0], signal.SIGKILL)
        assert gone(pid)


def _start_and_find_child(runner: CodeRunner, program: Program) -> int:
    """Sends a program without waiting for its result; the process id of its child."""
    server = runner._servers[0]
    server.send(program.request())
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    time.sleep(0.1)  # confined by now
    return int(found[0])


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root's programs run as nobody, who cannot kill it")
def test_a_program_that_kills_its_server_is_a_sandbox_error_as_user(runner):
    assert runner.run([function("import os\nos.kill(os.getppid(), 9)")])[0].status == "sandbox_error"


def test_our_own_failures_are_sandbox_errors():
    assert read_result(b"", 3).status == "sandbox_error"  # the server died
    assert read_result(b'{"ended": "exit", "output": ""}\n', 3).status == "sandbox_error"  # the child, before its turn
    assert read_result(b'{"ended": "exit", "output": " "}\n', 3).status == "runtime_error"  # the program's doing


@LINUX
def test_a_program_whose_server_dies_twice_is_a_sandbox_error():
    with CodeRunner(cpu_seconds=5, wall_seconds=10) as runner:
        runner.run([function("return x")])
        killed = set()

        def kill_two_servers():
            while len(killed) < 2:
                time.sleep(0.1)
                for pid in set(runner.server_pids()) - killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)

        killer = threading.Thread(target=kill_two_servers)
        killer.start()
        (result,) = runner.run([function("import time\ntime.sleep(2)\nreturn x")])
        killer.join()
        assert result.status == "sandbox_error"
        assert runner.run([function("return x")])[0].values == [1, 2, 3]


@LINUX
def test_the_server_ends_with_its_parent():
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        runner = CodeRunner()
        runner.run([function("return x")])
        os.write(writing, str(runner.server_pids()[0]).encode())
        time.sleep(60)
    pid = int(os.read(reading, 20))
    assert alive(pid)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert gone(pid)


def test_forked_and_pickled_copies_start_servers_of_their_own(runner):
    runner.run([function("return x")])
    mine = runner.server_pids()
    runner._lock.acquire()  # as if another thread were in the middle of a run
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a copy that waits for that thread would wait for ever
        works = runner.run([function("return x+1")])[0].values == [2, 3, 4] and runner.server_pids() != mine
        runner.close()
        os._exit(0 if works else 1)
    runner._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert runner.run([function("return x+2")])[0].values == [3, 4, 5] and runner.server_pids() == mine
    with pickle.loads(pickle.dumps(runner)) as copy:
        assert copy == runner and copy.run([function("return x")])[0].values == [1, 2, 3]


def test_more_than_a_hundred_programs_a_second():
    with CodeRunner() as runner:
        programs = [function(f"x=x+{i}\nreturn x") for i in range(200)]
        start = time.monotonic()
        assert all(result.status == "ok" for result in runner.run(programs))
        assert 200 / (time.monotonic() - start) > 100


@LINUX
def test_the_server_is_small_and_has_no_torch(runner):
    runner.run([function("return x")])
    pid = runner.server_pids()[0]
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libpython" in maps or "python" in maps  # we do read the right process
    assert "torch" not in maps and "numpy" not in maps
    status = Path(f"/proc/{pid}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 40_000  # kB
