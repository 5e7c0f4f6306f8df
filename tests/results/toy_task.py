"""A task that the paper knows nothing about."""

from polynl.tasks.classification.task import Classification


class Toy(Classification):
    """Scored by `top1` only."""

    name = "toy"
    scores = {"top1": "Hits"}  # noqa: RUF012
    headline = ("top1",)
    network = "Toy, {arch},"
    paper = None
