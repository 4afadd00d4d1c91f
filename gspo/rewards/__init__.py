"""Judge whether a response is right. This package does not use torch.

`math` compares answers, `code` grades programs by their tests, and `sandbox` runs these programs
confined. `reward_function` calls a user's function.
"""
