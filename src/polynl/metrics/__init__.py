"""Scores that libraries compute, over what our tasks find."""
