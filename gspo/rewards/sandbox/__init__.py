"""Fresh confined processes for untrusted programs.

runner, session    the harness's side: slots, programs and their limits
launch, server     the fork servers, one per slot; their children run `child`, `asserts` or `stdin`
frames, values     messages, and Python values in them
confine, seccomp   Landlock, users and resource limits; the system calls that a program may make
self_test          a few probes before the first use; experiments/audit has the full attacks
"""
