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
    stream, chunks, _most = Engine.stream, Engine.chunks, Engine._most

    def generate(
        self,
        problems,
        group_size,
        sampling,
        seed,
        policy_step=0,
        *,
        record_experts=False,
        finished=None,
    ):
        groups = [
            [
                self.respond(p, i, (*seed, p.task, p.index, i), policy_step)
                for i in range(group_size)
            ]
            for p in problems
        ]
        if finished:
            finished([r for group in groups for r in group])
        return groups

    def fits(self, problem, new_tokens):
        return True

    def respond(self, problem, sample, position, step):
        text = self.task.demonstration(problem, self.slips, generator(*position))
        return Response(
            problem, sample, [1], [2] * len(text), np.zeros(len(text)), "stop", text, step
        )
