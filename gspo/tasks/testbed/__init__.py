"""The testbed: tasks that generate their problems, some of them played in an environment."""
