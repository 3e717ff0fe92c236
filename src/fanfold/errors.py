"""Every exception a user of fanfold can meet.

Each says what is wrong, what was found, what was expected and what to do next; the four parts are also fields,
so that `--json` and callers can print them apart. Each class is also the builtin a caller would expect to catch.
"""

from __future__ import annotations


class FanfoldError(Exception):
    """Base of all errors raised by fanfold.

    Args:
        what: the file, tensor, argument or operation at fault.
        found: what was there.
        expected: what should have been there.
        next_step: a call, flag or command that mends it.
    """

    def __init__(self, what: str, *, found: str, expected: str, next_step: str) -> None:
        self.what = what
        self.found = found
        self.expected = expected
        self.next_step = next_step
        super().__init__(f"{what}: found {found}; expected {expected}. {next_step}")

    def __reduce__(self) -> tuple[object, ...]:  # so that errors survive a process pool
        return _rebuild, (type(self), self.what, self.found, self.expected, self.next_step)

    def as_dict(self) -> dict[str, str]:
        """The parts of the message by name, plus the class name under `error`."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "found": self.found,
            "expected": self.expected,
            "next_step": self.next_step,
        }


def of_file(error: FanfoldError, path: str) -> FanfoldError:
    """The same error, its `what` preceded by the file or directory it was met in; as it is where it names that."""
    if path in error.what:
        return error
    return type(error)(f"{path}: {error.what}", found=error.found, expected=error.expected, next_step=error.next_step)


class CheckpointWarning(UserWarning):
    """A checkpoint runs, but looks as if something in it were not as its config says."""


def _rebuild(cls: type[FanfoldError], what: str, found: str, expected: str, next_step: str) -> FanfoldError:
    return cls(what, found=found, expected=expected, next_step=next_step)


class ArgumentError(FanfoldError, ValueError):
    """An argument of a call has a wrong value, shape, dtype, device or length."""


class MissingFileError(FanfoldError, FileNotFoundError):
    """A file that a checkpoint or an adapter needs is not there."""


class CorruptFileError(FanfoldError, ValueError):
    """A file is there but can't be read as what it should be."""


class ConfigError(FanfoldError, ValueError):
    """A field of a configuration file is missing, malformed, or contradicts another file."""


class UnsupportedError(FanfoldError, ValueError):
    """Well-formed, but of a kind that fanfold does not run (a format, a bit width, an adapter feature)."""


class TensorError(FanfoldError, ValueError):
    """A tensor of a checkpoint or an adapter is missing, has a wrong shape or dtype, or holds impossible values."""


class MissingExpertsError(TensorError):
    """A checkpoint lacks experts, or tensors of experts, that its model needs."""


class AdapterMismatchError(FanfoldError, ValueError):
    """An adapter was made for another model: unlike shapes, layers, experts or targets."""


class UnknownAdapterError(FanfoldError, LookupError):
    """No adapter of that name is loaded."""


class AdapterExistsError(FanfoldError, ValueError):
    """An adapter of that name is loaded already."""


class AdapterBusyError(FanfoldError, RuntimeError):
    """The adapter is in use by a running `using` block."""


class PoolFullError(FanfoldError, RuntimeError):
    """Every slot of the pool holds an adapter."""


class DeviceMemoryError(FanfoldError, MemoryError):
    """The device has no room for what was to be loaded or computed; what was loaded before is as it was."""


class UnavailableError(FanfoldError, RuntimeError):
    """What was asked for can't run here: a device, an arch, a package or an implementation is missing."""


class RankError(FanfoldError, RuntimeError):
    """A rank of a process group is gone, has failed, or holds something else than the others."""


class InferenceOnlyError(FanfoldError, RuntimeError):
    """Backward was called through an operation of fanfold."""
