"""The one training loop, for all tasks, on one process or many."""
