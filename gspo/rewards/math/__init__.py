"""Comparing mathematical answers.

verifier    the verdict for one response, or for many
extract     where in a response the answer stands
text        what an answer is made of, with the help of `literal` and `names`
agree       whether it agrees with the gold, the right answer
formula     what only the library math-verify can compare, in processes that can be killed
            (`worker`)
"""
