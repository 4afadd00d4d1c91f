"""Checks whether the experts that an engine returned can be what its routers chose.

Engines have returned arrays of the right shape that were filled with zeros, or that held one
layer's choice for all layers. A run that trains on such routes only gets worse without any error,
so they are checked before they are used.
"""

from __future__ import annotations

import numpy as np

from gspo.data.samples import Response

UNKNOWN = -1  # stands in place of an expert where the engine recorded none


def check_routes(responses: list[Response], layers: int, top_k: int, experts: int) -> None:
    """Raise RuntimeError, in one line, for experts that no router can have chosen.

    Every response's `experts` must be an array [prompt + T - 1, layers, top_k] of whole numbers in
    0..experts-1 that differ at each position and layer. Taken over all responses, the routes must
    vary between positions, and between layers if there are several.
    """
    for r in responses:
        where = f"response {r.sample} to problem {r.problem.index} of task {r.problem.task!r}"
        fault = _fault(r, layers, top_k, experts)
        if fault:
            raise RuntimeError(
                f"the engine's experts of {where} {fault}; the engine is broken: use rollout.routes=false"
            )
    if not responses or top_k == experts:  # every position goes to all experts, so nothing can vary
        return
    routes_SLK = np.sort(np.concatenate([r.experts for r in responses]), axis=-1)
    if (routes_SLK == routes_SLK[:1]).all() and len(routes_SLK) > 1:
        fault = "are the same at every position"
    elif layers > 1 and (routes_SLK == routes_SLK[:, :1]).all():
        fault = "are the same in every layer"
    else:
        return
    raise RuntimeError(
        f"the engine's experts of {len(responses)} responses {fault}; the engine is broken: use rollout.routes=false"
    )


def _fault(r: Response, layers: int, top_k: int, experts: int) -> str:
    """Return in words what is wrong with one response's experts, "" if nothing is."""
    if r.experts is None:
        return "are missing"
    shape = (len(r.prompt_ids) + len(r.token_ids) - 1, layers, top_k)
    if r.experts.shape != shape:
        return f"have the shape {list(r.experts.shape)} in place of {list(shape)}"
    if not np.issubdtype(r.experts.dtype, np.integer):
        return f"are of type {r.experts.dtype}, not whole numbers"
    low, high = int(r.experts.min(initial=0)), int(r.experts.max(initial=0))
    if low < 0 or high >= experts:
        return f"lie in {low}..{high} in place of 0..{experts - 1}"
    ordered_SLK = np.sort(r.experts, axis=-1)
    if (ordered_SLK[..., 1:] == ordered_SLK[..., :-1]).any():
        return "name an expert twice at one position and layer"
    return ""
