"""Random SIGKILLs over sweeps of short cells: whatever dies whenever, the end state is whole.

    python -m tests.bench.kill --kills 200 --seed 1 --home DIR --log kills.jsonl

The real command line, Prefect server, Polyaxon server and supervisor; doubles of engine and load.
Each sweep gets its share of kills: the flow, one of the three services or a run (its first process
or all of them), at a random moment. A killed flow is started again, as a user would. When a sweep
is over it is judged (testkit.endstate). Everything is in the folder and the log: a kill of this
program itself costs nothing, the same call goes on. Exits 1 when anything was not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from testkit import doubles, endstate

from tasks import files, processes
from tasks.home import Home
from tasks.launch.supervisor import Folder
from tasks.rounds import rounds_of
from warehouse.errors import MemsweepError

KINDS = {"flow": 3, "supervisor": 3, "polyaxon": 2, "prefect": 1, "run": 2, "whole run": 1}
#: Longest pause before a kill; a flow needs about five seconds until it measures.
PAUSE_S = 9.0
#: A sweep that is disturbed no more must be over by then.
SWEEP_S = 1800.0
CALLS_AFTER_KILLS = 5


@dataclass
class Killer:
    """One series of sweeps and kills, kept in ``folder``."""

    folder: Path
    log: Path
    kills: int
    seed: int
    cells: int
    a_sweep: int
    polyaxon_server: Path | None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.home: Home = doubles.make_home(
            self.folder / "home", polyaxon_server=self.polyaxon_server
        )
        self.flow: subprocess.Popen[bytes] | None = None

    # -- what happened already ---------------------------------------------------------------

    def entries(self, event: str) -> list[dict[str, Any]]:
        """Return the log's entries of one kind; a torn last line is left out."""
        text = self.log.read_text(encoding="utf-8") if self.log.is_file() else ""
        found = []
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                value = json.loads(line)
                if value["event"] == event:
                    found.append(value)
        return found

    def note(self, event: str, **facts: object) -> None:
        """Append one entry, synced, and show it."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = {"event": event, "at": at, **facts}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        torn = self.log.is_file() and self.log.stat().st_size and not self._ends_with_newline()
        with self.log.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(json.dumps(entry), flush=True)

    def _ends_with_newline(self) -> bool:
        with self.log.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    # -- the series --------------------------------------------------------------------------

    def run(self) -> int:
        """Do what is missing of the series; returns the exit code."""
        reference = self._reference()
        number = len(self.entries("sweep")) + 1
        while (done := len(self.entries("kill"))) < self.kills or self._open_sweep(number):
            earlier = [e for e in self.entries("kill") if e["sweep"] == number]
            wanted = min(self.a_sweep, self.kills - done + len(earlier))
            self._sweep(number, wanted, reference)
            number += 1
        return self._summary()

    def _open_sweep(self, number: int) -> bool:
        return any(entry["sweep"] == number for entry in self.entries("kill"))

    def _reference(self) -> dict[str, str]:
        """Return the contents of a round that nothing disturbs, made once a folder."""
        path = self.folder / "reference.json"
        if (known := files.read_json(path)) is not None:
            return {str(key): str(value) for key, value in known.items()}
        sweep = self._write_sweep("undisturbed")
        target = doubles.write_profile(self.folder / "three.yaml", 3)
        log = self.folder / "undisturbed.log"
        codes = doubles.run_to_the_end(
            self.home, str(sweep), "--target", str(target), log=log, timeout_s=SWEEP_S
        )
        if codes != [0]:
            raise SystemExit(f"the undisturbed round ended with {codes}; see {log}")
        found = endstate.contents(self.home, endstate.newest_round(self.home, "undisturbed"))
        files.write_json(path, found)
        return found

    def _write_sweep(self, name: str) -> Path:
        path = self.folder / f"{name}.yaml"
        if not path.is_file():
            files.write_text(path, doubles.sweep_text(name, self.cells))
        return path

    def _sweep(self, number: int, wanted: int, reference: dict[str, str]) -> None:
        name = f"killed-{number}"
        sweep, log = self._write_sweep(name), self.folder / f"{name}.log"
        self._end_left_flow(number, name)
        began, codes = time.monotonic(), Counter[int]()
        undisturbed = 0
        while undisturbed < CALLS_AFTER_KILLS and time.monotonic() - began < SWEEP_S:
            self.flow = doubles.start(self.home, "run", str(sweep), log=log)
            self._disturb(number, wanted)
            code = self._end_of_flow(began)
            codes[code] += 1
            if code == 0:
                break
            undisturbed += len(self._kills(number)) >= wanted
        found = self._judge(name, reference)
        text = log.read_text(errors="replace")
        found += [f"{text.count('Traceback')} tracebacks in {log}"] if "Traceback" in text else []
        self.note(
            "sweep", sweep=number, kills=len(self._kills(number)), seconds=_since(began),
            exit_codes=dict(codes), problems=found,
        )  # fmt: skip

    def _judge(self, name: str, reference: dict[str, str]) -> list[str]:
        try:
            round_ = endstate.newest_round(self.home, name)
            killed = {str(e["run"]) for e in self.entries("kill") if e.get("run")}
            return endstate.problems(
                self.home, round_, reference=reference, lost=killed, lost_exactly=False
            )
        except (MemsweepError, LookupError, AssertionError) as error:
            return [f"cannot be judged: {type(error).__name__}: {error}"]

    def _end_left_flow(self, number: int, name: str) -> None:
        """Kill a flow that an earlier call of this program left: one more kill of the series."""
        for round_ in rounds_of(self.home, name):
            if (holder := round_.holder()) is not None:
                os.kill(holder, signal.SIGKILL)
                self.note("kill", sweep=number, kind="flow", pid=holder, left_over=True)

    def _kills(self, number: int) -> list[dict[str, Any]]:
        return [entry for entry in self.entries("kill") if entry["sweep"] == number]

    def _end_of_flow(self, began: float) -> int:
        assert self.flow is not None
        try:
            return self.flow.wait(timeout=max(1.0, SWEEP_S - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            self.flow.kill()
            return self.flow.wait()

    def _disturb(self, number: int, wanted: int) -> None:
        """Kill at random moments until the flow has ended or the sweep has had its kills."""
        assert self.flow is not None
        count = len(self._kills(number))
        while count < wanted and self.flow.poll() is None:
            dice = random.Random(f"{self.seed}.{number}.{count}")
            time.sleep(dice.uniform(0, PAUSE_S))
            kind = dice.choices([*KINDS], [*KINDS.values()])[0]
            facts = self._kill(kind, dice)
            if facts is None:
                time.sleep(0.2)
                continue
            count += 1
            self.note("kill", sweep=number, number=count, kind=kind, **facts)

    def _kill(self, kind: str, dice: random.Random) -> dict[str, object] | None:
        """Kill a process of that kind, if there is one now; return what was killed."""
        assert self.flow is not None
        if kind == "flow":
            if self.flow.poll() is not None:
                return None
            self.flow.kill()
            return {"pid": self.flow.pid}
        if kind.endswith("run"):
            records = Folder(self.home).records()
            if not records:
                return None
            record = dice.choice(records)
            members = processes.session(record.sid, record.start_ticks)
            leader = [one for one in members if one.pid == record.pid]
            processes.send(members if kind == "whole run" else leader, signal.SIGKILL)
            return {"pid": record.pid, "run": record.uuid} if leader else None
        state = files.read_json(self.home.services / kind / "state.json")
        if state is None or not processes.alive(state["pid"], state["start_ticks"]):
            return None
        os.kill(state["pid"], signal.SIGKILL)
        return {"pid": state["pid"]}

    def _summary(self) -> int:
        kills, sweeps = self.entries("kill"), self.entries("sweep")
        wrong = [problem for entry in sweeps for problem in entry["problems"]]
        left = endstate.still_running(self.home) + doubles.end_services(self.home)
        self.note(
            "summary", kills=len(kills), sweeps=len(sweeps),
            kinds=dict(Counter(entry["kind"] for entry in kills)),
            seconds=round(sum(entry["seconds"] for entry in sweeps), 1),
            kills_a_sweep=[entry["kills"] for entry in sweeps], problems=wrong, left=left,
        )  # fmt: skip
        return 1 if wrong or left else 0


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def main() -> int:
    """Read the options and run the series."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, required=True, help="kills in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", type=int, default=60, help="cells of a sweep")
    parser.add_argument("--kills-a-sweep", type=int, default=40)
    parser.add_argument("--home", type=Path, default=Path(".memsweep-kill"), help="folder for all")
    parser.add_argument("--log", type=Path, help="default: kills.jsonl in the folder")
    parser.add_argument("--polyaxon-server", type=Path, help="its environment, to be linked")
    given = parser.parse_args()
    folder = given.home.resolve()
    killer = Killer(
        folder=folder,
        log=(given.log or folder / "kills.jsonl").resolve(),
        kills=given.kills,
        seed=given.seed,
        cells=given.cells,
        a_sweep=given.kills_a_sweep,
        polyaxon_server=given.polyaxon_server,
    )
    return killer.run()


if __name__ == "__main__":
    sys.exit(main())
