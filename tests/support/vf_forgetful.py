"""A harness of the library verifiers that shows the policy the last message alone."""

from gspo.tasks.adapters.vf_chat import ChatHarness

__all__ = ["ForgetfulHarness"]


class ForgetfulHarness(ChatHarness):
    def resolve_prompt(self, task):
        system, prompt = super().resolve_prompt(task)
        return system, prompt if isinstance(prompt, str) else prompt[-1:]
