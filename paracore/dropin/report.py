"""What was changed in a model, what was not and why, and the way back."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from paracore.errors import UsageError

_ABSENT = object()


@dataclass(frozen=True)
class Replaced:
    """The module `name` is now served by `by`."""

    name: str
    kind: str
    by: str


@dataclass(frozen=True)
class Left:
    """The module `name` is as it was, and why."""

    name: str
    kind: str
    reason: str


class Derived:
    """A base of classes that take over a module in place: `Changes.adopt` gives them to existing instances.

    A derived class bears the name of the module's own and inherits from it, so that whoever asks for it by
    isinstance or by name still finds it.
    """

    def __repr__(self) -> str:
        # Not by _get_name, by which trainers tell what kind of model they have.
        name = type(self).__name__
        return super().__repr__().replace(f"{name}(", f"{name}[paracore](", 1)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class exists in this process only: pickle, and deepcopy, are told how to make it again.
        mixin, base = type(self).__bases__
        return _new, (mixin, base), self.__dict__


@functools.cache
def _derive(mixin: Any, base: Any) -> Any:  # classes, which mypy does not take for hashable
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (mixin, base), names)


def own_class(module: nn.Module) -> type:
    """Return the class that a module has, or had before it was adopted."""
    return type(module).__bases__[1] if isinstance(module, Derived) else type(module)


def _new(mixin: Any, base: Any) -> Any:
    derived = _derive(mixin, base)
    return derived.__new__(derived)


class Changes:
    """A journal of changes to module trees. `undo` takes them back, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def adopt(self, module: nn.Module, mixin: type[Derived]) -> None:
        """Make `module`, and it alone, an instance of a class derived from `mixin` and its own."""
        own = type(module)
        derived = _derive(cast(Any, mixin), cast(Any, own))
        module.__class__ = derived

        def undo() -> None:
            if type(module) is not derived:
                raise UsageError(f"{own.__name__} was changed again since: undo the later change first")
            module.__class__ = own

        self._undo.append(undo)

    def set_attribute(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of an instance."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before))

    def replace_module(self, root: nn.Module, name: str, new: nn.Module) -> None:
        """Put `new` where root.get_submodule(name) is."""
        before = root.get_submodule(name)
        root.set_submodule(name, new)

        def undo() -> None:
            if root.get_submodule(name) is not new:
                raise UsageError(f"{name} was replaced again since: undo the later change first")
            root.set_submodule(name, before)

        self._undo.append(undo)

    def on_undo(self, step: Callable[[], None]) -> None:
        """Have `step` run when the changes before it are about to be undone."""
        self._undo.append(step)

    def undo(self) -> None:
        """Take all changes back."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


@dataclass
class Report:
    """What `fuse` or `parallelize` did to a model; print it.

    replaced, left: one entry for each module that was looked at, by its name.
    """

    replaced: list[Replaced]
    left: list[Left]
    changes: Changes

    def adopt(self, name: str, module: nn.Module, mixin: type[Derived], by: str) -> None:
        """Adopt a module, and report it."""
        self.replaced.append(Replaced(name, type(module).__name__, by))
        self.changes.adopt(module, mixin)

    def undo(self) -> None:
        """Make the model what it was, bit by bit; weights that were trained since keep what they learned.

        Raises UsageError where somebody has changed the same modules since.
        """
        self.changes.undo()
        self.replaced, self.left = [], []

    def __str__(self) -> str:
        """List what was replaced and left; modules alike but for the numbers in their names in one line."""
        lines = [(entry.name, f"{entry.kind} -> {entry.by}") for entry in self.replaced]
        lines += [(entry.name, f"{entry.kind} left: {entry.reason}") for entry in self.left]
        alike = Counter((re.sub(r"\b\d+\b", "*", name), text) for name, text in lines)
        return "\n".join(
            f"{name or '(model)'}: {text}" + (f" ({count} of them)" if count > 1 else "")
            for (name, text), count in alike.items()
        )
