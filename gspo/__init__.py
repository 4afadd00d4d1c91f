"""A research harness for Group Sequence Policy Optimization (arXiv:2507.18071) and its rivals.

docs/architecture.md has the map of the packages.
"""
