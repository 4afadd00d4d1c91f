"""The environment variables and the GPUs of a vLLM, in the trainer's process or in another."""

import os
import platform

import torch

from gspo.distributed.ranks import Ranks
from gspo.io.errors import SettingError

# The network interface and addresses that only this machine can reach. Without these variables
# ports would be opened on its public address.
LOOPBACK_VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
}
# The variables by which launchers tell a process its rank. vLLM would take them for its own rank.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)
RANK_VARIABLE_PREFIXES = ("LOCAL_", "ROLE_", "TORCHELASTIC_")


def set_environment(routes: bool, on_cpu: bool, in_process: bool = False) -> None:
    """Set the environment variables that vLLM reads, for this process and its child processes.

    This must happen before vLLM is imported. Then nothing uses the network, and vLLM in this
    process opens no port that another machine could reach, unless the user has set these variables.
    For vLLM in a separate process `own_environment` sets the addresses, because ranks on several
    machines have to reach each other."""
    if in_process:
        os.environ.update(LOOPBACK_VARIABLES | os.environ)
    values = {
        "HF_HUB_OFFLINE": "1",
        # otherwise vLLM's client would wait forever for a core that was killed
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if on_cpu:
        values["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the first request waits for a compiler
        # it takes whole GiB only and overrides kv_cache_memory_bytes
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        values["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        # By default vLLM binds its threads to the first cores. Two runs would share those cores and
        # leave others idle.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif routes:
        values["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # only this model runner returns experts
    os.environ.update(values)
    # vLLM warns at length of the missing tokenizer and, at every load, of layers without weights of
    # their own. Such a warning could hide only one fault, stale output weights. It is prevented and
    # tested (vllm_worker.pack_head).
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def own_environment(gpus: list[str]) -> dict[str, str]:
    """Return the environment of a separate vLLM process: ours without a launcher's rank variables.

    Its ports are on the loopback address only, unless the user has set the variables otherwise. If
    `gpus` are given, it sees only these."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith(RANK_VARIABLE_PREFIXES)
    }
    environment = LOOPBACK_VARIABLES | ours
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def gpus_of(sharers: Ranks) -> list[str]:
    """Return the GPUs of the ranks that share a vLLM, none on the CPU.

    Raises ValueError if they are on several machines."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    variable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name for name in variable.split(",") if name]
    gpu = visible[local_rank] if local_rank < len(visible) else str(local_rank)
    machines_and_gpus = sharers.all_gather((platform.node(), gpu))
    machines = sorted({machine for machine, _ in machines_and_gpus})
    if len(machines) > 1:
        raise SettingError(
            "rollout.tensor_parallel_size",
            sharers.world_size,
            f"the ranks that would share a vLLM are on {' and '.join(machines)}",
            remedy="use a size that divides the ranks of each machine",
        )
    if not torch.cuda.is_available():
        return []
    return [gpu for _, gpu in machines_and_gpus]
