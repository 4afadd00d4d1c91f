"""Comparing mathematical answers.

verifier    the verdicts for responses
extract     the answer of a response, and its normal form
text        the pieces of an answer, with the help of `literal` and `names`
agree       whether an answer agrees with the gold, the right answer
formula     the formulas that only the library math-verify can compare
worker      the process that compares them, which can be killed
"""
