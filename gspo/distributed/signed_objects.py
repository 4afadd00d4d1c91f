"""Signs the Python objects that ranks exchange, so that only objects of this user are unpickled.

torch.distributed sends objects as pickles, and unpickling runs code. Anybody who reaches the port
at which ranks find each other can join in place of a rank. Therefore a keyed hash (HMAC-SHA256)
goes with every pickle. A pickle without a valid hash is refused before it is read.

The key belongs to this user (gspo.io.ownership). Machines share it through the home directory. If
they share no home directory, $GSPO_RANKS_KEY gives the key.

torch.distributed exchanges objects through two functions, in its distributed checkpoint too. This
module replaces both.
"""

import hashlib
import hmac
import os
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from gspo.io.ownership import derived_key

VARIABLE = "GSPO_RANKS_KEY"
HASH_BYTES = 32
_to_tensor = c10d._object_to_tensor
_to_object = c10d._tensor_to_object


def sign_objects() -> None:
    """Sign all objects that this process sends by torch.distributed, and refuse unsigned objects.

    Raises ValueError if there is no key."""
    key = derived_key("ranks")
    secret = os.environ.get(VARIABLE)
    if secret:
        key = hashlib.sha256(secret.encode()).digest()
    if key is None:
        raise ValueError(
            "several processes sign what they exchange, and there is no home directory for the "
            f"key: set {VARIABLE} to the same secret for all of them"
        )

    def to_tensor(
        obj: Any,
        device: torch.device,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        """Replace _object_to_tensor: return a tensor of hash and pickle, and its size."""
        pickled, _ = _to_tensor(obj, torch.device("cpu"), group)
        signature = bytearray(signature_of(key, pickled))
        signature_tensor = torch.frombuffer(signature, dtype=torch.uint8)
        signed = torch.cat([signature_tensor, pickled]).to(device)
        size = torch.LongTensor([signed.numel()])
        return signed, size.to(device)

    def to_object(tensor: Tensor, tensor_size: Any, group: Any) -> Any:
        """Replace _tensor_to_object: check the hash, then unpickle."""
        size = int(tensor_size)
        signed = tensor.cpu()[:size]
        signature = signed[:HASH_BYTES].numpy().tobytes()
        pickled = signed[HASH_BYTES:]
        expected = signature_of(key, pickled)
        if not hmac.compare_digest(signature, expected):
            raise ValueError(
                "another rank sent an object that is not signed with this user's key: ranks on "
                f"machines without a common home directory need the same secret in {VARIABLE}"
            )
        return _to_object(pickled, pickled.numel(), group)

    replacements = {"_object_to_tensor": to_tensor, "_tensor_to_object": to_object}
    for name, replacement in replacements.items():
        setattr(c10d, name, replacement)


def signature_of(key: bytes, pickled: Tensor) -> bytes:
    """Return the keyed hash of a pickle."""
    message = pickled.numpy().tobytes()
    return hmac.digest(key, message, "sha256")
