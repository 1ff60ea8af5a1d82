"""The one exception that means: the user asked for something that cannot be done."""


class UsageError(ValueError):
    """A request that cannot be served; the message names the argument, its value and what would be right.

    It is always raised before any communication starts, so that every rank raises it alike.
    """
