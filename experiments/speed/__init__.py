"""Speed: named workloads, the cost of a step of the real trainer on them, and TRL beside it."""
