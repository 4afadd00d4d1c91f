"""The mathematics as functions of tensors: objectives, aggregation, advantages, reward shaping, KL,
corrections.
"""
