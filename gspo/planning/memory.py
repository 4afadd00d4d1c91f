"""The memory of a run on a GPU, measured without a GPU.

The run's own forward and backward pass use tensors that have shapes but no content (PyTorch's
FakeTensorMode). The other ranks do not exist, and collectives with them return at once. Every
allocation is counted.

For example, for Qwen3-30B-A3B on 16 GPUs, the weights are sharded by gspo.model.sharding.fsdp. Two
micro-batches of responses of the maximum length pass through the model. A counter then tells the
peak of the allocations.

Not measured: fragmentation in the caching allocator, CUDA's context, NCCL's buffers, and workspaces
inside kernels. gspo.planning.hardware.RESERVE stands for them.
"""

import weakref
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PretrainedConfig, PreTrainedModel

from gspo.data.batch import TrainBatch
from gspo.distributed.ranks import Ranks
from gspo.model.adapter import Adapter
from gspo.model.cost import active_parameters
from gspo.model.forward.experts import grouped_product_replaced
from gspo.model.forward.kernels import head_as_on
from gspo.model.forward.network import Network, has_known_arithmetic
from gspo.model.forward.outputs import network_outputs
from gspo.model.forward.packing import Sequences, lay_out
from gspo.model.routing_replay import Routing
from gspo.model.settings import LoraSettings
from gspo.model.sharding.dtensors import expert_ranks, local_tensor, reshard, run_unsharded
from gspo.model.sharding.expert_parallel import ExpertRanks
from gspo.model.sharding.fsdp import Shards
from gspo.model.sharding.sharded_files import SHARDED_FAMILIES
from gspo.planning.models import class_of


@dataclass
class Work:
    """The work of a rank: how weights are sharded, and the sizes of its micro-batches."""

    ranks: int
    shard_size: int  # ranks that hold one copy of the weights together; 1: each has all weights
    experts: int  # ranks that share the experts of a layer; 1: experts are all-gathered
    rows: int  # responses in a micro-batch with a backward pass
    scored: int  # responses in a micro-batch without gradient
    prompt: int  # tokens of a prompt
    response: int  # tokens of a response
    group: int  # responses to one prompt
    precision: torch.dtype
    checkpointing: bool
    cuda: bool = True  # a GPU computes logits in larger chunks than a CPU
    lora: LoraSettings = field(default_factory=LoraSettings)
    head_dtype: torch.dtype = torch.float32


@dataclass
class Measured:
    """The bytes that a rank holds and exchanges, and three counts of the model."""

    parameters: int  # count: parameters of the whole model
    active: int | None  # count: parameters that a token passes through
    experts: int  # count: experts of a layer; 0 for a dense model
    weights: int  # this rank's float32 weights
    # this rank's trained weights; gradients take as much, AdamW's moments twice as much
    trained: int
    # the peak of a micro-batch with a backward pass, without weights, gradients, AdamW's moments
    update: int
    scoring: int  # the same peak of a micro-batch without gradient
    all_gathered: int  # all-gathered by this rank, for one micro-batch with a backward pass
    all_gathered_scoring: int  # all-gathered by this rank, for one micro-batch without gradient
    reduced: int  # gradients of one micro-batch, before they are reduce-scattered
    reduced_between: int = 0  # gradients that are all-reduced between copies of the weights
    all_to_all: int = 0  # tokens sent to their experts and back, with a backward pass
    all_to_all_scoring: int = 0  # tokens sent to their experts and back, without gradient
    merged: int = 0  # a copy of the weights that a LoRA adapter changes


@dataclass
class Allocations(TorchDispatchMode):
    """A mode that counts the bytes of all tensors made inside it, and the bytes of collectives."""

    now: int = 0
    peak: int = 0
    exchanged: dict[str, int] = field(default_factory=dict)  # bytes by the collective's name

    def __post_init__(self):
        super().__init__()
        # each storage's counted bytes, in a list that `weakref.finalize` can set to 0
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._all_gathered_storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    __hash__ = object.__hash__

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("c10d::") or "all_to_all" in name:
            tensors = [t for t in tree_leaves(args[:2]) if isinstance(t, Tensor)]
            largest = max((t.nbytes for t in tensors), default=0)
            self.exchanged[name] = self.exchanged.get(name, 0) + largest
        if name == "fsdp::split_with_sizes_copy":
            self._all_gathered_storages.update(tensor.untyped_storage() for tensor in kwargs["out"])
        if name == "aten::copy_" and not isinstance(args[0], DTensor):
            # FSDP copies so if a single rank holds the weights that it unshards
            storage = args[0].untyped_storage()
            if storage in self._sizes:
                self._all_gathered_storages.add(storage)
        self._count_resized()
        out = func(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                self._count_new(value.untyped_storage())
        return out

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors, which existed before."""
        for tensor in tensors:
            self._sizes[local_tensor(tensor).untyped_storage()] = [0]

    def restart(self) -> None:
        """Restart the counters: no collectives yet, and the peak is the current allocation."""
        self._count_resized()
        self.peak = self.now
        self.exchanged = {}

    def _count_new(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            size = [0]
            self._sizes[storage] = size
            self._set_size(size, storage.nbytes())
            weakref.finalize(storage, self._set_size, size, 0)

    def _count_resized(self) -> None:
        """Count the storages of all-gathered weights anew: FSDP resizes them without an operation.

        FSDP shrinks a storage to free it. It enlarges the storage again before it copies gathered
        weights into it, and that copy is an operation.
        """
        for storage in list(self._all_gathered_storages):
            self._set_size(self._sizes[storage], storage.nbytes())
            if storage.nbytes() == 0:
                self._all_gathered_storages.discard(storage)

    def _set_size(self, size: list[int], nbytes: int) -> None:
        self.now += nbytes - size[0]
        size[0] = nbytes
        self.peak = max(self.peak, self.now)


class GroupedShapes(Function):
    """The product of rows with their experts' matrices, of tensors that have no content.

    PyTorch's own grouped product has no shape function for float32.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[1])

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight)


class BalancedExpertRanks(ExpertRanks):
    """The ranks that share a layer's experts, if every rank receives the same number of tokens.

    Without content, a tensor of counts cannot tell how many tokens go to each rank.
    """

    def exchange_counts(
        self, rows: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, list[int], list[int]]:
        count = self.group.size()
        parts = torch.arange(len(rows), device="cpu").tensor_split(count)
        row_counts = [len(part) for part in parts]
        return torch.empty_like(counts_E).view(count, -1), row_counts, row_counts


class AbsentRanks(Ranks):
    """The ranks of a run of which only rank 0 exists: this process."""

    def __init__(self, world_size: int):
        self.world_size = world_size


@contextmanager
def fake_process_group(world_size: int) -> Generator[None]:
    """Within this context, there is a process group whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(config: PretrainedConfig, work: Work) -> Measured:
    """Measure a run's memory on a rank. Raises ValueError for an unknown architecture."""
    architecture = (config.architectures or [""])[0]
    if architecture not in SHARDED_FAMILIES:
        raise ValueError(
            f"memory is planned for {', '.join(SHARDED_FAMILIES)}; model.path names a {architecture!r}"
        )
    if not has_known_arithmetic(config):
        raise ValueError(
            "memory is planned for models that run through gspo's own forward, and a setting of this "
            "one rules that out: attention other than sdpa, a sliding window, the kind of rope, "
            "hidden_act or clip_qkv"
        )
    with (
        fake_process_group(work.ranks),
        head_as_on("cuda" if work.cuda else "cpu"),
        grouped_product_replaced(GroupedShapes.apply),
    ):
        shards = None
        if work.shard_size > 1:
            shards = Shards(AbsentRanks(work.ranks), work.shard_size, "cpu", work.experts)
        return _measure(config, work, shards)


def _measure(config: PretrainedConfig, work: Work, shards: Shards | None) -> Measured:
    learning = lay_out(batch(work, work.rows))
    scored = lay_out(batch(work, work.scored))
    with FakeTensorMode() as fake:
        model, adapter, counts = without_weights(config, work, shards)
        for sequences in (learning, scored):
            for name, value in vars(sequences).items():
                setattr(sequences, name, tree_map_only(Tensor, fake.from_tensor, value))
        weights = sum(local_tensor(p).nbytes for p in model.parameters())
        trained = sum(p.nbytes for p in adapter.parameters()) if adapter else weights
        forward = Network(model, work.checkpointing, work.head_dtype)

        def log_probs(sequences: Sequences) -> Tensor:
            return run_unsharded(
                model, network_outputs, forward, sequences, None, work.precision, 1.0, True
            )[0]

        allocations = Allocations()
        allocations.ignore([*model.parameters(), *model.buffers()])
        with allocations, forward.cached_casts():
            with torch.no_grad():
                log_probs(scored)
                reshard(model)
            scoring = allocations.peak
            exchanged_scoring = allocations.exchanged.copy()
            log_probs(learning).sum().backward()  # the first backward pass allocates gradients
            allocations.restart()
            log_probs(learning).sum().backward()
            update = allocations.peak - trained
        exchanged = allocations.exchanged
        return Measured(
            *counts,
            weights=weights,
            trained=trained,
            update=update,
            scoring=scoring,
            all_gathered=total(exchanged, "allgather"),
            all_gathered_scoring=total(exchanged_scoring, "allgather"),
            reduced=total(exchanged, "reduce_scatter"),
            reduced_between=total(exchanged, "allreduce"),
            all_to_all=total(exchanged, "all_to_all"),
            all_to_all_scoring=total(exchanged_scoring, "all_to_all"),
            merged=adapter.adapted_bytes() if adapter else 0,
        )


def without_weights(
    config: PretrainedConfig, work: Work, shards: Shards | None
) -> tuple[PreTrainedModel, Adapter | None, tuple[int, int | None, int]]:
    """Return the model without content, its LoRA adapter if it has any, and three counts.

    The counts are the first fields of Measured: parameters, active parameters, experts.
    """
    plain = not shards and not work.lora.rank
    # Meshes of ranks are tensors with content, and peft moves its tensors to a device. Fake tensors
    # allow neither.
    with ExitStack() as contexts:
        if not plain:
            contexts.enter_context(unset_fake_temporarily())
            contexts.enter_context(torch.device("meta"))
        model = class_of(config)(config).eval()
        parameters = sum(p.numel() for p in model.parameters())
        counts = (parameters, active_parameters(model), Routing(model).experts)
        if shards:
            shards.shard_model(model, work.precision)
            for module in model.modules():
                ranks = expert_ranks(module)
                if ranks is not None:
                    module.ranks = BalancedExpertRanks(ranks.group)
        adapter = Adapter(model, work.lora, seed=0) if work.lora.rank else None
    if not plain:
        model._apply(without_content)
    if adapter:
        model.tie_weights()  # `_apply` has made two tensors of them
    return model, adapter, counts


def without_content(tensor: Tensor) -> Tensor:
    """Return a fake tensor of the same shape and dtype: of a sharded tensor, the local shard."""
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    local = torch.empty(tensor._local_tensor.shape, dtype=tensor.dtype)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def total(exchanged: dict[str, int], collective: str) -> int:
    """Return the bytes of all collectives whose names contain a word."""
    return sum(nbytes for name, nbytes in exchanged.items() if collective in name)


def batch(work: Work, rows: int) -> TrainBatch:
    """Return a micro-batch of `rows` responses of the maximum length."""
    width = work.prompt + work.response
    return TrainBatch(
        tokens_BS=torch.zeros(rows, width, dtype=torch.int64),
        attention_BS=torch.ones(rows, width, dtype=torch.bool),
        mask_BT=torch.ones(rows, work.response, dtype=torch.bool),
        sampled_BT=torch.ones(rows, work.response, dtype=torch.bool),
        engine_logp_BT=torch.zeros(rows, work.response),
        old_logp_BT=torch.zeros(rows, work.response),
        adv_BT=torch.ones(rows, work.response),
        prompts_B=torch.arange(rows) // work.group,
    )
