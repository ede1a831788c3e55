"""The store of an optimizer, which is opened again when it has to be."""

from __future__ import annotations

from nearstep.storage.store import Store
from nearstep.torch.homes.errors import ResumeError


class HeldStore:
    """A store that a commit may leave in doubt, or that was unlocked after an error.

    Parameters
    ----------
    owns : it was opened for the optimizer alone, which closes it.

    Attributes
    ----------
    last : the store as it was opened last.
    """

    def __init__(self, store: Store, *, owns: bool) -> None:
        self.last = store
        self._owns = owns
        self._is_stale = self._is_released = False
        self._doubt: int | None = None

    @property
    def store(self) -> Store:
        """The store, open, at the last generation that counts.

        Raises
        ------
        ResumeError : another optimizer has made steps since `release`.
        StorageError
        """
        if self._is_stale:
            self._open()
        return self.last

    def _open(self) -> None:
        before = self.last
        if not self._is_released:
            self.last = Store(before.drives)
        else:
            opened = Store.open([drive.name for drive in before.drives], owner=None)
            last, found = before.generation, opened.generation
            same = opened.drives[0].header.set_id == before.drives[0].header.set_id
            if not same or found not in (last, self._doubt):
                opened.close()
                raise ResumeError(f"generation {last} of this optimizer", f"another's {found}")
            self.last = opened
        self._is_stale = self._is_released = False
        self._doubt = None

    def doubt(self, generation: int) -> None:
        """A generation may count: the drives are read again before the store is used."""
        self._is_stale, self._doubt = True, generation

    def release(self) -> None:
        """Unlock the drives, if the optimizer has opened them, until the store is used."""
        if self._owns:
            self.last.close()
            self._is_stale = self._is_released = True

    def close(self) -> None:
        """Give the drives back."""
        self.last.close()
