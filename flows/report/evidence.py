"""The audit text of every number on a page: where it was read, by what it follows, who made it.

Only numbers that are shown get a text, and what a run's numbers have in common stands once, so that
a page of a large sweep stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flows.report.content import Chain, Entry, Proof, Ref, Table
from flows.report.words import one_line

if TYPE_CHECKING:
    import duckdb

    from flows.report.data import Data


class Evidence:
    """Which numbers a page shows, each with the id of its text."""

    def __init__(self, tables: Iterable[Table]) -> None:
        """Take every table of the page: what stands in one is shown."""
        self._refs: dict[Ref, str] = {}
        self._formulas: dict[str, str] = {}
        for table in tables:
            for row in table.rows:
                for entry in row:
                    self._note(entry)

    def _note(self, entry: Entry) -> None:
        if entry.ref is not None:
            self._refs.setdefault(entry.ref, f"e{len(self._refs)}")
        elif entry.formula:
            self._formulas.setdefault(entry.formula, f"f{len(self._formulas)}")

    def link(self, entry: Entry) -> str:
        """Return the id of a cell's text; empty for what is no number."""
        if entry.ref is not None:
            return self._refs[entry.ref]
        return self._formulas[entry.formula] if entry.formula else ""

    @property
    def computed(self) -> tuple[Proof, ...]:
        """How the numbers follow that were made for the page."""
        return tuple(Proof(id_, formula, ()) for formula, id_ in self._formulas.items())

    def chains(
        self, connection: duckdb.DuckDBPyConnection, bundles: Path, data: Data
    ) -> tuple[Chain, ...]:
        """Return the chain of custody of every run whose numbers are shown; each link is checked.

        A run that is not shown by a number has none.
        """
        wanted: dict[str, dict[tuple[int | None, str, str], str]] = {}
        for ref, id_ in self._refs.items():
            own = wanted.setdefault(ref.run_uuid, {})
            own[(ref.load_point, ref.metric, ref.evidence)] = id_
        return _shared(
            [
                _chain(connection, bundles, run.run_uuid, run.name, wanted[run.run_uuid])
                for run in data.runs
                if run.run_uuid in wanted
            ]
        )


def _shared(chains: Sequence[Chain]) -> tuple[Chain, ...]:
    """Put what several runs have in common first, once, and leave it out of each."""
    if len(chains) < 2:
        return tuple(chains)
    alike = [fact for fact in chains[0].common if all(fact in one.common for one in chains)]
    if not alike:
        return tuple(chains)
    known = set(alike)
    apart = (
        replace(one, common=tuple(fact for fact in one.common if fact not in known))
        for one in chains
    )
    return (Chain("runs", "What all runs have in common", tuple(alike), (), ()), *apart)


def _chain(
    connection: duckdb.DuckDBPyConnection,
    bundles: Path,
    run_uuid: str,
    name: str,
    wanted: Mapping[tuple[int | None, str, str], str],
) -> Chain:
    from flows.commands.auditing import chain_rows, value_lines
    from warehouse.audit import audit

    chain = audit(connection, bundles, run_uuid)
    proofs = []
    files: dict[str, str] = {}
    for value in chain.values:
        key = (value["load_point"], value["metric"], value["evidence"])
        if key not in wanted:
            continue
        if value.get("file_sha256"):
            files[str(value["file"])] = str(value["file_sha256"])
        head, *lines = value_lines(value)
        # The file's hash stands once for all of them; the tick names the sample.
        told = [one_line(line) for line in lines if not line.startswith(("  file ", "  sample "))]
        proofs.append(Proof(wanted[key], one_line(head), tuple(told)))
    common = [(str(link), one_line(part)) for link, part in chain_rows(chain.document())]
    common += [(f"file {path}", f"sha256 {digest}") for path, digest in sorted(files.items())]
    return Chain(
        f"run-{run_uuid}",
        f"{name}, run {run_uuid}",
        tuple(common),
        tuple(proofs),
        tuple(chain.broken),
    )
