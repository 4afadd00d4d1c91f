"""Names the packages that are installed. Everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# conf/ and sweeps/ are folders of YAML files beside gspo/, which `find_packages` does not find.
setup(packages=[*find_packages(include=["gspo", "gspo.*", "analysis"]), "gspo.conf", "gspo.sweeps"])
