"""Tasks: each folder holds the config, data, model, metric and task of one."""
