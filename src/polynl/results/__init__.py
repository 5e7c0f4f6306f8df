"""Results as plain data: trainings, studies and benchmarks, with their tables and charts."""
