"""A research harness for Group Sequence Policy Optimization (arXiv:2507.18071) and its rivals.

The rooms, from the top. A room imports rooms below it and never above; no two rooms import each
other, and no module imports one that imports it (tests/unit/test_layers.py).

    commands/      what `gspo train ...` and its like call; the only room that uses the package
                   analysis
    checking/      what `gspo check` looks at: kernels, engine against trainer, resume, speed
    run/           one run from outside: its directory, building its trainer, the loop around the
                   steps, rollback, signals and exit codes, devices, sweeps
    planning/      what a run needs of its GPUs before it starts: memory, traffic, time
    config/        the settings tree, what is refused, the door for outside code; it and the rooms
                   above know Hydra
    train/         the step: trainer, loss terms, credit, diagnostics, checkpoints, the cold start
    evaluation/    held-out evaluation, estimates and intervals, Elo
    rollout/       engines (in this process, vLLM); sources of scored groups: on-policy, stale,
                   partial
    model/         the policy, our own forward, packing, Routing Replay, value head, loading,
                   prompts; transformers
    algorithm/     pure tensors: objectives, aggregation, advantages, reward shaping, KL,
                   corrections
    tasks/         problems and benchmarks; no torch
    tracking/      the registry of metrics, the collapse rule, monitor, tracker (W&B), views, a
                   run's page; no torch
    verifiers/     math answers, programs by their tests, the sandbox; no torch
    core/          what every room shares: types, seeds, files, batches as tensors
"""

from gspo.core.telemetry import turn_off_telemetry

turn_off_telemetry()
