"""Commands that measure: ``demo``, ``run``, ``status``, ``stop``, ``logs``."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from flows.commands.planning import JsonOption, SweepArgument, TargetOption
from flows.output import emit_json, emit_text, print_table, say
from tasks.home import Home
from tasks.plan.plan import Plan
from tasks.plan.sweep import find_sweep, parse_sweep
from tasks.rounds import Round, rounds_of
from warehouse.errors import BadInput, CheckFailed

KeepOption = Annotated[
    bool, typer.Option("--keep-infeasible", help="run even what the prediction refuses")
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="open a new round: measure again")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="UUID, unique prefix, or latest")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("demo", rich_help_panel="Try")(demo)
    app.command("run", rich_help_panel="Run")(run)
    app.command("status", rich_help_panel="Run")(status)
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
    _measure("demo", "local", fresh=fresh, show_plan=True)
    from flows.commands.auditing import audit
    from flows.commands.looking import compare

    compare()
    audit("latest", "kv_cache_size_tokens")
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    say(f"done in {minutes} min {seconds} s. What there is now:")
    for line in _where_to_look(home):
        say(f"  {line}")


def run(
    sweep: SweepArgument,
    target: TargetOption = "local",
    fresh: FreshOption = False,
    keep_infeasible: KeepOption = False,
) -> None:
    """Measure what is missing of a sweep's newest round; a second call goes on where it was.

    Exits 0 when every outcome was as expected, 1 when one was not.

    Example: `memsweep run demo`
    """
    _measure(sweep, target, fresh=fresh, show_plan=False, keep_infeasible=keep_infeasible)


def _measure(
    sweep: str, target: str, *, fresh: bool, show_plan: bool, keep_infeasible: bool = False
) -> None:
    from flows.commands.planning import show
    from flows.context import need_disk, prepare, surroundings, use
    from tasks.plan.plan import make_plan

    home = Home.find()
    where, text = find_sweep(sweep)
    # Bad input is found before anything is installed or started.
    parsed = parse_sweep(text, where=where)
    need_disk(home, make_plan(parsed, surroundings(home, target)))
    endpoints = prepare(home, parsed, target)
    plan = make_plan(parsed, surroundings(home, target), keep_infeasible=keep_infeasible)
    if show_plan:
        show(plan)
    _refuse_unresolved(plan)
    use(home, endpoints)
    from tasks.reconcile import crash_dead_flows

    crash_dead_flows(home, endpoints.prefect_api_url, say)
    from flows.sweep import NOT_AS_EXPECTED, measure_sweep

    state = measure_sweep(
        sweep, target, fresh=fresh, keep_infeasible=keep_infeasible, return_state=True
    )
    if state.name == NOT_AS_EXPECTED:
        raise CheckFailed(f"sweep {parsed.name}: {state.message}; see: memsweep compare")
    state.result()  # raises what kept the flow from its end
    say(state.message or "")


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


def status(json: JsonOption = False) -> None:
    """Show what is going on: services, rounds, and what needs a hand with the command for it.

    Example: `memsweep status`
    """
    from tasks.launch import services

    home = Home.find()
    states = services.status(home)
    rounds = [_progress(round_) for round_ in rounds_of(home)]
    if json:
        emit_json(
            {
                "services": [
                    {"name": s.name, "state": s.state, "pid": s.pid, "url": s.url} for s in states
                ],
                "rounds": rounds,
            }
        )
        return
    print_table(
        "Services",
        ["service", "state", "pid", "address"],
        [[s.name, s.state, s.pid, s.url] for s in states],
    )
    print_table(
        "Rounds",
        ["round", "opened", "measured", "of", "not as expected", "being measured by"],
        [[r[k] for k in ("round", "opened_at", "finished", "runs", "odd", "pid")] for r in rounds],
    )
    for entry in rounds:
        if entry["finished"] != entry["runs"] and entry["pid"] is None:
            say(f"unfinished: {entry['round']} - go on with: memsweep run {entry['sweep']}")


def _progress(round_: Round) -> dict[str, object]:
    states = round_.states()
    done = [s for s in states if s.manifest_sha256]
    sweep = round_.sweep()
    from tasks.plan.sweep import machine_memory_bytes

    cells = list(sweep.expand(memory_total_bytes=machine_memory_bytes()))
    return {
        "round": round_.id,
        "sweep": round_.sweep_name,
        "opened_at": round_.opened_at,
        "runs": len(cells) * sweep.repeats,
        "finished": len(done),
        "outcomes": {o: sum(s.outcome == o for s in done) for o in {s.outcome for s in done}},
        "odd": sum(s.outcome not in ("ok", "refused") for s in done),
        "pid": round_.holder(),
    }


def stop(
    what: Annotated[
        str | None, typer.Argument(metavar="[SWEEP|RUN]", help="nothing: everything")
    ] = None,
    after_current: Annotated[
        bool, typer.Option("--after-current", help="finish the current cells first")
    ] = False,
) -> None:
    """Stop a sweep or a run; what exists is collected and marked `stopped`.

    Example: `memsweep stop demo`
    """
    home = Home.find()
    busy = [r for r in rounds_of(home) if r.holder() is not None]
    chosen = [r for r in busy if what in (None, r.sweep_name, r.id)]
    for round_ in chosen:
        round_.ask_stop(after_current=after_current)
        say(f"{round_.id}: stop asked of process {round_.holder()}")
    if chosen or what is None:
        if not chosen:
            say("nothing is being measured")
        return
    from flows.context import find_run, port_of

    run_uuid = find_run(home, what)
    port_of(home).stop(run_uuid)
    say(f"run {run_uuid}: stop asked")


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="until the run ends")] = False,
) -> None:
    """Print a run's server log, while it runs and after.

    Example: `memsweep logs latest`
    """
    from flows.context import find_run, port_of

    home = Home.find()
    run_uuid = find_run(home, run)
    sealed = home.bundles / run_uuid / "server.log"
    if sealed.is_file():
        emit_text(sealed.read_text(encoding="utf-8", errors="replace").rstrip("\n"))
        return
    port = port_of(home)
    shown = 0
    while True:
        final = port.view(run_uuid).is_final
        text = port.logs(run_uuid)
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
        if final or not follow:
            return
        time.sleep(1.0)
