"""What a batch costs and how a model is scored, for every task."""
