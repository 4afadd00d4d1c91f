"""Counts the calls that would make the CPU wait for a GPU, on a machine without one.

    with Waits(policy.parameters()) as waits:
        trainer.train_step(1, rollout)
    assert waits.places == {"trainer.py:290 finite = bool(norm.isfinite())": 4}

What is moved by `tensor.to(device)` counts as lying on a GPU, and so does all that is computed from it; the parameters
lie there from the start. Reading a number, a size that depends on numbers (`nonzero`, an index of booleans), or copying
a tensor back to the CPU is then what a GPU would be waited for.
"""

import traceback
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
# They read numbers of their input, or make as many numbers as its values say.
READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2",
    "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::unique_consecutive", "aten::histc",
}  # fmt: skip
INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
TO_CPU = {Tensor.cpu, Tensor.tolist, Tensor.numpy}


class Waits:
    """A context that counts by place, as "file.py:line text"."""

    def __init__(self, parameters: Iterable[Tensor]):
        self.places: Counter[str] = Counter()
        self.there: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.modes = [_Moves(self), _Operations(self)]
        for parameter in parameters:
            self.add(parameter)

    def __enter__(self) -> "Waits":
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)

    def add(self, value: object) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                self.there.add(tensor.untyped_storage())

    def any(self, value: object) -> bool:
        return any(isinstance(x, Tensor) and x.untyped_storage() in self.there for x in tree_leaves(value))

    def count(self) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename != __file__ and f.filename.startswith(str(ROOT))]
        here = [f for f in frames if "site-packages" not in f.filename][-1]
        self.places[f"{Path(here.filename).name}:{here.lineno} {here.line}"] += 1


class _Moves(TorchFunctionMode):
    """Sees what is called on tensors in Python: moves to a device, and readings that no operation is behind."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in TO_CPU and self.waits.any(args[0]):
            self.waits.count()
            return function(args[0].detach().clone() if function is Tensor.cpu else args[0], **kwargs)
        out = function(*args, **kwargs)
        if function is Tensor.to and any(isinstance(a, torch.device | str) for a in (*args[1:], *kwargs.values())):
            out = out.clone() if out is args[0] else out  # on one machine the CPU's own tensor
            self.waits.add(out)
        return out


class _Operations(TorchDispatchMode):
    """Sees every operation, those of a backward pass too."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, there = function._schema.name, self.waits.any((args, kwargs))
        by_mask = name in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
        if there and (name in READS or by_mask):
            self.waits.count()
        out = function(*args, **(kwargs or {}))
        if there:
            self.waits.add(out)
        return out
