"""A network up to one of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class _Reached(BaseException):  # not an Exception, which a model may catch
    """Ends a forward pass at the module that it was for."""


class Until(nn.Module):
    """Runs a model until a module is called; returns its output or, with `before`, its first input.

    Modules keep their names. If the module is called several times, its first call counts.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
    >>> Until(model, "1")(torch.rand(1, 3, 8, 8)).shape
    torch.Size([1, 8, 4, 4])
    """

    def __init__(self, model: nn.Module, module: str, *, before: bool = False) -> None:
        super().__init__()
        names = [name for name, _ in model.named_modules() if name]
        if module not in names:
            raise ValueError(f"{type(model).__name__} has no module {module!r}; it has {_listed(names)}")
        self.model, self._module, self._before = model, module, before
        self.training = model.training

    def forward(self, image: Tensor) -> Any:
        """See the class."""
        found: list[Any] = []

        def end(value: Any) -> None:
            found.append(value)
            raise _Reached

        module = self.model.get_submodule(self._module)
        handle = (
            module.register_forward_pre_hook(lambda _, args: end(args[0]))
            if self._before
            else module.register_forward_hook(lambda _, args, output: end(output))
        )
        try:
            self.model(image)
        except _Reached:
            return found[0]
        finally:
            handle.remove()
        raise ValueError(f"{self._module} is not called in {type(self.model).__name__}'s forward pass")

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Those of the model, by the names that they have there."""
        return self.model.named_modules(*args, **options)

    def get_submodule(self, target: str) -> nn.Module:
        """By the name that it has in the model."""
        return self.model.get_submodule(target)


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
