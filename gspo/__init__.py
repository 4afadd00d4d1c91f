"""A research harness for Group Sequence Policy Optimization (arXiv:2507.18071) and its rivals.

Floors, from the top; a module imports its own floor's helpers and the floors below (tests/test_layers.py):

    config, commands, checks                     the settings tree, those of other entry points, what is refused
    schema                                       dataclasses as Hydra's schema and back, unknown keys, plain messages
    process, runs, sweeps                        how a process ends; a run's directory; which runs a sweep plans
    session, rollback                            a run under way: rows, checkpoints; going back after a collapse
    run_report, dashboard                        a run's page; W&B's saved views
    benchmark/                                   workloads, what a step costs, TRL beside it, scaling curves
    assembly                                     the parts of a run put together
    trainer, trainer_settings, cold_start        the loop, the step, the update; the supervised start
    checkpoint, tracking, evaluation, compute    what is kept, what is shown, held-out problems, what a step cost
    wandb_run                                    a run as W&B has it: its id, what is sent again, tables, summary
    evaluation_files, monitor                    an evaluation's folder; early warnings and the report of a run
    policy/, rollout/                            models, our forward, routing, critic; engines, sources, samplers
    peers/                                       the settings of other frameworks in terms of these, for parity
    objectives/, aggregation, terms              the loss of every token, of a batch, and its addends
    reward_shaping, advantages, kl, corrections, credit    from rewards to the advantage of every token
    batch, masked, diagnostics, tally            responses as tensors; sums under a mask; metrics
    estimates, elo                               what a score is worth: avg@k, pass@k, maj@k, ratings; no torch
    tasks/, rewards/                             problems and benchmarks; math verifier, code grader, sandbox; no torch
    records, seeding, metrics, views             no torch: the words everybody shares; which metrics belong together
    ranges, arguments                            no torch: which numbers a setting may have; key=value, nearest names
    run_files, ownership, sweep_state            no torch: reading and writing run directories, whose they are; sweeps
    collapse                                     no torch: has a run collapsed, and what could have been seen before
    shown, bounded                               no torch: what data may do where it is shown; reading strange files
    interrupt, quiet                             no torch: Ctrl-C while libraries load; no telemetry
"""

from gspo.quiet import turn_off_telemetry

turn_off_telemetry()
