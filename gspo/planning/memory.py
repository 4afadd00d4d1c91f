"""Measures the memory of a run on one of its GPUs without any GPU: its own forward and backward
pass go through tensors that have shapes but no content (PyTorch's FakeTensorMode), between ranks
that are not there, and every allocation is counted.

For example, for Qwen3-30B-A3B on 16 GPUs it spreads the weights as gspo.model.sharding.fsdp does, passes
two micro-batches of responses of the greatest length through the model, and reads from a counter
how much was allocated at most.

What it does not see: the caching allocator's fragmentation, CUDA's context, NCCL's buffers, and
workspaces inside of kernels (gspo.planning.hardware.RESERVE stands for them).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PretrainedConfig

from gspo.data.batch import TrainBatch
from gspo.distributed.ranks import Ranks
from gspo.model.adapter import Adapter
from gspo.model.cost import active_parameters
from gspo.model.forward import experts, kernels
from gspo.model.forward.grouped import ExpertGroups
from gspo.model.forward.network import FAMILIES, Network
from gspo.model.forward.outputs import network_outputs
from gspo.model.forward.packing import Sequences, lay_out
from gspo.model.routing_replay import Routing
from gspo.model.settings import LoraSettings
from gspo.model.sharding.dtensors import run_unsharded
from gspo.model.sharding.expert_parallel import ExpertRanks
from gspo.model.sharding.fsdp import Shards
from gspo.planning.models import class_of


@dataclass
class Work:
    """What one rank computes at once."""

    ranks: int
    shard_size: int  # how many ranks hold one copy of the weights; 1: each has all of them
    # to how many of them the experts of a layer are dealt; 1: they are gathered as the rest
    experts: int
    rows: int  # responses in a micro-batch that learns
    scored: int  # responses in a micro-batch that is passed without gradient
    prompt: int  # tokens of a prompt
    response: int  # tokens of a response
    group: int  # responses to one prompt
    precision: torch.dtype
    checkpointing: bool
    cuda: bool = True  # whether it is a GPU, which takes larger chunks of logits than a CPU
    lora: LoraSettings = field(default_factory=LoraSettings)
    head_dtype: torch.dtype = torch.float32


@dataclass
class Measured:
    """What one rank holds and exchanges; bytes."""

    parameters: int  # of the whole model: a number, not bytes
    active: int | None  # parameters that a token passes through
    experts: int  # of a layer; 0 for a dense model
    weights: int  # this rank's float32 weights
    # those of them that are trained; gradients take as much, AdamW's state twice as much
    trained: int
    # at the most beside weights, gradients and AdamW's state, while a micro-batch learns
    update: int
    scoring: int  # the same for a pass without gradient
    gathered: int  # received by this rank for one micro-batch that learns
    gathered_scoring: int
    reduced: int  # gradients of one micro-batch, before they are reduced to this rank's part
    reduced_between: int = 0  # the same that go between the groups of ranks that each hold a copy
    dealt: int = 0  # tokens of one micro-batch that learns, sent to their experts and back
    dealt_scoring: int = 0
    merged: int = 0  # a copy of the weights that a LoRA adapter acts on


@dataclass
class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside of it, while they are there, and what
    ranks exchange.
    """

    now: int = 0
    peak: int = 0
    exchanged: dict[str, int] = field(default_factory=dict)  # bytes by the name of the exchange

    def __post_init__(self):
        super().__init__()
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = (
            weakref.WeakKeyDictionary()
        )

    __hash__ = object.__hash__

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name.startswith("c10d::") or "all_to_all" in name:
            sent = [t for t in tree_leaves(args[:2]) if isinstance(t, Tensor)]
            largest = max((t.numel() * t.element_size() for t in sent), default=0)
            self.exchanged[name] = self.exchanged.get(name, 0) + largest
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                self._note(value.untyped_storage())
        return out

    def known(self, tensors: Iterator[Tensor]) -> None:
        """Leave out tensors that were there before."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._sizes[local.untyped_storage()] = [0]

    def restart(self) -> None:
        """Begin to count anew what is exchanged, and the peak from what is there now."""
        self.peak, self.exchanged = self.now, {}

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            size = self._sizes[storage] = [0]
            self._resized(size, storage.nbytes())
            weakref.finalize(storage, self._resized, size, 0)

    def _resized(self, size: list[int], to: int) -> None:
        self.now, size[0] = self.now + to - size[0], to
        self.peak = max(self.peak, self.now)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within this context it counts; FSDP frees what it has gathered by making storages
        smaller.
        """
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int):
            if storage in self._sizes:
                self._resized(self._sizes[storage], size)
            return plain(storage, size)

        with patch.object(torch.UntypedStorage, "resize_", resize), self:
            yield


class Grouped(Function):
    """A product of rows with their experts' matrices, of which the shapes alone matter: PyTorch's
    own has no shapes for float32."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight)


class Absent(Ranks):
    """Ranks of which this process is the first, and there are no others."""

    def __init__(self, count: int):
        self.world_size = count


@contextmanager
def absent_ranks(count: int) -> Iterator[None]:
    """Within this context there is a process group of so many ranks, whose exchanges return at
    once.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(config: PretrainedConfig, work: Work) -> Measured:
    """Measure a run's memory on one rank. Raises ValueError for an architecture that is not known
    here.
    """
    kind = (config.architectures or [""])[0]
    if kind not in FAMILIES:
        raise ValueError(
            f"memory is planned for {', '.join(FAMILIES)}; model.path names a {kind!r}"
        )
    device = "cuda" if work.cuda else "cpu"
    with (
        absent_ranks(work.ranks),
        patch.dict(kernels.CHUNK, cpu=kernels.CHUNK[device]),
        patch.dict(kernels.SPLITS, cpu=kernels.SPLITS[device]),
        patch.object(kernels, "float32_product", product_shape),
        patch.object(experts, "_grouped", grouped),
        patch.object(ExpertRanks, "numbers", alike),
    ):
        shards = (
            Shards(Absent(work.ranks), work.shard_size, "cpu", work.experts)
            if work.shard_size > 1
            else None
        )
        return _measure(config, work, shards)


def alike(
    ranks: ExpertRanks, rows: Tensor, counts_E: Tensor
) -> tuple[Tensor, list[int], list[int]]:
    """Stand in for the numbers of rows that ranks send each other: all experts get equally many."""
    count = ranks.group.size()
    each = [len(part) for part in torch.arange(len(rows), device="cpu").tensor_split(count)]
    return torch.empty_like(counts_E).view(count, -1), each, each


def grouped(rows: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    """Stand in for the network's grouped product."""
    return Grouped.apply(rows, weight)


def product_shape(a: Tensor, b: Tensor) -> Tensor:
    """Stand in for a float32 product of bfloat16 matrices, of which a CPU would make float32 copies
    first.
    """
    return a.new_empty(len(a), b.shape[1], dtype=torch.float32)


def _measure(config: PretrainedConfig, work: Work, shards: Shards | None) -> Measured:
    learning, scored = lay_out(batch(work, work.rows)), lay_out(batch(work, work.scored))
    with FakeTensorMode() as fake:
        model, adapter, counted = without_weights(config, work, shards)
        for sequences in (learning, scored):
            for name, value in vars(sequences).items():
                setattr(sequences, name, tree_map_only(Tensor, fake.from_tensor, value))
        weights = sum(p.nbytes for p in locals_of(model))
        trained = sum(p.nbytes for p in adapter.parameters()) if adapter else weights
        forward = Network(model, work.checkpointing, work.head_dtype)

        def one_pass(sequences: Sequences) -> Tensor:
            return run_unsharded(
                model, network_outputs, forward, sequences, None, work.precision, 1.0, True
            )[0]

        allocations = Allocations()
        allocations.known(iter([*model.parameters(), *model.buffers()]))
        with allocations.counting(), forward.cached_casts():
            with torch.no_grad():
                one_pass(scored)
                if shards:
                    model.reshard()
            scoring, scored_exchange = allocations.peak, dict(allocations.exchanged)
            one_pass(learning).sum().backward()  # the first leaves gradients behind
            allocations.restart()
            one_pass(learning).sum().backward()
            update = allocations.peak - trained
        return Measured(
            *counted,
            weights=weights,
            trained=trained,
            update=update,
            scoring=scoring,
            gathered=exchanged(allocations.exchanged, "allgather"),
            gathered_scoring=exchanged(scored_exchange, "allgather"),
            reduced=exchanged(allocations.exchanged, "reduce_scatter"),
            reduced_between=exchanged(allocations.exchanged, "allreduce"),
            dealt=exchanged(allocations.exchanged, "all_to_all"),
            dealt_scoring=exchanged(scored_exchange, "all_to_all"),
            merged=adapter.adapted_bytes() if adapter else 0,
        )


def without_weights(
    config: PretrainedConfig, work: Work, shards: Shards | None
) -> tuple[torch.nn.Module, Adapter | None, tuple[int, int | None, int]]:
    """Return the model with tensors that have no content, its adapter if it gets one, and its
    numbers of parameters, of active ones and of experts."""
    plain = not shards and not work.lora.rank
    # meshes of ranks are tensors with content, and peft moves its tensors to a device, which fake
    # ones do not allow
    with (
        nullcontext() if plain else unset_fake_temporarily(),
        nullcontext() if plain else torch.device("meta"),
    ):
        model = class_of(config)(config).eval()
        counted = (
            sum(p.numel() for p in model.parameters()),
            active_parameters(model),
            Routing(model).experts,
        )
        if shards:
            shards.shard_model(model, work.precision)
        adapter = Adapter(model, work.lora, seed=0) if work.lora.rank else None
    if not plain:
        model._apply(without_content)
    if adapter:
        model.tie_weights()  # they are two tensors now
    return model, adapter, counted


def without_content(tensor: Tensor) -> Tensor:
    """Return a tensor like this one, as FakeTensorMode makes them; of what is spread over ranks
    this rank's part.
    """
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    local = torch.empty(tensor._local_tensor.shape, dtype=tensor.dtype)
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def locals_of(model: torch.nn.Module) -> list[Tensor]:
    """Return this rank's part of every parameter."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


def exchanged(by_name: dict[str, int], kind: str) -> int:
    """Return the bytes of the exchanges of one kind."""
    return sum(size for name, size in by_name.items() if kind in name)


def batch(work: Work, rows: int) -> TrainBatch:
    """Return a micro-batch of responses of the greatest length."""
    width = work.prompt + work.response
    return TrainBatch(
        tokens_BS=torch.zeros(rows, width, dtype=torch.int64),
        attention_BS=torch.ones(rows, width, dtype=torch.bool),
        mask_BT=torch.ones(rows, work.response, dtype=torch.bool),
        sampled_BT=torch.ones(rows, work.response, dtype=torch.bool),
        engine_logp_BT=torch.zeros(rows, work.response),
        adv_BT=torch.ones(rows, work.response),
        prompts_B=torch.arange(rows) // work.group,
    )
