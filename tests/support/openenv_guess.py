"""A server of OpenEnv, as its environments have one: `uvicorn openenv_guess:app`."""

import random

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Seen(Observation):
    prompt: str
    tries: int = 0


class GuessNumber(Environment):
    """A number from 1 to `most` is to be guessed in five tries; "crash" is too much for it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, most=9, **kwargs):
        self.secret, self.tries = random.Random(seed).randint(1, most), 0
        return Seen(prompt=f"Guess a number from 1 to {most}.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "crash":
            raise RuntimeError("too much")
        self.tries += 1
        right = action.message == str(self.secret)
        said = "right" if right else "wrong"
        return Seen(
            prompt=said, tries=self.tries, reward=float(right), done=right or self.tries == 5
        )

    @property
    def state(self):
        return State()


app = create_fastapi_app(GuessNumber, Guess, Seen, max_concurrent_envs=32)
