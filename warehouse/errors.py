"""The exceptions of the whole project, in the lowest layer so that every other one can raise them.

    MemsweepError            exit code   meaning
    ├── BadInput             2           what the user gave cannot be used; nothing was started
    ├── CheckFailed          1           a check or a run did not come out as wanted
    └── CannotFindOut        3           a service, the disk or the network failed on the way
        ├── ServiceDown                  a server did not answer within its deadline
        └── WarehouseBusy                another process holds the warehouse's writer lock

Expected outcomes of a run (out of memory, refused, crashed, ...) are values of
:class:`warehouse.registry.Outcome`, never exceptions.

Messages are one line: what, where, got, wanted, next step.
"""

from __future__ import annotations


class MemsweepError(Exception):
    """Base of everything this project raises on purpose."""

    exit_code = 3


class BadInput(MemsweepError):
    """What the user gave cannot be used; nothing was started."""

    exit_code = 2


class CheckFailed(MemsweepError):
    """A check or a run did not come out as wanted."""

    exit_code = 1


class CannotFindOut(MemsweepError):
    """A service, the disk or the network failed on the way: the answer is not known."""


class ServiceDown(CannotFindOut):
    """A server did not answer within its deadline."""


class WarehouseBusy(CannotFindOut):
    """Another process holds the warehouse's writer lock."""
