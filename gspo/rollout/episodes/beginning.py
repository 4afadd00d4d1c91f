"""How episodes begin: what `reset` has returned becomes the prompt of a group."""

from __future__ import annotations

from gspo.model.chat.prompts import MAX_CHARS_PER_TOKEN
from gspo.model.policy import Policy
from gspo.rollout.episodes.episode import Episode, NoRoom
from gspo.tasks.environments.player import Beginning, EnvironmentFailed, failure


def written(policy: Policy, beginning: Beginning, positions: int | None) -> str:
    """Return the messages and tools of an episode's beginning as a prompt's text. Raises
    EnvironmentFailed for what the chat template cannot write, and for a text of more than 64
    characters for each position, without tokenizing it: that could take minutes. It would fit only
    if it were of little but blanks."""
    try:
        text = policy.prompts.write(policy.tokenizer, beginning.messages, beginning.tools)
    except (
        Exception
    ) as error:  # templates raise anything where a message is not made as they expect it
        reason = f"the chat template refuses what reset returned: {failure(error)}"
        raise EnvironmentFailed("environment-error", reason) from error
    if positions is not None and len(text) > MAX_CHARS_PER_TOKEN * positions:
        raise NoRoom(f"{len(text)} characters", positions)
    return text


def encode(
    policy: Policy, group: list[Episode], texts: list[str | None], positions: int | None
) -> None:
    """Encode the prompt of those of a group that have begun; their texts are None where there is no
    environment.

    Episodes of an environment whose prompt leaves no room for a response end without a reward, and
    without the prompt, which nobody has read. Raises ValueError for such a prompt where there is no
    environment, for an empty one, and for episodes that do not begin alike."""
    first, text = group[0], texts[0]
    where = f"problem {first.problem.index} of task {first.problem.task!r}"
    if others := [
        episode.sample for episode, other in zip(group, texts, strict=True) if other != text
    ]:
        raise ValueError(
            f"{where}: samples {first.sample} and {others[0]} begin with different messages, but a group is "
            "made of responses to one prompt; let `reset` depend on the problem alone"
        )
    if text is None:
        ids = policy.encode_prompt(first.problem.prompt)
    else:
        ids = policy.prompts.encode_written(policy.tokenizer, text)
    if not ids:
        raise ValueError(f"{where} has an empty prompt")
    if positions is None or len(ids) < positions:
        for episode in group:
            episode.prompt_ids = ids
        return
    error = NoRoom(f"{len(ids)} tokens", positions)
    if not first.task:
        raise ValueError(f"{where}: {error}; leave it out")
    # nobody could know it beforehand: the prompt is what `reset` has returned
    for episode in group:
        episode.fail(error)
