"""PyTorch, imported at the first read of an attribute.

Settings are classes that also compute: an objective's fields are its settings, and calling it gives
the loss. Commands read the settings first. Many commands then refuse a wrong setting, print help or
describe a run, without any tensor. `from gspo.data.lazy_torch import torch` instead of `import
torch` saves them the 3 seconds of importing PyTorch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class LazyTorch:
        """Stands for the module `torch`."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = LazyTorch()
