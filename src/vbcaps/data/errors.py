"""The error of data, in a module that needs nothing: worker processes raise it, too."""


class DataError(Exception):
    """Data that is missing, damaged or of the wrong kind. The message says which file and what to do."""
