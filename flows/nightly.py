"""A scheduled night: the flow that Prefect's worker starts, and what it leaves for the morning.

The policy, in one place:

* A night's identity is the time it was scheduled for, in UTC. It is the label of its round, so a
  night that is started again goes on in its round, and nothing is measured twice.
* A night that begins more than ``max_late_hours`` late measures nothing and ends as `Missed`; one
  that has a round began in time, however late it is started again.
* A night that finds an earlier one of its sweep, or a `run` of it, still going measures nothing and
  ends as `Skipped`, saying which process that is. The lock is the kernel's: it is free when the
  holder is dead.
* When it is over, what it found stands in the warehouse, a summary in Prefect, and a webhook is
  told unless all is well. Neither summary nor webhook can fail a night.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from prefect import flow
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Failed

from flows.context import Wishes, need_disk, port_of, prepare, surroundings, use
from flows.output import say
from flows.overview import progress
from flows.report.nights import night_page
from flows.shipped import beside, find_sweep
from flows.sweep import RUNNER, measure_in_flow
from tasks import notify, schedules
from tasks.home import Home
from tasks.launch import services
from tasks.launch import target as targets
from tasks.launch.lint import before_submit
from tasks.plan.plan import make_plan
from tasks.plan.sweep import Sweep, parse_sweep
from tasks.reconcile import crash_dead_flows, crash_dead_nights
from tasks.rounds import Round, now, rounds_of
from tasks.schedules import Night
from warehouse import compare, regression
from warehouse.connection import open_snapshot
from warehouse.errors import MemsweepError
from warehouse.registry import Outcome

MISSED, SKIPPED, REGRESSION = "Missed", "Skipped", "Regression"
Verdict = Literal["ok", "failed", "regression", "missed", "skipped", "stopped", "died"]
#: So many cells and regressions are named in a message; the round has all.
NAMED = 20
#: So far back a whole night is looked for, to compare with.
NIGHTS_BACK = 30


@dataclass(frozen=True, slots=True)
class Webhook:
    """Whom to tell, and when."""

    address: str | None
    variable: str | None
    always: bool

    def wants(self, verdict: Verdict) -> bool:
        """Whether this verdict is to be told: all that is not well, but not what a user stopped."""
        asked = self.address is not None or self.variable is not None
        return asked and (self.always or verdict not in ("ok", "stopped"))

    def post(self, document: dict[str, object]) -> str:
        """Tell it; return ``sent``, or why it could not be."""
        address = os.environ.get(self.variable) if self.variable else self.address
        if not address:
            return f"webhook: the variable {self.variable} is not set where the scheduler runs"
        return notify.post(address, document) or "sent"


@dataclass(frozen=True, slots=True)
class Found:
    """What a night found out."""

    verdict: Verdict
    message: str
    round: Round | None = None
    #: As `compare` shows them, one a run.
    cells: Sequence[dict[str, Any]] = ()
    counts: Mapping[str, object] | None = None
    regressions: Sequence[dict[str, Any]] = ()
    #: The night it was compared with.
    before: Round | None = None


def _run_name() -> str:
    moment = flow_run.get_scheduled_start_time()
    return f"{deployment.get_name() or 'night'} {schedules.label_of(moment)}"


@flow(name=schedules.FLOW, flow_run_name=_run_name, task_runner=RUNNER, persist_result=False)
def night(
    sweep: str,
    target: str = "local",
    *,
    max_late_hours: float = schedules.MAX_LATE_HOURS,
    budget_minutes: float | None = None,
    webhook: str | None = None,
    webhook_env: str | None = None,
    webhook_always: bool = False,
) -> State[str]:
    """Measure a sweep in the round of the scheduled time; say so in Prefect and to the webhook.

    ``sweep`` is a shipped sweep's name or a file; ``budget_minutes`` as in `run --budget`;
    ``webhook_env`` names the variable that holds the webhook's address.
    """
    logging.getLogger("prefect.flow_runs").addFilter(_says_more_than_the_state)
    home = Home.find()
    this = _begin(home, sweep, target, flow_run.get_scheduled_start_time())
    hook = Webhook(webhook, webhook_env, webhook_always)
    try:
        found, state = _night(home, this, sweep, target, max_late_hours, budget_minutes)
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        _end(home, this, Found("failed", what), hook)
        raise
    except BaseException:
        # A signal: stopped by the user, or by `services down`. What exists is collected already.
        schedules.save_night(home, replace(this, ended_at=now(), verdict="stopped"))
        raise
    _end(home, this, found, hook)
    return state


def _says_more_than_the_state(record: logging.LogRecord) -> bool:
    """Drop Prefect's traceback of a state that is not Completed: it was said in a line already."""
    return not record.getMessage().startswith("Engine execution exited")


def _begin(home: Home, sweep: str, target: str, scheduled: datetime) -> Night:
    """Record that this process is the night; the label stays when it is started again."""
    flow_run_id = str(flow_run.get_id())
    name = deployment.get_name() or Path(sweep).stem
    this = schedules.find_night(home, flow_run_id)
    if this is None or this.pid != os.getpid():  # started without tasks/launch/night.py
        this = schedules.note_process(home, flow_run_id, name)
    label = this.night or schedules.label_of(scheduled)
    this = replace(this, sweep=name, target=target, night=label)
    schedules.save_night(home, this)
    schedules.forget_old_nights(home)
    return this


def _night(
    home: Home,
    this: Night,
    sweep: str,
    target: str,
    max_late_hours: float,
    budget_minutes: float | None,
) -> tuple[Found, State[str]]:
    label = str(this.night)
    late = _hours_late(label, datetime.now(UTC))
    if late > max_late_hours and not _has_begun(home, this):
        text = f"{late:.1f} h late, at most {max_late_hours:g} h are allowed: not measured"
        return Found("missed", text), Failed(name=MISSED, message=text)
    try:
        with schedules.only_night(home, str(this.sweep), this.flow_run_id):
            return _measure(home, this, sweep, target, budget_minutes)
    except schedules.StillGoing as busy:
        text = f"not measured: {busy.holder}"
        return Found("skipped", text), Cancelled(name=SKIPPED, message=text)
    except MemsweepError as error:
        text = " ".join(str(error).split())
        return Found("failed", text), Failed(name=type(error).__name__, message=text)


def _hours_late(label: str, moment: datetime) -> float:
    return (moment - schedules.time_of(label)).total_seconds() / 3600


def _has_begun(home: Home, this: Night) -> bool:
    """Whether the night's round is open: one that is started again began in time."""
    return any(round_.label == this.night for round_ in rounds_of(home, str(this.sweep)))


def _measure(
    home: Home, this: Night, sweep: str, target: str, budget_minutes: float | None
) -> tuple[Found, State[str]]:
    where, text = find_sweep(sweep)
    parsed = parse_sweep(text, where=where, read=beside(sweep))
    _refuse_while_measured(home, parsed.name)
    wishes = Wishes(label=this.night, budget_minutes=budget_minutes)
    need_disk(home, make_plan(parsed, surroundings(home, target), night=True), target, wishes)
    ends = prepare(home, parsed, target)
    # A cluster's operations are looked at by prepare.
    if (profile := targets.load(target)).is_embedded:
        before_submit(home, profile, make_plan(parsed, surroundings(home, target)))
    use(home, ends)
    crash_dead_flows(home, ends.prefect_api_url, say)
    _tell_of_the_dead(home, ends.prefect_api_url)
    state = measure_in_flow(sweep, target, wishes)
    return _judged(home, this, parsed, state)


def _refuse_while_measured(home: Home, name: str) -> None:
    """Give way to a `run` of the sweep, in whatever round."""
    for round_ in rounds_of(home, name):
        if (pid := round_.holder()) is not None:
            raise schedules.StillGoing(f"round {round_.id} is being measured (process {pid})")


def _tell_of_the_dead(home: Home, api_url: str) -> None:
    """Settle nights whose process is gone, and tell webhooks what those could not tell them.

    Also of nights that `services up` settled, and of one that was killed between verdict and
    webhook. Nothing older than its schedule is told.
    """
    crash_dead_nights(home, api_url, say)
    for night in schedules.nights(home):
        schedule = schedules.find(home, str(night.sweep))
        if schedule is None or not night.is_untold or night.began_at < schedule.made_at:
            continue
        hook = Webhook(schedule.webhook, schedule.webhook_env, schedule.webhook_always)
        verdict = cast("Verdict", night.verdict)
        if hook.wants(verdict):
            told = hook.post(_document(home, night, Found(verdict, str(night.message))))
            schedules.save_night(home, replace(night, webhook=told))


def _judged(home: Home, this: Night, sweep: Sweep, state: State[str]) -> tuple[Found, State[str]]:
    """Return what the measured round says, against the round of the night before."""
    message = state.message or ""
    verdict: Verdict = (
        "stopped" if state.is_cancelled() else "ok" if state.is_completed() else "failed"
    )
    rounds = [r for r in rounds_of(home, sweep.name) if r.target == this.target]
    mine = next((r for r in reversed(rounds) if r.label == this.night), None)
    if mine is None:
        return Found(verdict, message), state
    before = night_before(home, rounds, mine)
    cells, worse = _looked_up(home, mine, before)
    if worse and verdict == "ok":
        named = "; ".join(one["message"] for one in worse[:5])
        verdict, message = "regression", f"{message}; worse than the night before: {named}"
        state = Failed(name=REGRESSION, message=message)
    done = progress(home, mine)
    counts = {"runs": done["runs"], "measured": done["finished"], "unexpected": done["unexpected"]}
    return Found(verdict, message, mine, cells, counts, worse, before), state


def night_before(home: Home, rounds: Sequence[Round], mine: Round) -> Round | None:
    """Return the round of the latest earlier night among rounds of one sweep and target.

    One that was measured to its end, if there is any: a stopped night says little.
    """
    nights = [r for r in rounds if schedules.LABEL.fullmatch(r.label) and r.label < mine.label]
    latest = sorted(nights, key=lambda round_: round_.label, reverse=True)[:NIGHTS_BACK]
    return next((r for r in latest if _is_whole(home, r)), latest[0] if latest else None)


def _is_whole(home: Home, round_: Round) -> bool:
    left: int | None = progress(home, round_)["left"]
    return left == 0


def _looked_up(
    home: Home, mine: Round, before: Round | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the round's cells and what got worse, as far as the warehouse can be asked."""
    try:
        with open_snapshot(home.warehouse_snapshot) as connection:
            here = regression.selection(connection, mine.sweep_name, mine.id)
            cells = compare.cells(connection, here.runs)
            if before is None:
                return cells, []
            there = regression.selection(connection, before.sweep_name, before.id)
            return cells, regression.regressions(connection, there, here)
    except MemsweepError as error:
        say(f"the warehouse could not be asked: {error}")
        return [], []


# -- the end of a night ---------------------------------------------------------------------


def _end(home: Home, this: Night, found: Found, hook: Webhook) -> None:
    """Write down how the night ended, show it in Prefect and tell the webhook; never raises."""
    say(f"night {this.night} of {this.sweep}: {found.verdict} - {found.message}")
    ended = replace(
        this,
        ended_at=now(),
        verdict=found.verdict,
        message=found.message,
        round=found.round.id if found.round else None,
    )
    try:
        schedules.save_night(home, ended)
        report = _report(home, ended, found)
        if hook.wants(found.verdict):
            told = hook.post(_document(home, ended, found, report))
            say(f"webhook: {told}")
            schedules.save_night(home, replace(ended, webhook=told))
        _show_in_prefect(home, ended, found, report)
    except Exception as error:  # noqa: BLE001 - what was measured stands; a summary is only that
        say(f"the night's summary: {type(error).__name__}: {error}")


def _report(home: Home, this: Night, found: Found) -> Path | None:
    """Make the night's page, name it as an output of the night's last run, and return its file.

    ``None`` where there is nothing to show, or where it could not be made, which is said.
    """
    if found.round is None or not found.cells:
        return None
    try:
        path = night_page(home, found.round.id)
        runs = [cell for cell in found.cells if cell["outcome"] != Outcome.INFEASIBLE]
        if runs:
            port = port_of(home, str(this.target))
            port.log_outputs(str(runs[-1]["run_uuid"]), {"night_page": path.as_uri()})
    except Exception as error:  # noqa: BLE001 - neither webhook nor night may fail for a page
        say(f"the night's page: {type(error).__name__}: {error}")
        return None
    return path


def _document(
    home: Home, this: Night, found: Found, report: Path | None = None
) -> dict[str, object]:
    """Return what the webhook is told; keys are only ever added."""
    unexpected = [cell for cell in found.cells if not cell["as_expected"]]
    return {
        "format": 1,
        "night": this.night,
        "sweep": this.sweep,
        "target": this.target,
        "verdict": found.verdict,
        "message": found.message,
        "began_at": this.began_at,
        "ended_at": this.ended_at,
        "round": found.round.id if found.round else None,
        "flow_run_id": this.flow_run_id,
        "counts": found.counts,
        "unexpected": [
            {name: cell[name] for name in ("label", "repeat", "outcome", "run_uuid", "message")}
            | {"expected": cell["expect"] or "ok"}
            for cell in unexpected[:NAMED]
        ],
        "regressions": list(found.regressions)[:NAMED],
        "state_folder": str(home.root),
        "report": str(report) if report else None,
        "commands": commands(home, this, found),
    }


def commands(home: Home, this: Night, found: Found) -> list[str]:
    """Return what to type to see more, in this order."""
    wanted = ["memsweep status"]
    if found.round is not None:
        name = found.round.sweep_name
        wanted.append(f"memsweep compare {name}@{found.round.id}")
        if found.regressions and found.before is not None:
            wanted.append(f"memsweep compare {name}@{found.before.id} {name}@{found.round.id}")
    wanted += [
        f"memsweep show {cell['run_uuid']}" for cell in found.cells if not cell["as_expected"]
    ][:3]
    if found.verdict == "died" or (found.verdict == "failed" and found.round is None):
        wanted.append(f"tail -n 40 {schedules.log_file(home, this.flow_run_id)}")
    return wanted


def _show_in_prefect(home: Home, this: Night, found: Found, report: Path | None) -> None:
    """Leave a table, a page with links and the report's address as artifacts of the flow run."""
    runs = _runs_page(home, str(this.target))
    key = f"night-{this.sweep}"
    title = f"Night {this.night} of {this.sweep}: {found.verdict}"
    if found.cells:
        create_table_artifact(
            key=key,
            table=[table_row(home, cell, runs) for cell in found.cells],
            description=title,
        )
    create_markdown_artifact(
        key=f"{key}-links", markdown=page(home, this, found), description=title
    )
    if report is not None:
        create_link_artifact(
            key=f"{key}-report", link=report.as_uri(), link_text=title, description=title
        )


def _runs_page(home: Home, target: str) -> str | None:
    """Return the address of a target's runs in Polyaxon's UI."""
    profile = targets.load(target)
    ends = services.endpoints(home)
    host = profile.host or (ends.polyaxon_host if ends else None)
    return host and f"{host}/ui/{profile.owner}/{profile.project}/runs"


def table_row(home: Home, cell: dict[str, Any], runs: str | None) -> dict[str, str]:
    """Return one run as a row of the summary: text and links only."""
    tokens = cell["metrics"].get("kv_cache_size_tokens", {})
    uuid = str(cell["run_uuid"])
    in_polyaxon = runs and cell["outcome"] != "infeasible"
    return {
        "cell": f"{cell['label']} #{cell['repeat']}",
        "outcome": str(cell["outcome"]),
        "expected": str(cell["expect"] or "ok"),
        "as expected": "yes" if cell["as_expected"] else "NO",
        "KV tokens predicted": _text(tokens.get("predicted")),
        "KV tokens measured": _text(tokens.get("measured")),
        "run": uuid,
        "Polyaxon": f"{runs}/{uuid.replace('-', '')}" if in_polyaxon else "",
        "bundle": str(home.bundles / uuid),
    }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def page(home: Home, this: Night, found: Found) -> str:
    """Return the summary as Markdown."""
    lines = [
        f"# Night {this.night} of {this.sweep}: {found.verdict}",
        "",
        found.message,
        "",
        f"- round: `{found.round.id if found.round else 'none was measured'}`",
        f"- bundles: `{home.bundles}`",
        f"- what its process printed: `{schedules.log_file(home, this.flow_run_id)}`",
    ]
    if found.regressions:
        lines += ["", "## Worse than the night before", ""]
        lines += [f"- {one['message']}" for one in found.regressions[:NAMED]]
    lines += ["", "## Look", "", *(f"    {command}" for command in commands(home, this, found)), ""]
    return "\n".join(lines)
