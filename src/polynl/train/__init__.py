"""Training: recipes, the loop shared by all tasks, evaluation and run folders."""
