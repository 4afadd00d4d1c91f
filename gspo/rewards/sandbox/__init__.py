"""Fresh confined processes for untrusted programs.

runner, session    the harness's side: slots, programs and their limits
launch, server     the fork servers, whose children run `child`, `asserts` or `stdin`
frames, values     messages, and Python values in them
confine, seccomp   Landlock, users, resource limits and the system calls of a program
self_test          a few probes before the first use (all attacks are in experiments/audit)
"""
