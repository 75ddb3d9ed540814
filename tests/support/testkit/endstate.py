"""What a round must look like when it is over, whatever was killed meanwhile.

The same cells, each finished once; the content of a round that nothing disturbed; every earlier
attempt kept with its outcome; Polyaxon, bundles, ledger and warehouse of one opinion; nothing left
running.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import httpx

from tasks import bundle, processes, record
from tasks.canonical import content_key
from tasks.home import Home
from tasks.launch import services
from tasks.launch.port import canonical_uuid
from tasks.rounds import Round, rounds_of
from warehouse.connection import open_snapshot

#: What a run's content is: no UUID, no time, no attempt, nothing that was sampled.
_CONTENT = {
    "run": (
        "SELECT label, cell_key, setting_key, repeat, expect, outcome, phase FROM run "
        "WHERE run_uuid = ?"
    ),
    "prediction": (
        "SELECT load_point, metric, kind, value FROM prediction WHERE run_uuid = ? ORDER BY ALL"
    ),
    "startup": (
        "SELECT metric, value, low, high, source, file, chosen FROM startup_value "
        "WHERE run_uuid = ? AND metric NOT LIKE '%\\_s' ESCAPE '\\' ORDER BY ALL"
    ),
    "load_point": (
        "SELECT load_point, asked_prompt_tokens, asked_output_tokens, parallel, asked_requests, "
        "warmup_requests, seed, dataset_offset, state, sent_requests, succeeded_requests, "
        "failed_requests FROM load_point WHERE run_uuid = ? ORDER BY ALL"
    ),
    "request": (
        "SELECT load_point, count(*), sum(prompt_tokens)::BIGINT, sum(completion_tokens)::BIGINT "
        "FROM request WHERE run_uuid = ? GROUP BY ALL ORDER BY ALL"
    ),
}


def contents(home: Home, round_: Round) -> dict[str, str]:
    """Return a hash of the content of every finished repeat, by ``cell key.repeat``."""
    found = {}
    with open_snapshot(home.warehouse_snapshot) as connection:
        for state in round_.states():
            rows = {
                name: connection.execute(query, [state.run_uuid]).fetchall()
                for name, query in _CONTENT.items()
            }
            found[f"{state.cell_key}.{state.repeat}"] = content_key(json.loads(json.dumps(rows)))
    return found


def polyaxon_runs(home: Home, round_: Round) -> list[dict[str, Any]]:
    """Return every run of the round as the Polyaxon server lists it."""
    ends = services.endpoints(home)
    assert ends is not None, "the Polyaxon server is not up"
    url = f"{ends.polyaxon_host}/api/v1/default/memsweep/runs"
    found: list[dict[str, Any]] = []
    with httpx.Client(trust_env=False, timeout=30) as client:
        while True:
            asked: dict[str, str | int] = {"limit": 100, "offset": len(found), "sort": "created_at",
                     "query": "managed_by:cli"}  # fmt: skip
            page = client.get(url, params=asked).raise_for_status().json()
            found += page["results"]
            if not page["results"] or len(found) >= page["count"]:
                break
    return [run for run in found if (run.get("meta_info") or {}).get("round") == round_.id]


def still_running(home: Home) -> list[str]:
    """Return every process of a run of this state folder, by its mark and by its session."""
    ours = (b"MEMSWEEP_RUN_UUID=", str(home.root).encode())
    left = {f"{one.uuid}: session {one.sid}" for one in services.live_runs(home)}
    for process in processes.table().values():
        try:
            block = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if all(mark in block for mark in ours) and processes.executes(process):
            left.add(f"process {process.pid} {process.name}")
    return sorted(left)


def prefect_states(home: Home, round_: Round) -> dict[str, str]:
    """Return what Prefect says of every flow run that worked on the round."""
    ends = services.endpoints(home)
    assert ends is not None, "the services are not up"
    lines = (round_.folder / "flows.jsonl").read_text(encoding="utf-8").splitlines()
    found = {}
    with httpx.Client(base_url=ends.prefect_api_url, trust_env=False, timeout=30) as client:
        for line in lines:
            flow = str(json.loads(line)["flow_run_id"])
            answer = client.get(f"/flow_runs/{flow}").raise_for_status().json()
            found[flow] = str(answer["state"]["type"])
    return found


def problems(
    home: Home,
    round_: Round,
    *,
    reference: Mapping[str, str],
    lost: Collection[str] = (),
    lost_exactly: bool = True,
) -> list[str]:
    """Return what is not as it must be; empty where all is well.

    ``reference`` is :func:`contents` of an undisturbed round of the same cells; ``lost`` the UUIDs
    of runs that were killed (exactly these are kept as lost, or at most these).
    """
    found = []
    states = {f"{state.cell_key}.{state.repeat}": state for state in round_.states()}
    if set(states) != set(reference):
        odd = sorted(set(states) ^ set(reference))
        found.append(f"cells: {len(states)} recorded, {len(reference)} wanted; differ in {odd[:5]}")
    for name, state in states.items():
        if round_.finished(state.cell_key, state.repeat) is None:
            found.append(f"{name}: not finished: {state.outcome}, run {state.run_uuid}")
    got = contents(home, round_)
    for name in sorted(set(got) & set(reference)):
        if got[name] != reference[name]:
            found.append(f"{name}: content differs from the undisturbed round's")
    found += _runs_agree(home, round_, lost, exactly=lost_exactly)
    found += [
        f"Prefect flow run {flow}: still {state}"
        for flow, state in prefect_states(home, round_).items()
        if state not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
    ]
    found += [f"still running: {one}" for one in still_running(home)]
    found += [f"half a bundle: {path.name}" for path in home.bundles.glob(".tmp-*")]
    report = record.verify(home)
    found += [f"verify: {one.run_uuid} {one.where}: {one.what}" for one in report.differences]
    return found


def _runs_agree(home: Home, round_: Round, lost: Collection[str], *, exactly: bool) -> list[str]:
    """Compare Polyaxon's runs of a round with bundles and warehouse, one run an attempt."""
    found = []
    listed = polyaxon_runs(home, round_)
    keys = [
        tuple(str(run["meta_info"][name]) for name in ("cell_key", "repeat", "attempt"))
        for run in listed
    ]
    for key, count in Counter(keys).items():
        if count > 1:
            found.append(f"{count} runs in Polyaxon of {'.'.join(key)}")
    uuids = {canonical_uuid(run["uuid"]) for run in listed}
    sealed = {
        path.name
        for path in bundle.all_sealed(home)
        if bundle.load(path).manifest["round"] == round_.id
    }
    with open_snapshot(home.warehouse_snapshot) as connection:
        rows = connection.execute(
            "SELECT run_uuid::VARCHAR, cell_key, repeat, attempt, outcome FROM run WHERE round = ?",
            [round_.id],
        ).fetchall()
    for name, other in (("bundles", sealed), ("warehouse", {row[0] for row in rows})):
        if other != uuids:
            found.append(
                f"{name}: {len(other)} runs, Polyaxon {len(uuids)}: {sorted(other ^ uuids)[:5]}"
            )
    finished = Counter((row[1], row[2]) for row in rows if row[4] != "lost")
    found += [f"{key}: finished {count} times" for key, count in finished.items() if count != 1]
    kept = {row[0] for row in rows if row[4] == "lost"}
    if kept - set(lost) or (exactly and kept != set(lost)):
        found.append(f"lost: {sorted(kept)}, wanted {sorted(lost)}")
    for row in rows:
        if row[4] == "lost" and (row[1], row[2]) not in finished:
            found.append(f"{row[1]}.{row[2]}: lost and never measured again")
    return found


def newest_round(home: Home, sweep: str) -> Round:
    """Return the sweep's newest round."""
    return rounds_of(home, sweep)[-1]
