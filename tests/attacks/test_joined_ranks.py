"""Who joins a run in a rank's place: it gets no code executed, and from another machine it does not
get in.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import forked
from commands import ROOT, environment
from gspo.distributed import signed_objects
from gspo.io import ownership
from gspo.run.processes import stay_on_one_machine
from ranked import ranked

RANK = """
import sys, datetime
sys.path.insert(0, {root!r})
import torch.distributed as dist
from gspo.distributed.ranks import DistributedRanks
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank={rank}, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
ranks = DistributedRanks(datetime.timedelta(seconds=60))
print(ranks.all_gather({value}))
"""
# A stranger's rank: PyTorch alone, and an object whose pickle is a program.
ATTACKER = """
import datetime, os
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=1, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
group = dist.new_group([0, 1], backend="gloo", timeout=datetime.timedelta(seconds=60))
class Program:
    def __reduce__(self):
        return os.system, ("touch {touched}",)
try:
    dist.all_gather_object([None, None], Program(), group=group)
except Exception:
    pass
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def started(script: str, **variables: str) -> forked.Script:
    return forked.start([sys.executable, "-c", script], env=environment() | variables)


@pytest.mark.slow
def test_a_stranger_in_a_ranks_place_runs_no_code(tmp_path):
    port, touched = free_port(), tmp_path / "touched"
    rank = started(RANK.format(root=str(ROOT), port=port, rank=0, value="'mine'"))
    attacker = started(ATTACKER.format(port=port, touched=touched))
    _, said = rank.communicate(timeout=120)
    attacker.communicate(timeout=120)
    assert "an object that is not signed with this user's key" in said and rank.returncode
    assert not touched.exists()


@pytest.mark.slow
def test_ranks_without_a_common_home_share_a_secret(tmp_path):
    homes = [tmp_path / "a", tmp_path / "b"]
    for same in (True, False):
        port, ranks = free_port(), []
        for index, home in enumerate(homes):
            home.mkdir(exist_ok=True)
            secret = {"GSPO_RANKS_KEY": "the same"} if same else {}
            script = RANK.format(root=str(ROOT), port=port, rank=index, value=index)
            ranks.append(started(script, HOME=str(home), XDG_STATE_HOME="", **secret))
        ends = [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]
        if same:
            assert [out for out, _, _ in ends] == ["[0, 1]\n"] * 2, ends
        else:
            assert all(code for _, _, code in ends)
            assert any("need the same secret in GSPO_RANKS_KEY" in said for _, said, _ in ends)


def test_without_any_key_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(ownership, "_key", lambda: None)
    monkeypatch.delenv(signed_objects.VARIABLE, raising=False)
    with pytest.raises(
        ValueError, match=r"no home directory for the key: set GSPO_RANKS_KEY to the same secret"
    ):
        signed_objects.sign_objects()


@pytest.fixture
def signing():
    before = c10d._object_to_tensor, c10d._tensor_to_object
    signed_objects.sign_objects()
    yield
    c10d._object_to_tensor, c10d._tensor_to_object = before


@pytest.mark.parametrize("value", [None, "x", {"a": [1.5, b"\0"]}, torch.arange(5), Path("a/b")])
def test_an_object_arrives_as_it_was_and_no_byte_may_change(signing, value):
    signed, size = c10d._object_to_tensor(value, torch.device("cpu"), None)
    # exchanges pad to the longest
    padded = torch.cat([signed, torch.zeros(100, dtype=torch.uint8)])
    arrived = c10d._tensor_to_object(padded, size, None)
    assert torch.equal(arrived, value) if isinstance(value, torch.Tensor) else arrived == value
    for place in (0, 31, 32, len(signed) - 1):
        changed = signed.clone()
        changed[place] ^= 1
        with pytest.raises(ValueError, match="not signed"):
            c10d._tensor_to_object(changed, size, None)
    plain, plain_size = signed_objects._to_tensor(value, torch.device("cpu"), None)
    for shorter in (
        (plain, plain_size),
        (signed[:-1], size - 1),
        (signed[:10], 10),
        (signed[:0], 0),
    ):
        with pytest.raises(ValueError, match="not signed"):
            c10d._tensor_to_object(*shorter, None)


def test_every_exchange_of_objects_is_signed():
    """Also those of PyTorch's own distributed checkpoint."""

    def exchanged(ranks):
        seen = []
        sign, read = c10d._object_to_tensor, c10d._tensor_to_object
        c10d._object_to_tensor = lambda *a: seen.append("signed") or sign(*a)
        c10d._tensor_to_object = lambda *a: seen.append("read") or read(*a)
        found = [
            ranks.all_gather(ranks.rank),
            ranks.broadcast("a"),
            ranks.scatter(["x", "y"] if ranks.rank == 0 else None),
        ]
        told = ["b"] if ranks.rank == 0 else [None]
        dist.broadcast_object_list(told, src=0, group=ranks.group)
        gathered = [None, None] if ranks.rank == 0 else None
        dist.gather_object(ranks.rank, gathered, dst=0, group=ranks.group)
        return found, told, gathered, {"signed", "read"} <= set(seen)

    first, second = ranked(2, exchanged)
    assert first == ([[0, 1], "a", "x"], ["b"], [0, 1], True)
    assert second == ([[0, 1], "a", "y"], ["b"], None, True)


LISTENING = """
import sys
sys.path[:0] = [{root!r}]
import json, os, psutil
from gspo.run.processes import join
from gspo.config.load import register_schemas
sys.path[:0] = [{support!r}]
from composing import settings
peers = join(settings("parallel.mode=replicate", "policy.device=cpu"))
peers.ranks.all_gather(None)
found = {{c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}}
found |= {{c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"}}
with open(os.environ["RANK"], "w") as file:
    json.dump([os.environ["GLOO_SOCKET_IFNAME"], *sorted(found)], file)
peers.ranks.all_gather(None)
os._exit(0)  # as the program ends a rank: taking the connections down in order aborts at times
"""


@pytest.mark.slow
def test_ranks_of_one_machine_listen_at_the_loopback_address(tmp_path):
    script = tmp_path / "listening.py"
    script.write_text(LISTENING.format(root=str(ROOT), support=str(ROOT / "tests" / "support")))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    there = {name: value for name, value in environment().items() if name != "GLOO_SOCKET_IFNAME"}
    command.append(str(script))
    done = subprocess.run(
        command, env=there, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in ("0", "1"):
        interface, *addresses = json.loads((tmp_path / rank).read_text())
        assert interface == "lo" and set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize(
    ("here", "chosen", "expected"),
    [("2", None, "lo"), ("1", None, None), ("2", "eth7", "eth7"), (None, None, None)],
)
def test_an_interface_is_chosen_where_all_ranks_are_here_and_nobody_has_chosen(
    monkeypatch, here, chosen, expected
):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    given = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": here,
        "GLOO_SOCKET_IFNAME": chosen,
        "NCCL_SOCKET_IFNAME": chosen,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, "") if value is None else monkeypatch.setenv(name, value)
        if value is None:
            monkeypatch.delenv(name)
    stay_on_one_machine()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME") == expected
