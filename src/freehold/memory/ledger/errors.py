"""Errors of page accounting."""


class OutOfPages(Exception):
    """More pages were requested than are free. Nothing was changed."""


class BrokenInvariant(Exception):
    """An invariant is broken. Always a bug, and the engine can't continue."""


class OwnershipError(BrokenInvariant):
    """A move named a page that its alleged owner does not own. Nothing was changed.

    The message carries the page, both owners and the page's recent history.
    """


class LeaseError(BrokenInvariant):
    """A lease was used against its contract, for example released twice."""


class AuditError(BrokenInvariant):
    """The recount of all pages disagrees with the ledger."""
