"""Published benchmarks of mathematics and programming."""
