"""The one exception raised for input that the caller can mend."""


class InvalidInput(ValueError):
    """One line that says what came and what is allowed. The CLI prints it and exits with status 2."""
