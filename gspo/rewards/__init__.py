"""Verifiers. No torch here.

math_verifier    answers: math_extract (where the answer stands), math_literal, math_names and math_text (what it is
                 made of), math_agree (whether it agrees with the gold), math_formula and math_worker (what only
                 math-verify can compare, in processes that can be killed)
code_grader      programs by their tests: values (what equals what), asserts and code_child (in the child)
code_runner      fresh confined processes: code_launch, code_session, code_server, code_stdin, confine, seccomp
sandbox_check    a few attacks at the first use; attacks/ has all of them, hostile the answers; audit a user's own
"""
