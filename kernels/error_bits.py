"""Bits of `Sample.error` and `Verification.error`, whose docstring says what each one stands for."""

NAN_TARGET = 1
NAN_DRAFT = 2
EMPTY_SUPPORT = 4
DRAFT_OUT_OF_RANGE = 8
DRAFT_IMPOSSIBLE = 16
ZERO_RESIDUAL = 32
