"""Runs `gspo train` with an in-process engine that is gone from a chosen moment on, as
vLLM's process may be: `ending_engine.py METHOD CALLS TRAIN...`: from the CALLS-th call of METHOD
on, whatever is asked raises EngineEnded.
"""

import runpy
import sys

from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.local import LocalEngine
from gspo.run import build

METHOD, CALLS = sys.argv[1], int(sys.argv[2])


class Ending(LocalEngine):
    calls = 0

    def load_weights(self, named_tensors) -> None:
        self.count("load_weights")
        super().load_weights(named_tensors)

    def _sample(self, *arguments) -> None:
        self.count("_sample")
        super()._sample(*arguments)

    def count(self, method: str) -> None:
        self.calls += method == METHOD
        if self.calls >= CALLS:
            raise EngineEnded("vLLM's process (process 12) was killed by SIGKILL")


def make_engine(policy, rollout, ranks) -> LocalEngine:
    local = build.local_engine(policy, rollout)
    return Ending(policy, local.batch_rows, local.sampler.model.dtype, ranks=ranks)


build.make_engine = make_engine
sys.argv = ["gspo", "train", *sys.argv[3:]]
runpy.run_module("gspo", run_name="__main__")
