"""How episodes begin: the result of `reset` becomes the prompt of a group."""

from collections.abc import Sequence

from gspo.model.chat.prompts import MAX_CHARS_PER_TOKEN
from gspo.model.policy import Policy
from gspo.rollout.episodes.episode import EnvironmentEpisode, Episode, NoRoom
from gspo.tasks.environments.player import Beginning, EnvironmentFailed, failure


def prompt_text(policy: Policy, beginning: Beginning, positions: int | None) -> str:
    """Return the messages and tools of an episode's beginning as the text of a prompt.

    Raises EnvironmentFailed if the chat template cannot write them. Raises NoRoom, without
    tokenizing, for a text of more than 64 characters per position: tokenizing it could take
    minutes, and it would fit only if it were almost all blanks."""
    try:
        text = policy.prompts.write(policy.tokenizer, beginning.messages, beginning.tools)
    # a template raises any exception for a message that it does not expect
    except Exception as error:
        reason = f"the chat template refuses what reset returned: {failure(error)}"
        raise EnvironmentFailed("environment-error", reason) from error
    if positions is not None and len(text) > MAX_CHARS_PER_TOKEN * positions:
        raise NoRoom(f"{len(text)} characters", positions)
    return text


def encode(
    policy: Policy, group: Sequence[Episode], texts: Sequence[str | None], positions: int | None
) -> None:
    """Encode the prompt of a group's episodes that have begun.

    The texts are None for a problem without environment. An episode of an environment ends without
    a reward if its prompt leaves no room for a response. It keeps no prompt, as no policy has read
    it. Raises ValueError for such a prompt of a problem without environment, for an empty prompt,
    and for episodes that begin differently."""
    first_episode = group[0]
    first_text = texts[0]
    name = f"problem {first_episode.problem.index} of task {first_episode.problem.task!r}"
    for episode, text in zip(group, texts, strict=True):
        if text != first_text:
            raise ValueError(
                f"{name}: samples {first_episode.sample} and {episode.sample} begin with different "
                "messages, but a group is made of responses to one prompt; let `reset` depend on "
                "the problem alone"
            )
    if first_text is None:
        prompt_ids = policy.encode_prompt(first_episode.problem.prompt)
    else:
        prompt_ids = policy.prompts.encode_written(policy.tokenizer, first_text)
    if not prompt_ids:
        raise ValueError(f"{name} has an empty prompt")
    if positions is None or len(prompt_ids) < positions:
        for episode in group:
            episode.prompt_ids = prompt_ids
        return
    error = NoRoom(f"{len(prompt_ids)} tokens", positions)
    for episode in group:
        if not isinstance(episode, EnvironmentEpisode):
            raise ValueError(f"{name}: {error}; leave it out")
        # the prompt is the result of `reset`, so its length was not known before
        episode.fail(error)
