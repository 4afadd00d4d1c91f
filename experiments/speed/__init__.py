"""Speed: named workloads, what a step of the real trainer costs on them, and TRL beside it."""
