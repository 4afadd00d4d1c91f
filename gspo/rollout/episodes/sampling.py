"""Plays problems in their environments: samples the policy's turns, and lets the environments
answer between them.

A chunk of episodes goes through its turns together. All episodes sample their turn; all
environments answer at the same time; those that go on sample the next turn, with the tokens of the
answer behind their own. What is sampled so does not depend on how fast an environment is, and a run
that is resumed samples its episodes again to the bit.

Problems without an environment may be among them: they have one turn, and their responses are those
that `Engine.generate` returns, to the bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from gspo.data.samples import Problem, Response, Turn
from gspo.model.chat.conversation import Conversation
from gspo.rollout.engines.base import Engine, grouped
from gspo.rollout.engines.requests import Row, Sampling
from gspo.rollout.episodes.beginning import encode, written
from gspo.rollout.episodes.episode import CUT, ENVIRONMENT, POLICY, Episode, Seconds, asked
from gspo.tasks.base import Task
from gspo.tasks.environments.player import Call, EnvironmentFailed, all_closed
from gspo.tasks.environments.protocol import Outcome

log = logging.getLogger(__name__)


class Play:
    """Plays the episodes of one chunk of problems."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        problems: list[Problem],
        samples: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        seconds: Seconds,
    ):
        self.engine, self.policy, self.sampling, self.samples = (
            engine,
            engine.policy,
            sampling,
            samples,
        )
        self.seconds = seconds
        tasks, every = (
            task.environments(),
            [(problem, i) for problem in problems for i in range(samples)],
        )
        self.episodes = [
            Episode(place, p, i, (*seed, p.task, p.index, i), tasks.get(p.task))
            for place, (p, i) in enumerate(every)
        ]
        # reading it goes through all of the model's configuration
        self.positions = engine.positions
        self.conversations: dict[str, Conversation] = {}
        self.closing: list[Call] = []  # the environments of second plays

    def run(
        self,
        seed: tuple[int | str, ...],
        record_experts: bool,
        ended: Callable[[list[Episode]], None],
    ) -> None:
        """Play all episodes to their ends; `ended` is called with those that have ended, once for
        each. Environments are closed when it returns, unless that takes them longer than
        `step_seconds`."""
        try:
            self._begin()
            alive = [episode for episode in self.episodes if not episode.finish_reason]
            ended([episode for episode in self.episodes if episode.finish_reason])
            rows = [self._row(episode) for episode in alive]
            # else some have no row beside those of their group
            whole_groups = len(alive) == len(self.episodes)
            answer = partial(self._answer, ended)
            self.engine.converse(
                rows,
                self.samples if whole_groups else 1,
                self.sampling,
                seed,
                record_experts,
                answer,
            )
            self._replay()
        finally:
            self._close()

    def _close(self) -> None:
        """Close all environments at the same time, and wait for them: what they hold outside of
        this process, such as containers, would outlive it otherwise."""
        started = time.perf_counter()
        closing = self.closing + [
            episode.player.close() for episode in self.episodes if episode.player
        ]
        if left := all_closed(closing):
            log.warning(
                "%d environments were not closed in time: what they hold may be left over", left
            )
        self.seconds.environments += time.perf_counter() - started

    def _begin(self) -> None:
        """Begin all episodes, and encode their prompts. Raises ValueError where the samples of a
        problem do not begin alike, and for a prompt that leaves no room for a response where there
        is no environment."""
        played = [episode for episode in self.episodes if episode.task]
        calls = []
        for episode in played:
            episode.player = episode.new_player()
            calls.append(episode.player.begin("reset", episode.problem))
        started = time.perf_counter()
        texts: dict[int, str] = {}
        for episode, call in zip(played, calls, strict=True):
            try:
                beginning = episode.player.finish(call)
                episode.role = beginning.role
                texts[episode.place] = written(self.policy, beginning, self.positions)
            except EnvironmentFailed as error:
                episode.fail(error)
        self.seconds.environments += time.perf_counter() - started
        for group in grouped(self.episodes, self.samples):
            if begun := [episode for episode in group if not episode.finish_reason]:
                encode(
                    self.policy,
                    begun,
                    [texts.get(episode.place) for episode in begun],
                    self.positions,
                )

    def _limit(self, episode: Episode) -> int:
        """Return how many tokens the policy may still write in an episode."""
        left = self._left(episode)
        return left if self.positions is None else min(left, self._room(episode))

    def _left(self, episode: Episode) -> int:
        """Return how many tokens the limit leaves to the policy."""
        return self.sampling.max_new_tokens - sum(turn.tokens for turn in episode.own_turns)

    def _room(self, episode: Episode) -> int:
        """Return how many tokens of both sides the model's positions leave."""
        return self.positions - len(episode.prompt_ids) - len(episode.token_ids)

    def _row(self, episode: Episode) -> Row:
        """Return the row that samples an episode's next turn."""
        return Row(
            episode.problem,
            episode.sample,
            episode.prompt_ids + episode.token_ids,
            done=len(episode.token_ids),
            limit=self._limit(episode),
            experts=[] if episode.experts is None else [episode.experts],
            place=episode.place,
            begins_turn=True,
        )

    def _answer(self, ended: Callable[[list[Episode]], None], rows: list[Row]) -> list[Row]:
        """Take the turns that the policy has sampled, let the environments answer, and return the
        rows of the episodes that go on."""
        waiting = []
        for row in rows:
            episode = self.episodes[row.place]
            self._take(episode, row)
            if not episode.finish_reason and episode.player:
                waiting.append(episode)
        started = time.perf_counter()
        for episode, call in asked(waiting):
            try:
                self._react(episode, episode.player.finish(call))
            except EnvironmentFailed as error:
                episode.fail(error)
        self.seconds.environments += time.perf_counter() - started
        episodes = [self.episodes[row.place] for row in rows]
        ended([episode for episode in episodes if episode.finish_reason])
        return [self._row(episode) for episode in episodes if not episode.finish_reason]

    def _take(self, episode: Episode, row: Row) -> None:
        """Add the turn that the policy has sampled. The episode ends if it is cut off, or has no
        environment.
        """
        reason = "length" if self._limit(episode) == self._left(episode) else "context"
        text = self._text(row.token_ids)
        episode.token_ids += row.token_ids
        episode.logprobs += row.logprobs
        episode.turns.append(Turn(POLICY, len(row.token_ids), text))
        if row.experts:
            experts = np.concatenate(row.experts)
            before = experts[:0] if episode.experts is None else episode.experts
            episode.experts = np.concatenate([before, experts[len(before) :]])
        whole = row.ends_turn(self.policy, self.sampling)
        if not episode.task:
            episode.finish_reason = "stop" if whole else reason
        elif not whole:
            episode.end(reason, CUT[reason])

    def _react(self, episode: Episode, outcome: Outcome) -> None:
        """Take what the environment has answered to the last turn."""
        episode.turns[-1].reward = outcome.reward
        for name, value in outcome.measures.items():
            episode.add(name, value)
        if outcome.done:
            episode.end("stop", outcome.verdict, outcome.answer)
        elif len(episode.own_turns) >= episode.task.turns:
            episode.end("turns", CUT["turns"])
        else:
            self._observe(episode, outcome.observation)

    def _observe(self, episode: Episode, text: str) -> None:
        """Put the environment's turn behind the policy's. The episode ends if it leaves no room for
        another.
        """
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
        if self._left(episode) < 1:
            episode.end("length", CUT["length"])
        elif self.positions is not None and self._room(episode) <= added:
            episode.end("context", CUT["context"])
        elif added:
            episode.turns.append(Turn(ENVIRONMENT, added, reply.text))
            episode.token_ids += reply.token_ids
            episode.logprobs += [float("nan")] * added

    def _text(self, token_ids: list[int]) -> str:
        return self.policy.text(token_ids)

    def _replay(self) -> None:
        """Play some episodes a second time with the policy's words, and note whether the
        environment answers alike.
        """
        left: dict[str, int] = {}
        for episode in self.episodes:
            name = episode.problem.task
            if (
                episode.finish_reason == ENVIRONMENT
                or not episode.player
                or len(episode.player.answers) < 2
            ):
                continue  # there is nothing to compare
            if left.setdefault(name, episode.task.replays):
                left[name] -= 1
                differs = not episode.repeats(self.closing)
                episode.add("replay_differs", differs)
                if differs:
                    log.warning(
                        "problem %s of task %s: played again with the same seed and the same words of the policy, the "
                        "environment answered otherwise; a resumed run may not be the same",
                        episode.problem.index,
                        name,
                    )

    def response(self, episode: Episode, policy_step: int) -> Response:
        """Return an episode that has ended as a response."""
        response = Response(
            problem=episode.problem,
            sample=episode.sample,
            prompt_ids=episode.prompt_ids,
            token_ids=episode.token_ids,
            logprobs=np.array(episode.logprobs, dtype=np.float32),
            finish_reason=episode.finish_reason,
            text=self._text(episode.token_ids),
            policy_step=policy_step,
            experts=episode.experts,
            rendered=self.policy.rendered(episode.prompt_ids),
            turns=episode.turns if episode.task else [],
            measures=episode.measures,
        )
        return response.scored(episode.score) if episode.score else response


def play(
    engine: Engine,
    task: Task,
    problems: list[Problem],
    samples: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    *,
    policy_step: int = 0,
    record_experts: bool = False,
    finished: Callable[[list[Response]], None] | None = None,
    seconds: Seconds | None = None,
) -> list[list[Response]]:
    """Play `samples` episodes of each problem, and return them group by group. The arguments are
    those of `Engine.generate`. Episodes of environments have their scores; other responses have
    none yet.

    An episode whose environment failed, or began with more tokens than there is room for, has a
    score without reward. Raises ValueError where the samples of a problem begin with different
    messages, and for a prompt that leaves no room for a response where there is no environment."""
    responses: list[Response] = []
    for chunk in engine.chunks(problems, samples):
        playing = Play(engine, task, chunk, samples, sampling, seed, seconds or Seconds())
        made: dict[int, Response] = {}

        def ended(
            episodes: list[Episode], playing: Play = playing, made: dict[int, Response] = made
        ) -> None:
            new = {id(episode): playing.response(episode, policy_step) for episode in episodes}
            made |= new
            if finished and new:
                finished(list(new.values()))

        playing.run(seed, record_experts, ended)
        responses += [made[id(episode)] for episode in playing.episodes]
    return grouped(responses, samples)
