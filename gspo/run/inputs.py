"""Record the problems and the weights that a run starts from, and check that they stay the same.

Without a check, a run that is resumed with other problems, or with other weights for its reference
policy, would continue as if nothing had happened. So the run's settings hold digests of both.
`resume` compares them, and `gspo compare` shows them.
"""

from typing import Any

from gspo.config.settings import Settings, first_difference
from gspo.model.policy import Policy


def inputs_of(settings: Settings, *policies: Policy | None) -> dict[str, Any]:
    """Return digests of the run's inputs, as far as this process has read them.

    "data" is of the task's data. "model" is of the weights that the run starts from, if a policy
    was loaded with them."""
    inputs: dict[str, Any] = {}
    data = settings.task.data()
    if data:
        inputs["data"] = data
    weights = [policy.initial_weights_digest for policy in policies if policy]
    known_digests = [digest for digest in weights if digest]
    if known_digests:
        inputs["model"] = known_digests[0]
    return inputs


def check_inputs(settings: Settings, inputs: dict[str, Any]) -> None:
    """Compare the inputs with the record of the run's first start, and record new inputs.

    Raises ValueError if they differ."""
    for kind, current in inputs.items():
        recorded = settings.inputs.get(kind)
        if recorded is None or recorded == current:
            continue
        if kind == "model":
            source = settings.model.source() or settings.model.name
            raise ValueError(
                f"the weights of model {source} are not those that the run started from (their "
                f"digest is {current}, and was {recorded}), and the run still needs them; "
                "put them back, or begin a new run"
            )
        difference = first_difference({"data": current}, {"data": recorded})
        raise ValueError(
            f"the problems of task={settings.task.name} are not those that the run started with "
            f"({difference} then); put the files back, or begin a new run"
        )
    # A resumed run may not have read the weights that it started from.
    model = settings.inputs.get("model")
    settings.inputs = ({"model": model} if isinstance(model, str) else {}) | inputs


def left_out_in_words(inputs: dict[str, Any]) -> str:
    """Say how many training problems are left out and why, or return "" if none is."""
    training = inputs.get("data", {}).get("train", {})
    reasons = {why: count for why, count in training.get("left_out", {}).items() if count}
    if not reasons:
        return ""
    named = " and ".join(f"{count:,} are {why}" for why, count in reasons.items())
    total = training["problems"] + sum(reasons.values())
    return (
        f"of {total:,} training problems {training['problems']:,} are trained on, because {named}"
    )
