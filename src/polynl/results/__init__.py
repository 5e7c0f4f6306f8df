"""What runs leave behind, as data: trainings and their scores, benchmarks, tables."""
