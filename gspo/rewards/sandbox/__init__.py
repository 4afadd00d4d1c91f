"""Fresh confined processes for untrusted programs.

runner, session    what the harness calls: slots, programs and their limits
launch, server     the fork servers, one per slot; `child`, `asserts`, `stdin` and `values` run in
                   what they fork
confine, seccomp   Landlock, users and resource limits; the system calls that a program may make
self_test          a few attacks (`quick_attacks`) before the first use; experiments/audit has all
                   of them
"""
