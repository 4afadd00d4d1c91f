"""An engine whose responses are known."""

from dataclasses import dataclass

import numpy as np

from gspo.data.samples import Response
from gspo.data.seeding import generator
from gspo.distributed.ranks import Ranks
from gspo.rollout.engines.base import Engine


@dataclass
class Demonstrator:
    """An engine that writes the task's demonstrations, with slips drawn by position as the real one
    draws tokens.
    """

    task: object
    slips: float = 0.2
    batch_rows: int = 40
    ranks = Ranks()
    in_chunks = True
    stream = Engine.stream
    chunks = Engine.chunks
    problems_at_once = Engine.problems_at_once
    _largest_count = Engine._largest_count

    def generate(self, request, on_finished=None):
        groups = [
            [
                self.respond(p, i, (*request.random_key, p.task, p.index, i), request.policy_step)
                for i in range(request.group_size)
            ]
            for p in request.problems
        ]
        if on_finished:
            on_finished([r for group in groups for r in group])
        return groups

    def fits(self, problem, new_tokens):
        return True

    def respond(self, problem, sample, random_key, step):
        text = self.task.demonstration(problem, self.slips, generator(*random_key))
        return Response(
            problem, sample, [1], [2] * len(text), np.zeros(len(text)), "stop", text, step
        )
