"""Signs the Python objects that ranks exchange, so that nobody else's are unpickled.

torch.distributed sends objects as pickles, and unpickling runs code. Whoever reaches the port at
which ranks find each other can join in a rank's place. So every pickle goes with a keyed hash
(HMAC-SHA256), and one without is refused before it is read. The key is this user's own
(gspo.io.ownership), which machines share with the home directory, or $GSPO_RANKS_KEY where they
share none.

All of torch.distributed's exchanges of objects go through two functions, those of its distributed
checkpoint too. They are replaced here.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from gspo.io.ownership import derived_key

VARIABLE = "GSPO_RANKS_KEY"
HASH = 32  # bytes
_to_tensor, _to_object = c10d._object_to_tensor, c10d._tensor_to_object


def sign_objects() -> None:
    """Let all objects that this process exchanges by torch.distributed be signed, and refuse those
    that are not.

    Raises ValueError if there is no key."""
    key = derived_key("ranks")
    if secret := os.environ.get(VARIABLE):
        key = hashlib.sha256(secret.encode()).digest()
    if key is None:
        raise ValueError(
            f"several processes sign what they exchange, and there is no home directory for the key: set {VARIABLE} to "
            "the same secret for all of them"
        )

    def to_tensor(value: Any, device: torch.device, group: Any) -> tuple[Tensor, Tensor]:
        """Stand in for _object_to_tensor: the hash comes before the pickle."""
        pickled, _ = _to_tensor(value, torch.device("cpu"), group)
        signature = torch.frombuffer(bytearray(signature_of(key, pickled)), dtype=torch.uint8)
        signed = torch.cat([signature, pickled]).to(device)
        return signed, torch.LongTensor([signed.numel()]).to(device)

    def to_object(signed: Tensor, size: Any, group: Any) -> Any:
        """Stand in for _tensor_to_object."""
        whole = signed.cpu()[: int(size)]
        signature, pickled = whole[:HASH], whole[HASH:]
        if not hmac.compare_digest(signature.numpy().tobytes(), signature_of(key, pickled)):
            raise ValueError(
                "another rank sent an object that is not signed with this user's key: ranks on machines without a "
                f"common home directory need the same secret in {VARIABLE}"
            )
        return _to_object(pickled, pickled.numel(), group)

    c10d._object_to_tensor, c10d._tensor_to_object = to_tensor, to_object


def signature_of(key: bytes, pickled: Tensor) -> bytes:
    """Return the keyed hash of a pickle."""
    return hmac.new(key, pickled.numpy().tobytes(), hashlib.sha256).digest()
