"""Names the packages that are installed. Everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# These folders lie beside gspo/ in a checkout and inside it where it is installed.
BESIDE = ["gspo.analysis", "gspo.conf", "gspo.sweeps"]
setup(packages=[*find_packages(include=["gspo", "gspo.*"]), *BESIDE])
