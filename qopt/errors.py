"""Errors a user may meet: what, where, why and what to do, each kind with its exit code."""

from __future__ import annotations


class QoptError(Exception):
    """An error that is the user's to mend; printed without a traceback.

    `what` went wrong, `where` (file, line, node, layer), `why`, and `todo`: what to do about it.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        todo: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.todo = what, where, why, todo

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        lines = [head]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.todo:
            lines.append(f"  do:  {self.todo}")
        return "\n".join(lines)


class UsageError(QoptError):
    """Wrong usage or recipe, damaged input, or a missing extra."""

    exit_code = 2


class UnsupportedError(QoptError):
    """A model or target that qopt does not support, a pickle, or a need for remote code."""

    exit_code = 3


class GateError(QoptError):
    """A check or quality gate failed, or `verify` found a difference."""

    exit_code = 4


class LimitError(QoptError):
    """The artifact misses a limit on size or latency."""

    exit_code = 5


class ResourceError(QoptError):
    """Not enough memory or disk, no permission, or no network."""

    exit_code = 6


class ContractError(QoptError):
    """A declared contract is broken."""

    exit_code = 7
