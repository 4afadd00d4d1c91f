"""An engine outside the process without vLLM: what is behind `ask` draws tokens from each request's
own seed, and ends requests in the order of their lengths, as one that samples them all at once
does."""

import numpy as np

from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.engines.vllm_base import VLLMEngineBase
from gspo.rollout.engines.vllm_host import Completion
from gspo.rollout.vllm_settings import VLLMRollout


class Drawn(VLLMEngineBase):
    """Samples `batch_rows` requests at a time, a token of each per round; those that were added
    later wait.
    """

    def __init__(
        self, policy: Policy, batch_rows: int, ranks: Ranks | None = None, together: int = 1
    ):
        super().__init__(policy, VLLMRollout(batch_rows=batch_rows), ranks or Ranks())
        self.sharers = self.ranks.subgroup(together) if ranks else Ranks()
        self.waiting: dict[str, Completion] = {}
        self.running: dict[str, tuple[Completion, int]] = {}  # with the tokens that are left
        self.most, self.idle_places, self.rounds = 0, 0, 0

    def _ask(self, method, *arguments):
        return {"add": self.add, "ended": self.ended, "generate": self.generate}[method](*arguments)

    def generate(self, prompts, params):
        """Responses that end with a stop token."""
        sampled = [drawn(own) for own in params]
        for one, own in zip(sampled, params, strict=True):
            one.token_ids[-1] = own["stop_token_ids"][0]
        self.rounds += 1
        return sampled

    def add(self, names, prompts, params):
        for name, own in zip(names, params, strict=True):
            self.waiting[name] = drawn(own)
        self.most = max(self.most, len(self.waiting) + len(self.running))

    def ended(self):
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.batch_rows:
                name = next(iter(self.waiting))
                sampled = self.waiting.pop(name)
                self.running[name] = sampled, len(sampled.token_ids)
            self.rounds += 1
            self.idle_places += self.batch_rows - len(self.running)
            self.running = {
                name: (sampled, left - 1) for name, (sampled, left) in self.running.items()
            }
            if done := {
                name: sampled for name, (sampled, left) in self.running.items() if not left
            }:
                self.running = {
                    name: pair for name, pair in self.running.items() if name not in done
                }
                return done
        return {}

    def close(self):
        pass


def drawn(params) -> Completion:
    rng = np.random.Generator(np.random.Philox(key=params["seed"]))
    tokens = [
        int(token) for token in rng.integers(20, 40, rng.integers(1, params["max_tokens"] + 1))
    ]
    return Completion(tokens, [-1.0] * len(tokens), None, "stop")
