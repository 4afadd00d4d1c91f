"""Runs `gspo evaluate` in this process and sends it a signal once it has written so many
responses: `ended_evaluation.py SIGNAL RESPONSES EVALUATE...`.
"""

import os
import runpy
import sys

from gspo.evaluation.resumable import Folder

SIGNAL, RESPONSES = int(sys.argv[1]), int(sys.argv[2])
append, written = Folder.append, 0


def append_and_end(folder: Folder, name: str, groups: list[list[dict]]) -> None:
    global written
    append(folder, name, groups)
    written += sum(map(len, groups))
    if written >= RESPONSES:
        os.kill(os.getpid(), SIGNAL)


Folder.append = append_and_end
sys.argv = ["gspo", "evaluate", *sys.argv[3:]]
runpy.run_module("gspo", run_name="__main__")
