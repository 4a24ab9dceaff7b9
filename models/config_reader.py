"""Typed access to what a config file says; every complaint names the file, the key, what came and what is allowed."""

from __future__ import annotations

from typing import Any

from fused_spec.errors import InvalidInput

REQUIRED: Any = object()
_MAX_SIZE = 2**31 - 1
_LEAST, _MOST = 1e-30, 1e30  # beyond, a float32 made of the number may overflow


class ConfigReader:
    """Reads a dictionary that came out of a file; a null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it stands."""
        value = self.values.get(self.prefix + key)
        if value is None and default is REQUIRED:
            raise InvalidInput(f"{self.where}: {self.prefix + key} is missing")
        return default if value is None else value

    def refuse(self, key: str, value: Any, allowed: str) -> InvalidInput:
        """The error for a value that is not allowed."""
        return InvalidInput(f"{self.where}: {self.prefix + key} is {shortened(value)}; allowed: {allowed}")

    def size(self, key: str, default: int = REQUIRED, limit: int = _MAX_SIZE) -> int:
        """An integer from 1 to `limit`."""
        value = self.get(key, default)
        # bool is a subclass of int, and `true` is not a size
        if type(value) is not int or not 1 <= value <= limit:
            raise self.refuse(key, value, f"an integer from 1 to {limit}")
        return value

    def positive(self, key: str, default: float = REQUIRED) -> float:
        """A number from 1e-30 to 1e30."""
        value = self.get(key, default)
        # compared before any conversion: an integer beyond the range of a float would overflow in float()
        if type(value) not in (int, float) or not _LEAST <= value <= _MOST:
            raise self.refuse(key, value, f"a number from {_LEAST:g} to {_MOST:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, value, "true or false")
        return value

    def only(self, key: str, allowed: Any) -> None:
        """Refuses a stated value other than `allowed`; equal numbers of different type are the same."""
        value = self.get(key, allowed)
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise self.refuse(key, value, f"{allowed!r} or absent")


def shortened(value: Any) -> str:
    """A value's text for an error message, of bounded length."""
    try:
        text = repr(value)
    except RecursionError:  # nested just less deep than the JSON parser allows
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
