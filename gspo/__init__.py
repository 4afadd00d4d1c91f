"""A research harness for Group Sequence Policy Optimization (arXiv:2507.18071) and its rivals.

docs/architecture.md has the map of the packages.
"""

from pathlib import Path

# gspo.analysis is the folder analysis/. In a checkout it lies beside gspo/, else inside it.
if not Path(__file__).with_name("analysis").is_dir():
    __path__.append(str(Path(__file__).parents[1]))
