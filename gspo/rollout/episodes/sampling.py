"""Plays problems in their environments: the engine samples the policy's turns, environments answer.

A chunk of episodes goes through its turns together. All episodes sample their turn. Then all
environments answer at the same time. The episodes that go on sample the next turn, with the tokens
of the answer appended to their own. So the samples do not depend on the speed of an environment,
and a resumed run samples its episodes again to the bit.

Problems without an environment may be among them. They have one turn, and their responses equal
those of `Engine.generate` to the bit.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from gspo.data.kept_tokens import KeptTokens
from gspo.data.samples import Problem, Response, Turn
from gspo.model.chat.conversation import Conversation
from gspo.rollout.engines.base import Engine, Groups, OnFinished, grouped
from gspo.rollout.engines.requests import Row, SamplingRequest
from gspo.rollout.episodes.beginning import encode, prompt_text
from gspo.rollout.episodes.episode import (
    CUT,
    ENVIRONMENT,
    POLICY,
    EnvironmentEpisode,
    Episode,
    Seconds,
    begin_calls,
)
from gspo.tasks.base import Task
from gspo.tasks.environments.player import Call, EnvironmentFailed, all_closed
from gspo.tasks.environments.protocol import Outcome

log = logging.getLogger(__name__)
OnEnded = Callable[[list[Episode]], None]


def play(
    engine: Engine,
    task: Task,
    request: SamplingRequest,
    on_finished: OnFinished | None = None,
    seconds: Seconds | None = None,
) -> Groups:
    """Play `group_size` episodes of each problem, and return them group by group.

    Episodes of environments have their scores, other responses have none yet. An episode gets a
    score without reward if its environment failed, or if its prompt leaves no room for a response.
    `on_finished` is as in `Engine.generate`. The seconds of environments are added to `seconds`.

    Raises ValueError if the samples of a problem begin with different messages, and for a prompt
    without environment that leaves no room for a response."""
    responses: list[Response] = []
    for chunk in engine.chunks(request):
        responses += Play(engine, task, chunk, seconds or Seconds()).run(on_finished)
    return grouped(responses, request.group_size)


class Play:
    """Plays the episodes of one chunk of problems."""

    def __init__(self, engine: Engine, task: Task, request: SamplingRequest, seconds: Seconds):
        self.engine = engine
        self.policy = engine.policy
        self.request = request
        self.seconds = seconds
        self.tasks = task.environments()  # by `Problem.task`
        self.reward_weights = task.reward_weights
        self.episodes: list[Episode] = []
        self.environment_episodes: list[EnvironmentEpisode] = []
        # read once: the property goes through the whole configuration of the model
        self.positions = engine.positions
        self.conversations: dict[str, Conversation] = {}  # by the chat role of observations
        self.closing: list[Call] = []  # closes the environments of second plays

    def run(self, on_finished: OnFinished | None) -> list[Response]:
        """Play all episodes to their ends, and return them as responses, in order.

        Environments are closed on return, unless that takes longer than `step_seconds`."""
        responses: dict[int, Response] = {}

        def on_ended(episodes: list[Episode]) -> None:
            settled = [episode for episode in episodes if not is_unsettled(episode)]
            new = {episode.index: self.response(episode) for episode in settled}
            responses.update(new)
            if on_finished and new:
                on_finished(list(new.values()))

        try:
            self._begin()
            on_ended([episode for episode in self.episodes if episode.finish_reason])
            alive = [episode for episode in self.episodes if not episode.finish_reason]
            rows = [self._row(episode) for episode in alive]
            # an episode that ended at once leaves its group with fewer rows of the same prefix
            groups_are_complete = len(alive) == len(self.episodes)
            rows_per_prefix = self.request.group_size if groups_are_complete else 1
            self.engine.converse(
                rows, rows_per_prefix, self.request, partial(self._answer, on_ended)
            )
            on_ended(self._settle())
            self._replay()
        finally:
            self._close()
        return [responses[index] for index in range(len(self.episodes))]

    def _close(self) -> None:
        """Close all environments at the same time, and wait for them.

        Their resources outside this process, such as containers, would outlive it otherwise."""
        started = time.perf_counter()
        closing = list(self.closing)
        closing += [
            episode.close() for episode in self.environment_episodes if not episode.is_closed
        ]
        not_closed = all_closed(closing)
        if not_closed:
            log.warning(
                "%d environments were not closed in time: what they hold may be left over",
                not_closed,
            )
        self.seconds.environments += time.perf_counter() - started

    def _begin(self) -> None:
        """Begin all episodes, and encode their prompts. Raises ValueError as `encode` does."""
        for problem in self.request.problems:
            for sample in range(self.request.group_size):
                self._add_episode(problem, sample)
        started = time.perf_counter()
        texts: dict[int, str] = {}
        for episode, call in begin_calls(
            self.environment_episodes, EnvironmentEpisode.begin_to_reset
        ):
            try:
                beginning = episode.player.finish(call)
                episode.role = beginning.role
                texts[episode.index] = prompt_text(self.policy, beginning, self.positions)
            except EnvironmentFailed as error:
                episode.fail(error)
        self.seconds.environments += time.perf_counter() - started
        for group in grouped(self.episodes, self.request.group_size):
            begun = [episode for episode in group if not episode.finish_reason]
            if begun:
                group_texts = [texts.get(episode.index) for episode in begun]
                encode(self.policy, begun, group_texts, self.positions)

    def _add_episode(self, problem: Problem, sample: int) -> None:
        """Add an episode that has not begun."""
        index = len(self.episodes)
        task = self.tasks.get(problem.task)
        if task is None:
            self.episodes.append(Episode(index, problem, sample))
            return
        random_key = (*self.request.random_key, problem.task, problem.index, sample)
        episode = EnvironmentEpisode(
            index,
            problem,
            sample,
            task=task,
            random_key=random_key,
            group_size=self.request.group_size,
            reward_weights=self.reward_weights,
        )
        self.episodes.append(episode)
        self.environment_episodes.append(episode)

    def _limit(self, episode: Episode) -> int:
        """Return how many tokens the policy may still write in an episode."""
        tokens_left = self._tokens_left(episode)
        if self.positions is None:
            return tokens_left
        return min(tokens_left, self.positions - episode.filled_positions)

    def _tokens_left(self, episode: Episode) -> int:
        """Return how many tokens max_new_tokens leaves to the policy."""
        written = sum(turn.tokens for turn in episode.policy_turns)
        return self.request.sampling.max_new_tokens - written

    def _row(self, episode: Episode) -> Row:
        """Return the row that samples an episode's next turn."""
        return Row(
            episode.problem,
            episode.sample,
            episode.prompt_ids + episode.token_ids,
            done=len(episode.token_ids),
            limit=self._limit(episode),
            experts=[] if episode.experts is None else [episode.experts],
            episode_index=episode.index,
            begins_turn=True,
        )

    def _answer(self, on_ended: OnEnded, rows: list[Row]) -> list[Row]:
        """Let the environments answer the sampled turns, and return the rows of the next turn."""
        episodes = [self.episodes[row.episode_index] for row in rows]
        for episode, row in zip(episodes, rows, strict=True):
            self._append_policy_turn(episode, row)
        waiting = [
            episode
            for episode in episodes
            if isinstance(episode, EnvironmentEpisode) and not episode.finish_reason
        ]
        started = time.perf_counter()
        for episode, call in begin_calls(waiting, EnvironmentEpisode.begin_to_answer):
            try:
                self._react(episode, episode.player.finish(call))
            except EnvironmentFailed as error:
                episode.fail(error)
        self.seconds.environments += time.perf_counter() - started
        on_ended([episode for episode in episodes if episode.finish_reason])
        return [self._row(episode) for episode in episodes if not episode.finish_reason]

    def _append_policy_turn(self, episode: Episode, row: Row) -> None:
        """Append the turn that the policy has sampled.

        The episode ends if the turn is cut off, or if there is no environment."""
        reason_if_cut = "context"
        if self._limit(episode) == self._tokens_left(episode):
            reason_if_cut = "length"
        text = self.policy.text(row.token_ids)
        episode.token_ids += row.token_ids
        episode.logprobs += row.logprobs
        episode.turns.append(Turn(POLICY, len(row.token_ids), text))
        if row.kept is not None:
            episode.kept = row.kept if episode.kept is None else episode.kept.followed_by(row.kept)
        if row.experts:
            experts = np.concatenate(row.experts)
            earlier = experts[:0] if episode.experts is None else episode.experts
            episode.experts = np.concatenate([earlier, experts[len(earlier) :]])
        turn_is_complete = row.ends_turn(self.policy, self.request.sampling)
        if not isinstance(episode, EnvironmentEpisode):
            episode.finish_reason = "stop" if turn_is_complete else reason_if_cut
        elif not turn_is_complete:
            episode.end(reason_if_cut, CUT[reason_if_cut])

    def _react(self, episode: EnvironmentEpisode, outcome: Outcome) -> None:
        """Record the environment's answer to the last turn."""
        episode.turns[-1].reward = outcome.reward
        for name, value in outcome.measures.items():
            episode.add(name, value)
        if outcome.done:
            episode.add_rewards(outcome.rewards)
            episode.deferred = outcome.deferred
            episode.end("stop", outcome.verdict, outcome.answer)
        elif len(episode.policy_turns) >= episode.task.turns:
            episode.end("turns", CUT["turns"])
        else:
            self._observe(episode, outcome.observation)

    def _observe(self, episode: EnvironmentEpisode, text: str) -> None:
        """Append the environment's turn. The episode ends if no room is left for another turn."""
        role = episode.role
        if role not in self.conversations:
            self.conversations[role] = Conversation(
                self.policy.tokenizer, self.policy.prompts, self.policy.stop_ids, role
            )
        reply = self.conversations[role].reply(
            text, episode.token_ids[-1], episode.task.observation_tokens
        )
        episode.add("escaped", reply.escaped)
        episode.add("cut", reply.cut)
        added = len(reply.token_ids)
        if self._tokens_left(episode) < 1:
            episode.end("length", CUT["length"])
        elif self.positions is not None and episode.filled_positions + added >= self.positions:
            episode.end("context", CUT["context"])
        elif added:
            episode.turns.append(Turn(ENVIRONMENT, added, reply.text))
            episode.token_ids += reply.token_ids
            episode.logprobs += [float("nan")] * added
            if episode.kept is not None:
                episode.kept = episode.kept.followed_by(KeptTokens.whole_vocabulary(added))

    def _settle(self) -> list[Episode]:
        """Ask the environments for the rewards of unsettled episodes, and return these episodes."""
        started = time.perf_counter()
        episodes = [episode for episode in self.environment_episodes if episode.unsettled()]
        for episode, call in begin_calls(episodes, EnvironmentEpisode.begin_to_settle):
            episode.deferred = False
            episode.settles = False
            try:
                episode.settle(episode.player.finish(call))
            except EnvironmentFailed as error:
                episode.fail(error)
        self.seconds.environments += time.perf_counter() - started
        return list(episodes)

    def _replay(self) -> None:
        """Play some episodes a second time with the same turns, and note differing answers."""
        replays_left: dict[str, int] = {}  # by task
        for episode in self.environment_episodes:
            name = episode.problem.task
            if episode.finish_reason == ENVIRONMENT or len(episode.player.result_digests) < 2:
                continue
            if not replays_left.setdefault(name, episode.task.replays):
                continue
            replays_left[name] -= 1
            # the second environment may need the session of the first one
            self.closing.append(episode.close())
            all_closed(self.closing[-1:])
            fault = episode.fault_of_replay(self.closing)
            episode.add("replay_differs", bool(fault))
            if fault:
                log.warning(
                    "problem %s of task %s: played again with the same seed and the same words of "
                    "the policy, %s; a resumed run may not be the same",
                    episode.problem.index,
                    name,
                    fault,
                )

    def response(self, episode: Episode) -> Response:
        """Return an episode that has ended as a response."""
        response = Response(
            problem=episode.problem,
            sample=episode.sample,
            prompt_ids=episode.prompt_ids,
            token_ids=episode.token_ids,
            logprobs=np.array(episode.logprobs, dtype=np.float32),
            finish_reason=episode.finish_reason,
            text=self.policy.text(episode.token_ids),
            policy_step=self.request.policy_step,
            experts=episode.experts,
            kept=episode.kept,
            rendered=self.policy.rendered(episode.prompt_ids),
        )
        if not isinstance(episode, EnvironmentEpisode):
            return response
        response = replace(response, turns=episode.turns, measures=episode.measures)
        return response.scored(episode.score) if episode.score else response


def is_unsettled(episode: Episode) -> bool:
    """Return whether an episode has ended and waits for its reward."""
    return isinstance(episode, EnvironmentEpisode) and episode.unsettled()
