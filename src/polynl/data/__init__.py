"""Data sets, and what is done to an image before a network sees it."""
