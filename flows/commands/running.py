"""Commands that measure: ``demo``, ``run``, ``stop``, ``logs``."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.planning import SweepArgument, TargetOption
from flows.output import say
from flows.shipped import find_sweep, shipped
from tasks.home import Home
from tasks.plan.plan import Plan
from tasks.plan.sweep import parse_sweep
from tasks.rounds import Round, rounds_of
from warehouse.errors import BadInput, CannotFindOut, CheckFailed, MemsweepError

if TYPE_CHECKING:  # Prefect takes seconds to import
    from prefect.client.schemas.objects import State

KeepOption = Annotated[
    bool, typer.Option("--keep-infeasible", help="run even what the prediction refuses")
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="open a new round: measure again")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="UUID, unique prefix, or latest")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("demo", rich_help_panel="Try")(demo)
    app.command("run", rich_help_panel="Run")(run)
    app.command("stop", rich_help_panel="Run")(stop)
    app.command("logs", rich_help_panel="Run")(logs)


def demo(fresh: FreshOption = False) -> None:
    """Run the whole pipeline on this machine, without a GPU: plan, five cells, comparison, audit.

    Makes what is missing first (environments, two tiny models). Interrupted, it goes on where it
    was.

    Example: `memsweep demo`
    """
    from flows.context import announce

    home = Home.find()
    say("memsweep demo: five cells on two tiny models, served by vLLM's CPU build through Polyaxon")
    say(f"everything it makes lies in {home.root}")
    announce(home)
    began = time.monotonic()
    unexpected = measure("demo", "local", {"fresh": fresh}, show_plan=True)
    from flows.commands.auditing import audit
    from flows.commands.looking import compare

    compare("demo")
    shown = _first_finished(home, "demo")
    if shown is not None:
        audit(shown, "kv_cache_size_tokens")
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    say(f"done in {minutes} min {seconds} s. What there is now:")
    for line in _where_to_look(home):
        say(f"  {line}")
    if unexpected:
        raise CheckFailed(unexpected)


def _first_finished(home: Home, sweep: str) -> str | None:
    """Return the first run of the sweep's newest round that came out ok."""
    rounds = rounds_of(home, sweep)
    states = sorted(rounds[-1].states(), key=lambda state: state.at or "") if rounds else []
    return next((state.run_uuid for state in states if state.outcome == "ok"), None)


def run(
    sweep: SweepArgument,
    target: TargetOption = "local",
    fresh: FreshOption = False,
    keep_infeasible: KeepOption = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="even where the first cells all fail alike")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            min=0.1,
            max=1e7,
            metavar="MINUTES",
            help="start no run that by its estimate would exceed so many GPU-minutes (on a CPU, "
            "minutes of a slot): cells never measured first, then those measured longest ago",
        ),
    ] = None,
) -> None:
    """Measure what is missing of a sweep's newest round; a second call goes on where it was.

    A round's name in the sweep's place goes on with that round, though there may be a newer one.

    Exits 0 when every outcome was as expected, 1 when one was not.

    Example: `memsweep run demo`
    """
    wishes: dict[str, Any] = {
        "fresh": fresh,
        "keep_infeasible": keep_infeasible,
        "keep_going": keep_going,
        "budget_minutes": budget,
    }
    if (older := _round_named(sweep)) is not None:
        if fresh or target not in ("local", older.target):
            raise BadInput(f"round {older.id} is on {older.target}: leave out --fresh and --target")
        sweep, target = str(older.folder / "sweep.yaml"), older.target
        wishes["label"] = older.label
    if unexpected := measure(sweep, target, wishes, show_plan=False):
        raise CheckFailed(f"{unexpected}; see: memsweep compare")


def _round_named(name: str) -> Round | None:
    if name in shipped() or Path(name).exists():
        return None
    return next((round_ for round_ in rounds_of(Home.find()) if round_.id == name), None)


def measure(sweep: str, target: str, wishes: Mapping[str, Any], *, show_plan: bool) -> str | None:
    """Measure a sweep; return what was not as expected, or ``None``.

    ``wishes`` are the parameters of :func:`flows.sweep.measure_sweep` after sweep and target.
    """
    from flows.commands.planning import show
    from flows.context import (
        Wishes,
        given_target,
        need_disk,
        prepare,
        read_sweep,
        surroundings,
        use,
    )
    from tasks.launch.lint import before_submit
    from tasks.launch.target import load
    from tasks.plan.plan import make_plan

    home, target = Home.find(), given_target(target)
    # Bad input is found before anything is installed or started.
    parsed, _ = read_sweep(sweep)
    keep = bool(wishes.get("keep_infeasible"))
    plan = make_plan(parsed, surroundings(home, target), keep_infeasible=keep)
    need_disk(home, plan, target, Wishes(**wishes))
    endpoints = prepare(home, parsed, target)
    plan = make_plan(parsed, surroundings(home, target), keep_infeasible=keep)
    if show_plan:
        show(plan)
    _refuse_unresolved(plan)
    # A cluster's operations were looked at before anything was made.
    if (profile := load(target)).is_embedded:
        before_submit(home, profile, plan)
    use(home, endpoints)
    from tasks.reconcile import crash_dead_flows

    crash_dead_flows(home, endpoints.prefect_api_url, say)
    from flows.sweep import measure_sweep

    _quiet_prefect()
    try:
        state = measure_sweep(sweep, target, **wishes, return_state=True)
    except KeyboardInterrupt:
        say(f"sweep {parsed.name}: interrupted, what exists is collected; the same call goes on")
        raise
    if unexpected := not_as_expected(state):
        return f"sweep {parsed.name}: {unexpected}"
    say(state.message or "")
    return None


def not_as_expected(state: State[Any]) -> str | None:
    """Return what a measured sweep's final state says was not as expected, or ``None``.

    Raises the error that kept the flow from its end; one of ours keeps its exit code.
    """
    from flows.sweep import NOT_AS_EXPECTED

    if state.name == NOT_AS_EXPECTED or state.is_cancelled():
        return state.message or str(state.name)
    if (fault := _fault_named(state.name)) is not None:
        raise fault(state.message)
    if not state.is_completed():
        state.result()
    return None


def _fault_named(
    name: str | None, among: type[MemsweepError] = MemsweepError
) -> type[MemsweepError] | None:
    """Return the error of ours that a flow's failed state is named after, ``None`` for others."""
    if among.__name__ == name:
        return among
    below = (_fault_named(name, kind) for kind in among.__subclasses__())
    return next((kind for kind in below if kind is not None), None)


def _quiet_prefect() -> None:
    """Keep Prefect's tracebacks from the terminal: what went wrong is said in one line by us."""
    if os.environ.get("MEMSWEEP_TRACEBACK"):
        return

    def without_traceback(record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        # Ctrl-C is no crash; what it did is said by us.
        return "aborted by an interrupt signal" not in record.getMessage()

    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(without_traceback)
    # Pages of what a killed server means for Prefect's own queues; we start it again and say so.
    for name in ("prefect.events.clients", "prefect._internal.concurrency"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _refuse_unresolved(plan: Plan) -> None:
    if plan.unresolved:
        raise BadInput(
            f"sweep {plan.sweep.name}: {len(plan.unresolved)} pins are unresolved, first "
            f"{plan.unresolved[0]}; state them under pins in the sweep"
        )


def _where_to_look(home: Home) -> list[str]:
    from tasks.launch import services

    ends = services.endpoints(home)
    lines = [
        f"bundles              {home.bundles}",
        f"warehouse snapshot   {home.warehouse_snapshot}",
    ]
    if ends:
        lines += [
            f"Polyaxon             {ends.polyaxon_host}/ui/",
            f"Prefect              {ends.prefect_api_url.removesuffix('/api')}",
        ]
    return [*lines, "stop the services    memsweep services down"]


def stop(
    what: Annotated[
        str | None, typer.Argument(metavar="[SWEEP|RUN]", help="nothing: everything")
    ] = None,
    after_current: Annotated[
        bool, typer.Option("--after-current", help="finish the current cells first")
    ] = False,
) -> None:
    """Stop a sweep or a run; what exists is collected and marked `stopped`.

    A flow that measures collects what it stops. Runs that no flow waits for any more are stopped
    here, and collected by the next `run` of their sweep.

    Example: `memsweep stop demo`
    """
    home = Home.find()
    rounds = rounds_of(home)
    names = {round_.sweep_name for round_ in rounds} | {round_.id for round_ in rounds}
    if what is not None and what not in names and (what in shipped() or Path(what).is_file()):
        where, text = find_sweep(what)
        what = parse_sweep(text, where=where).name
        names.add(what)  # one that was never measured is not being measured either
    if what is None or what in names:
        chosen = [r for r in rounds if what in (None, r.sweep_name, r.id)]
        if not _stop_rounds(home, chosen, after_current=after_current):
            say("nothing is being measured")
        return
    from flows.context import find_run, port_of, target_of

    run_uuid = find_run(home, what)
    port = port_of(home, target_of(home, run_uuid))
    view = port.view(run_uuid)
    if view.is_final:
        say(f"run {run_uuid}: ended already ({view.status})")
        return
    port.stop(run_uuid)
    say(f"run {run_uuid}: stop asked")


def _stop_rounds(home: Home, rounds: list[Round], *, after_current: bool) -> bool:
    """Stop what measures these rounds: their flows, and runs whose flow is gone."""
    busy = [round_ for round_ in rounds if round_.holder() is not None]
    for round_ in busy:
        round_.ask_stop(after_current=after_current)
        say(f"{round_.id}: stop asked of process {round_.holder()}")
    orphaned = [round_ for round_ in rounds if round_ not in busy]
    stopped = [
        _stop_orphans(
            home, target, [one for one in orphaned if one.target == target], after_current
        )
        for target in sorted({one.target for one in orphaned if _goes_on(one)})
    ]
    _refuse_what_nobody_can_stop(home, orphaned)
    return bool(busy) or any(stopped)


def _goes_on(round_: Round) -> bool:
    return any(state.outcome is None for state in round_.states())


def _stop_orphans(home: Home, target: str, rounds: list[Round], after_current: bool) -> bool:
    """Stop what goes on of these rounds, which no flow measures, on their target's server.

    ``after_current``: no further one would be started, so they are only told.
    """
    from flows.context import port_of
    from tasks.launch import services
    from tasks.launch import target as targets

    if targets.load(target).is_embedded and services.endpoints(home) is None:
        return False
    port = port_of(home, target)
    ids = {round_.id for round_ in rounds}
    left = [view for view in port.active() if view.meta_info.get("round") in ids]
    for view in left:
        place = view.meta_info["round"]
        if after_current:
            say(f"run {view.uuid}: goes on without a flow; collected by: memsweep run {place}")
            continue
        port.stop(view.uuid)
        say(f"run {view.uuid}: stop asked, it has no flow; collected by: memsweep run {place}")
    return bool(left)


def _refuse_what_nobody_can_stop(home: Home, rounds: list[Round]) -> None:
    """Raise where a run of these rounds lives on this machine and no Polyaxon server is up.

    Also where no round knows the run: its flow was killed before it had recorded the UUID.
    """
    from tasks.launch import services

    if services.endpoints(home) is not None:
        return
    ids = {round_.id for round_ in rounds}
    others = [state for one in rounds_of(home) if one.id not in ids for state in one.states()]
    known = {state.run_uuid for state in others}
    if going := [run.uuid for run in services.live_runs(home) if run.uuid not in known]:
        more = f" and {len(going) - 1} more" if going[1:] else ""
        raise CannotFindOut(
            f"run {going[0]}{more}: its process goes on, and no Polyaxon server is up to stop it; "
            "memsweep services up, then memsweep stop; or end it with: memsweep services down"
        )


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="until the run ends")] = False,
) -> None:
    """Print a run's server log, while it runs and after.

    Example: `memsweep logs latest`
    """
    from flows.context import find_run, port_of, target_of
    from tasks.redact import Secrets

    home = Home.find()
    run_uuid = find_run(home, run)
    sealed = home.bundles / run_uuid / "server.log"
    if sealed.is_file():
        sys.stdout.write(sealed.read_text(encoding="utf-8", errors="replace").rstrip("\n") + "\n")
        return
    port = port_of(home, target_of(home, run_uuid))
    secrets = Secrets.here()
    shown = 0
    while True:
        final = port.view(run_uuid).is_final
        text = secrets.clean_text(port.logs(run_uuid))
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
        if final or not follow:
            return
        time.sleep(1.0)
