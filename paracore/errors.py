"""The one exception that means: the user asked for something that cannot be done."""


class UsageError(ValueError):
    """A request that cannot be served; the message names the argument, its value and what would be right.

    It is raised before the communication that it concerns. Where the request is the same on every
    rank, every rank raises it alike.
    """
