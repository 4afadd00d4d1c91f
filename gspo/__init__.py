"""A research harness for Group Sequence Policy Optimization (arXiv:2507.18071) and its rivals.

Floors, from the top; a module imports its own floor's helpers and the floors below (tests/test_layers.py):

    config, runs                                 the settings tree, a run's directory; only they know Hydra
    trainer, cold_start                          the loop, the step, the update; the supervised start
    checkpoint, tracking, evaluation             what is kept, what is shown, what is measured on held-out problems
    policy/, rollout/                            models, routing record and replay; engines and rollout sources
    batch, objectives, advantages, diagnostics   pure torch
    tasks/, rewards/                             problems and verifiers; no torch
    records, seeding, metrics                    no torch: the words everybody shares
"""
