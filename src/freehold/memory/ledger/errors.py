"""What can go wrong with pages."""


class OutOfPages(Exception):
    """An allocation asked for more pages than are free. Nothing was changed."""


class OwnershipError(Exception):
    """A move named a page that its alleged owner does not own. Always a bug; nothing was changed.

    The message carries the page, both owners and the page's recent history.
    """


class LeaseError(Exception):
    """A lease was used against its contract, for example released twice."""


class AuditError(Exception):
    """The recount of all pages disagrees with the ledger."""
