"""PyTorch, imported when one of its attributes is first read.

Settings are classes that also compute: an objective's fields are its settings, and calling it gives
the loss. Commands read the settings first. They refuse a wrong one, print help or describe a run,
for which the 3 seconds of importing PyTorch would be wasted. `from gspo.data.lazy_torch import
torch` in the place of `import torch` avoids them.
"""

from __future__ import annotations

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
