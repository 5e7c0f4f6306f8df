"""Networks on images larger than memory, from the command line."""
