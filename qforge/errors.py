"""Every error that a user can meet, and the exit code that the command line gives it.

QforgeError                      2   something the user gave is wrong
|-- RecipeError                  2   the recipe: file, line, field, what was given, what is allowed
|-- ModelError                   2   a model, adapter or checkpoint cannot be read or does not fit
|-- DataError                    2   a calibration or evaluation text is missing, empty or malformed
|-- OutputError                  2   the output folder cannot be written or read, is locked, or the disk is full
|-- UnsupportedError             2   a combination that we know and refuse (the reason is in the message)
|   `-- NotOnRuntimeError        2   the built-in runtime does not run this model; transformers may
|-- NumericalError               2   weights or statistics from which no sound result can be computed
`-- MissingCapabilityError       3   this machine lacks something (GPU, package, network): what, and how to get it

GateFailure is no error: a failed gate is a result, and `pipeline` reports it in `Results` (exit code 1).
Messages are one readable sentence or two: what was given, what is allowed, what to do.
"""

from __future__ import annotations


class QforgeError(Exception):
    """Base of all errors whose message is written for the user."""

    exit_code = 2


class RecipeError(QforgeError):
    """The recipe is not valid."""


class ModelError(QforgeError):
    """A model, adapter or checkpoint cannot be read, or does not fit."""


class DataError(QforgeError):
    """A text is missing, empty or malformed."""


class OutputError(QforgeError):
    """The output cannot be written, or what a run has kept there not be read."""


class UnsupportedError(QforgeError):
    """A combination that qforge knows and refuses."""


class NotOnRuntimeError(UnsupportedError):
    """The built-in runtime does not run this model; transformers may."""


class NumericalError(QforgeError):
    """No sound result can be computed from these numbers."""


class MissingCapabilityError(QforgeError):
    """This machine lacks something that was asked for."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """What an error of another library says, in its first line; the name of its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def last_line(error: BaseException) -> str:
    """As `first_line`, of a library whose errors end with what they say, after the places in its source."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__).strip()
