"""Whether a response is right. No torch.

`math` compares answers, `code` grades programs by their tests, `sandbox` runs these programs confined.
"""
