"""Objects that are known as long as something else keeps them."""

from __future__ import annotations

import weakref
from typing import TypeVar

Kept = TypeVar("Kept")


class Living(set["weakref.ref[Kept]"]):
    """Weak references to objects that are equal only to themselves.

    A ``weakref.WeakSet`` is the same, and takes several times as long to make and to add to.
    """

    def track(self, one: Kept) -> None:
        """Know ``one`` until it goes."""
        self.add(weakref.ref(one, self.discard))

    def all(self) -> list[Kept]:
        """Those that there are. A finaliser that runs meanwhile may end some, and make others."""
        # A copy is made without an interruption; a list or tuple of a set is not.
        return [one for ref in self.copy() if (one := ref()) is not None]
