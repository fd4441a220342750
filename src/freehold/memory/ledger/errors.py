"""What can go wrong with pages."""


class OutOfPages(Exception):
    """An allocation asked for more pages than are free. Nothing was changed."""


class BrokenInvariant(Exception):
    """Something that must always hold does not. Always a bug, and the engine can't go on."""


class OwnershipError(BrokenInvariant):
    """A move named a page that its alleged owner does not own. Nothing was changed.

    The message carries the page, both owners and the page's recent history.
    """


class LeaseError(BrokenInvariant):
    """A lease was used against its contract, for example released twice."""


class AuditError(BrokenInvariant):
    """The recount of all pages disagrees with the ledger."""
