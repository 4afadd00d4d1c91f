"""What a run is made from, the problems and the weights that it starts from, and whether they are
still the same.

A run that is resumed with other problems, or with other weights for its reference policy, would go
on as if nothing had happened. Digests of both are in the run's settings, so that `resume` compares
them and `gspo compare` shows them.
"""

from __future__ import annotations

from typing import Any

from gspo.config.settings import Settings, first_difference
from gspo.model.policy import Policy


def inputs_of(settings: Settings, *policies: Policy | None) -> dict[str, Any]:
    """Return what a run is made from, as far as this process has read it: the task's data, and a
    digest of the weights that the run starts from, if one of the policies was loaded with them."""
    found: dict[str, Any] = {}
    if data := settings.task.data():
        found["data"] = data
    digests = [policy.initial_weights_digest for policy in policies if policy]
    known_digests = [digest for digest in digests if digest]
    if known_digests:
        found["model"] = known_digests[0]
    return found


def check_inputs(settings: Settings, found: dict[str, Any]) -> None:
    """Compare what was found with what the settings recorded at the run's first start, and record
    what is new.

    Raises ValueError if they differ."""
    for kind, now in found.items():
        then = settings.inputs.get(kind)
        if then is None or then == now:
            continue
        if kind == "model":
            source = settings.model.source() or settings.model.name
            raise ValueError(
                f"the weights of model {source} are not those that the run started from (their digest is {now}, and "
                f"was {then}), and the run still needs them; put them back, or begin a new run"
            )
        raise ValueError(
            f"the problems of task={settings.task.name} are not those that the run started with "
            f"({first_difference({'data': now}, {'data': then})} then); put the files back, or begin a new run"
        )
    # A run that was resumed may not have read the weights that it started from again.
    model = settings.inputs.get("model")
    settings.inputs = ({"model": model} if isinstance(model, str) else {}) | found


def left_out_in_words(inputs: dict[str, Any]) -> str:
    """Return how many problems of the training set are not trained on and why, "" if all are."""
    training = inputs.get("data", {}).get("train", {})
    reasons = {why: count for why, count in training.get("left_out", {}).items() if count}
    if not reasons:
        return ""
    named = " and ".join(f"{count:,} are {why}" for why, count in reasons.items())
    total = training["problems"] + sum(reasons.values())
    return (
        f"of {total:,} training problems {training['problems']:,} are trained on, because {named}"
    )
