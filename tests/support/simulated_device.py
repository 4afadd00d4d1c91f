"""A second device on a machine without one: its tensors hold CPU tensors, and an observer sees
every operation on them.

    import simulated_device as simulated

    with simulated.Observer() as observer:
        policy.model.to(simulated.DEVICE)
        ...
    print(observer.waits, observer.launches, observer.pageable)

The numbers are those of the CPU. What is seen is what a GPU would make of the program: an operand
that was left on the CPU is an error, a number that is read makes the CPU wait, an operation is a
launch, and a copy is made from pinned or pageable memory. A copy to the CPU that nothing has waited
for yet holds wrong numbers. What is not seen: which kernel a GPU chooses, its memory, the order of
its sums, the order of several streams.

PyTorch calls such a device PrivateUse1. Its setting up is global and cannot be undone, so it
belongs into a process of its own: tests/support/second_device.py.
"""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import attrgetter

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "gpu"
# Operations that make a view, allocate memory or read a size: a GPU is given nothing to do.
FREE = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "split", "split_with_sizes",
    "unsqueeze", "squeeze", "unflatten", "detach", "alias", "as_strided", "unbind", "chunk", "view_as_real",
    "view_as_complex", "_conj", "diagonal", "unsafe_split", "_reshape_alias", "lift_fresh", "narrow", "tensor_split",
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "set_", "resolve_conj", "resolve_neg",
    "_fused_sdp_choice", "result_type", "is_same_size", "sym_size", "size", "stride", "numel",
}  # fmt: skip
# Operations whose result's size depends on numbers, or that return a number: the CPU waits for
# them.
READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount", "equal", "is_nonzero",
    "unique_consecutive", "histc",
}  # fmt: skip
INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}
COPIES = {"_to_copy", "copy_"}
# The operations of autocast's list that occur here: they compute in the lower precision.
LOWERED = (
    "mm", "matmul", "linear", "bmm", "addmm", "addmv", "mv", "baddbmm", "addbmm", "linalg_vecdot",
    "scaled_dot_product_attention",
)  # fmt: skip
_observers: list[Observer] = []


class Stream:
    """Stands for the device's stream of work."""

    def synchronize(self) -> None:
        """Count a wait, as the CPU would wait for all work that it gave the device."""
        for observer in _observers:
            observer.note_wait("synchronize")


class Backend(_DummyBackendModule):
    """What `torch.gpu` answers."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return (9, 0)

    def current_stream(self, device: object = None) -> Stream:
        return Stream()

    def synchronize(self, device: object = None) -> None:
        Stream().synchronize()

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class SimulatedTensor(Tensor):
    """A tensor that says it lies on the device, and holds a CPU tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
            requires_grad=False,
        )

    def __init__(self, inner: Tensor):
        self.inner = inner

    def __repr__(self) -> str:
        return f"SimulatedTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function} on a simulated tensor outside of an Observer")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: SimulatedTensor) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> object:
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError("a tensor of the simulated device cannot become an array: call cpu() first")


class Observer(TorchDispatchMode):
    """Within this context simulated tensors can be computed with, and what a GPU would do is
    counted.

    waits      by place, "file:line code": how often the CPU would wait for the device
    launches   by operation
    pageable   by place: copies to the device from memory that is not pinned, for which the CPU
               waits too
    pinned     copies to the device from pinned memory

    Threads that are started meanwhile are observed too, and what they do is added up.
    """

    def __init__(self):
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.pageable: Counter[str] = Counter()
        self.pinned = 0
        # copies to the CPU: the tensor, and what it will hold
        self.under_way: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Observer:
        _observers.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _observers.remove(self)

    def counts(self) -> Counter[str]:
        """Return how many waits, launches and pageable copies there were so far."""
        return Counter(
            waits=self.waits.total(),
            launches=self.launches.total(),
            pageable=self.pageable.total(),
            pinned=self.pinned,
        )

    def note_wait(self, why: str) -> None:
        """Count a wait at the place in the program that is running. Copies that were under way are
        then complete.
        """
        self.waits[f"{place()} ({why})"] += 1
        complete, self.under_way = self.under_way, []
        for tensor, content in complete:
            tensor.copy_(content)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        tensors = list(tensors_in((args, tuple(kwargs.values()))))
        on_device = [x for x in tensors if isinstance(x, SimulatedTensor)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == NAME
        if not on_device and not to_device:
            return function(*args, **kwargs)
        if name not in COPIES:
            self._check_operands(name, args, tensors, on_device)
        self._count(name, function, args, kwargs)
        result = self._computed(name, function, args, kwargs)
        if name in COPIES and leaves(name, args, kwargs) and is_non_blocking(name, args, kwargs):
            self._begin_copy(args[0] if name == "copy_" else result)
        if name == "copy_":
            return args[0]
        to_cpu = name == "_to_copy" and target is not None and not to_device
        if name == "_local_scalar_dense" or to_cpu or not (on_device or to_device):
            return result
        wrapped = mapped(Tensor, SimulatedTensor, result)
        return (
            return_and_correct_aliasing(function, args, kwargs, wrapped) if on_device else wrapped
        )

    def _check_operands(
        self, name: str, args: tuple, tensors: list[Tensor], on_device: list[Tensor]
    ) -> None:
        """Raise RuntimeError if operands lie on both devices. Single numbers, and indices, may lie
        on the CPU.
        """
        on_cpu = [x for x in tensors if not isinstance(x, SimulatedTensor) and x.dim() > 0]
        if not on_cpu or not on_device:
            return
        if name in INDEXED and isinstance(args[0], SimulatedTensor):
            indices = list(tensors_in(args[1]))
            self.note_wait("an index on the CPU")
            on_cpu = [x for x in on_cpu if not any(x is index for index in indices)]
        if on_cpu:
            shapes = [tuple(x.shape) for x in on_cpu]
            raise RuntimeError(
                f"{name} with operands of shapes {shapes} on the CPU, others on the device: {place()}"
            )

    def _count(self, name: str, function, args: tuple, kwargs: dict) -> None:
        if name in READS:
            self.note_wait(name)
        if name in INDEXED and any(x.dtype == torch.bool for x in tensors_in(args[1])):
            self.note_wait(f"{name} by a mask")
        if name == "repeat_interleave" and function._overloadname == "Tensor":
            self.note_wait("repeat_interleave by a tensor")
        if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            self.note_wait("_grouped_mm reads the ends of the groups unless it is in bfloat16")
        if name in COPIES:
            self._count_copy(name, args, kwargs)
        if name not in FREE:
            self.launches[name] += 1

    def _count_copy(self, name: str, args: tuple, kwargs: dict) -> None:
        waits = not is_non_blocking(name, args, kwargs)
        if leaves(name, args, kwargs) and waits:
            self.note_wait("copy to the CPU")
        source = args[1] if name == "copy_" else args[0]
        if (
            isinstance(source, SimulatedTensor)
            or not source.dim()
            or not arrives(name, args, kwargs)
        ):
            return
        if source.untyped_storage() not in _pinned:
            self.pageable[place()] += 1
            return
        self.pinned += 1
        if waits:
            self.note_wait("copy from pinned memory without non_blocking")

    def _begin_copy(self, tensor: Tensor) -> None:
        """Let a copy to the CPU be under way: until the CPU waits for the device, the tensor holds
        other numbers.
        """
        self.under_way.append((tensor, tensor.clone()))
        tensor.copy_(torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else ~tensor)

    def _computed(self, name: str, function, args: tuple, kwargs: dict):
        """Compute on the CPU tensors."""
        own_args = mapped(SimulatedTensor, attrgetter("inner"), args)
        own_kwargs = {
            key: mapped(SimulatedTensor, attrgetter("inner"), value)
            for key, value in kwargs.items()
        }
        if own_kwargs.get("device") is not None:
            own_kwargs["device"] = "cpu"
        own_kwargs.pop("pin_memory", None)
        if name in ("_conj", "_conj_physical", "conj_physical") and own_args[0].is_complex():
            # Autograd's conjugate bit is above this; below it the numbers themselves must change.
            pairs = torch.view_as_real(own_args[0])
            return torch.view_as_complex(torch.stack([pairs[..., 0], -pairs[..., 1]], -1))
        if name == "histc" and not own_args[0].is_floating_point():
            return function(own_args[0].float(), *own_args[1:], **own_kwargs).to(own_args[0].dtype)
        return function(*own_args, **own_kwargs)


class InThread(TorchDispatchMode):
    """An observer in a thread that is not its own."""

    def __init__(self, observer: Observer):
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.observer.__torch_dispatch__(function, types, args, kwargs)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for x in value:
            yield from tensors_in(x)


def mapped(kind: type, function: Callable[[Tensor], Tensor], value: object) -> object:
    """Return arguments or results of an operation with the tensors of a kind replaced by the
    function's. It is PyTorch's `tree_map_only` for what operations have, in a tenth of the time."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(kind, function, x) for x in value)
    return value


def arrives(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether the result of a copy lies on the device."""
    target = kwargs.get("device")
    if name == "copy_" or target is None:
        return isinstance(args[0], SimulatedTensor)
    return torch.device(target).type == NAME


def leaves(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether a copy leads from the device to the CPU."""
    source = args[1] if name == "copy_" else args[0]
    return isinstance(source, SimulatedTensor) and not arrives(name, args, kwargs)


def is_non_blocking(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether the program goes on before a copy is complete."""
    return bool(args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking"))


def place() -> str:
    """Return the innermost line of the package gspo that is running, else of any file outside of
    libraries.
    """
    frame, outside = sys._getframe(1), None
    while frame is not None:
        file = frame.f_code.co_filename
        if "/gspo/" in file and "site-packages" not in file:
            break
        if outside is None and "site-packages" not in file and file != __file__:
            outside = frame
        frame = frame.f_back
    frame = frame or outside
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file.split('/gspo/')[-1]}:{number} {linecache.getline(file, number).strip()}"


def pinned(tensor: Tensor) -> Tensor:
    """Stand for Tensor.pin_memory, which needs a GPU."""
    copy = tensor.clone()
    _pinned.add(copy.untyped_storage())
    return copy


def prepare_thread() -> None:
    """Set what PyTorch keeps for each thread."""
    # torch.tensor(data, device=...) moves by an operation that is seen
    torch._C._set_only_lift_cpu_tensors(True)
    # the backward pass must run where the Observer is
    torch.autograd.set_multithreading_enabled(False)


def run_observed(thread: threading.Thread) -> None:
    """Stand for Thread.run: the observers of now also observe this thread."""
    prepare_thread()
    with ExitStack() as stack:
        for observer in list(_observers):
            stack.enter_context(InThread(observer))
        _plain_run(thread)


def moved(
    model: transformers.PreTrainedModel, *where: object, **options: object
) -> transformers.PreTrainedModel:
    """Stand for PreTrainedModel.to: on this device tied weights become two tensors, and are tied
    again.
    """
    model = _plain_to(model, *where, **options)
    if model.config.tie_word_embeddings and hasattr(model, "lm_head"):
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def lower(name: str):
    """Return the operation as autocast calls it: with floating-point operands in the lower
    precision.
    """
    operation = getattr(torch.ops.aten, name).default

    def cast(x: object) -> object:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
            return x
        return x.to(torch.get_autocast_dtype(NAME)) if x.device.type == NAME else x

    def run(*args, **kwargs):
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(
                *map(cast, args), **{name: cast(value) for name, value in kwargs.items()}
            )

    return run


_setup_privateuseone_for_python_backend(NAME, Backend())
DEVICE = torch.device(NAME, 0)
prepare_thread()
_plain_run = threading.Thread.run
threading.Thread.run = run_observed
_pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
Tensor.pin_memory = pinned
_plain_to = transformers.PreTrainedModel.to
transformers.PreTrainedModel.to = moved
_all_operations = torch.library.Library("_", "IMPL")
_all_operations.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
for _name in LOWERED:
    _aten.impl(_name, lower(_name), "AutocastPrivateUse1")
