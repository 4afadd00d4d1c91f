"""Checks of the experts that an engine returned: can its routers have chosen them?

Engines have returned arrays of the right shape full of zeros, or with the choice of a single layer
for all layers. A run that trains on such routes gets worse without any error. So they are checked
before they are used.
"""

from collections.abc import Sequence

import numpy as np

from gspo.data.samples import Response

BROKEN = "the engine is broken: use rollout.routes=false"


def check_routes(responses: Sequence[Response], layers: int, top_k: int, experts: int) -> None:
    """Raise RuntimeError, in a single line, for experts that no router can have chosen.

    Every response's `experts` must be an array [prompt + T - 1, layers, top_k] of whole numbers in
    0..experts-1. At each position and layer they must differ. Over all responses the routes must
    vary between positions, and between layers if there are several.
    """
    for r in responses:
        problem = _problem(r, layers, top_k, experts)
        if problem:
            raise RuntimeError(
                f"the engine's experts of response {r.sample} to problem {r.problem.index} of task "
                f"{r.problem.task!r} {problem}; {BROKEN}"
            )
    if not responses or top_k == experts:  # every position goes to all experts, so nothing can vary
        return
    routes_SLK = np.concatenate([r.experts for r in responses])
    routes_SLK = np.sort(routes_SLK, axis=-1)
    same_positions = (routes_SLK == routes_SLK[:1]).all()
    same_layers = (routes_SLK == routes_SLK[:, :1]).all()
    if same_positions and len(routes_SLK) > 1:
        problem = "are the same at every position"
    elif same_layers and layers > 1:
        problem = "are the same in every layer"
    else:
        return
    raise RuntimeError(f"the engine's experts of {len(responses)} responses {problem}; {BROKEN}")


def _problem(r: Response, layers: int, top_k: int, experts: int) -> str:
    """Return in words the fault of a response's experts, "" if there is none."""
    if r.experts is None:
        return "are missing"
    positions = len(r.prompt_ids) + len(r.token_ids) - 1
    shape = (positions, layers, top_k)
    if r.experts.shape != shape:
        return f"have the shape {list(r.experts.shape)} in place of {list(shape)}"
    if not np.issubdtype(r.experts.dtype, np.integer):
        return f"are of type {r.experts.dtype}, not whole numbers"
    smallest = int(r.experts.min(initial=0))
    largest = int(r.experts.max(initial=0))
    if smallest < 0 or largest >= experts:
        return f"lie in {smallest}..{largest} in place of 0..{experts - 1}"
    sorted_SLK = np.sort(r.experts, axis=-1)
    if (sorted_SLK[..., 1:] == sorted_SLK[..., :-1]).any():
        return "name an expert twice at one position and layer"
    return ""
