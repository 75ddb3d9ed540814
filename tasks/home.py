"""Where everything lies in the state folder, so that no other module joins these names again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from warehouse.errors import BadInput

VARIABLE = "MEMSWEEP_HOME"


@dataclass(frozen=True, slots=True)
class Home:
    """The state folder: ``.memsweep`` in the current directory, or what MEMSWEEP_HOME names."""

    root: Path

    @classmethod
    def find(cls) -> Home:
        """Return the state folder in force; it need not exist yet.

        Raises :class:`BadInput` where it cannot be a folder.
        """
        text = os.environ.get(VARIABLE) or ".memsweep"
        try:
            root = Path(text).expanduser().resolve()
            existing = next(path for path in (root, *root.parents) if path.exists())
        except (OSError, RuntimeError, ValueError) as error:
            raise BadInput(f"{VARIABLE} is {text[:200]!r}: not a usable path ({error})") from error
        if not existing.is_dir():
            raise BadInput(f"{VARIABLE} is {text[:200]!r}: {existing} is no folder")
        return cls(root)

    @property
    def envs(self) -> Path:
        """Environments: ``engine``, ``bench``, ``polyaxon-server``."""
        return self.root / "envs"

    @property
    def models(self) -> Path:
        """Generated or downloaded models, one folder each."""
        return self.root / "models"

    @property
    def services(self) -> Path:
        """State, logs and data of the embedded services; one folder a service."""
        return self.root / "services"

    @property
    def rounds(self) -> Path:
        """One folder a round: sweep, intents, finished cells, flow runs."""
        return self.root / "rounds"

    @property
    def schedules(self) -> Path:
        """What is scheduled and what came of each night; one file each."""
        return self.root / "schedules"

    @property
    def bundles(self) -> Path:
        """Sealed bundles, one folder a run, named by the run's UUID."""
        return self.root / "bundles"

    @property
    def quarantine(self) -> Path:
        """Bundles that could not be ingested, each with its reason."""
        return self.root / "quarantine"

    @property
    def cache(self) -> Path:
        """Whatever can be made again: engine caches, staged code of the run."""
        return self.root / "cache"

    @property
    def reports(self) -> Path:
        """Pages that were made, and the index over nights."""
        return self.root / "reports"

    @property
    def warehouse_live(self) -> Path:
        """The writer's database file; readers never open it."""
        return self.root / "warehouse" / "live.duckdb"

    @property
    def warehouse_snapshot(self) -> Path:
        """The published database file that readers open."""
        return self.root / "warehouse" / "snapshot.duckdb"
