"""``memsweep capacity`` and ``memsweep fit``: memory before anything boots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.output import emit_json, emit_text, print_table, say
from warehouse.errors import BadInput

GROUP = "Plan"
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d{1,2})", re.ASCII)
_RELEASE = re.compile(r"v?\d{1,4}(?:\.\d{1,4}){1,3}(?!\d|\.\d)", re.ASCII)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("capacity", rich_help_panel=GROUP)(capacity)
    app.command("fit", rich_help_panel=GROUP)(fit)


@contextmanager
def plain_config(config: str) -> Iterator[None]:
    """Turn a config.json that is nested deeper than Python reads into bad input."""
    try:
        yield
    except RecursionError as error:
        raise BadInput(f"{config}: is nested too deeply; give a model's config.json") from error


def _read(config: str) -> dict[str, Any]:
    """Return the config a file, a folder or a hub reference names."""
    from tasks.home import Home
    from tasks.plan import hub, model

    if hub.is_reference(config):
        return hub.config(config, Home.find().cache)
    return model.load(Path(config))


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = _CAPABILITY.fullmatch(text)
    if found is None:
        raise BadInput(f"--compute-capability {text!r}: wanted a number like 8.9")
    return int(found[1]), int(found[2])


def _version(text: str) -> str:
    """Return a version without blanks; raises :class:`BadInput` for what cannot be vLLM's."""
    version = text.strip()
    if not version.isascii() or _RELEASE.match(version) is None:
        raise BadInput(f"--vllm-version {text!r}: no version of vLLM; give one like 0.27.0")
    return version


def _rules_of(version: str) -> str:
    """Return the version whose rules are used: of those newer than any that was read, the last."""
    from tasks.plan.versions import NEWEST, EngineVersion

    newest = EngineVersion.parse(NEWEST)
    return NEWEST if EngineVersion.parse(version).release > newest.release else version


def _say_assumed(version: str) -> None:
    rules = _rules_of(version)
    if rules != version:
        say(f"vLLM {version} is newer than {rules}, the last one read: its rules are assumed")


def capacity(
    config: Annotated[
        str, typer.Option(help="the model's config.json, its folder, or OWNER/NAME@REVISION")
    ],
    vllm_version: Annotated[str, typer.Option(help="vLLM version, 0.9 to 0.33")],
    available_gib: Annotated[
        str | None, typer.Option(help="memory for the cache as logged, GiB with two decimals")
    ] = None,
    available_bytes: Annotated[
        int | None, typer.Option(help="memory for the cache on one rank, bytes")
    ] = None,
    num_gpu_blocks: Annotated[int | None, typer.Option(help="number of cache blocks")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="context limit, tokens")] = None,
    tp: Annotated[int, typer.Option(help="tensor parallel size")] = 1,
    pp: Annotated[int, typer.Option(help="pipeline parallel size")] = 1,
    dcp: Annotated[int, typer.Option(help="decode context parallel size")] = 1,
    dtype: Annotated[str, typer.Option(help="dtype of the model")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="dtype of the KV cache")] = "auto",
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            show_default=False,
            help="share equal prefixes; left out: vLLM's default for version and model",
        ),
    ] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="tokens a step")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="sequences a step")] = None,
    block_size: Annotated[int | None, typer.Option(help="block size, tokens")] = None,
    speculative: Annotated[
        str | None, typer.Option(help="METHOD:N with vLLM's name of the method, e.g. mtp:3")
    ] = None,
    mamba_cache_mode: Annotated[
        str | None, typer.Option(help="none, align or all; only with prefix caching")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    compute_capability: Annotated[
        str | None, typer.Option(help="of the GPU, e.g. 9.0; a few rules depend on it")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="requests at once")] = None,
    tokens_per_request: Annotated[
        int | None, typer.Option(help="prompt and answer of one request, tokens")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="prompt of one request")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Predict block size, blocks, tokens and concurrency as vLLM will log them.

    Give one of --available-gib (every answer the rounding allows), --available-bytes and
    --num-gpu-blocks. With --requests and --tokens-per-request also what that load does.

    Example: memsweep capacity --config models/qwen3.5-4b --vllm-version 0.27.0
    --max-model-len 32768 --available-gib 8.88
    """
    from tasks.plan import capacity as arithmetic
    from tasks.plan import model
    from tasks.plan.capacity import ServingSettings, Speculative

    if (requests is None) != (tokens_per_request is None):
        raise BadInput("--requests and --tokens-per-request belong together: got one of them")
    if prompt_tokens is not None and requests is None:
        raise BadInput("--prompt-tokens: needs --requests and --tokens-per-request")
    version = _version(vllm_version)
    with plain_config(config):
        description = model.describe(_read(config), where=config)
    settings = ServingSettings(
        vllm_version=version,
        device=device,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        prefix_caching=prefix_caching,
        mamba_cache_mode=mamba_cache_mode,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        decode_context_parallel=dcp,
        block_size=block_size,
        speculative=Speculative.parse(speculative) if speculative else None,
        compute_capability=_capability(compute_capability),
    )
    result = arithmetic.predict(
        description,
        settings,
        available_bytes=available_bytes,
        available_gib=available_gib,
        num_gpu_blocks=num_gpu_blocks,
    )
    load = None
    if requests is not None and tokens_per_request is not None and result.candidates:
        blocks = result.nominal.num_gpu_blocks if result.nominal else 0
        if blocks > 1:
            load = arithmetic.load(result, blocks, requests, tokens_per_request, prompt_tokens)
    if json_:
        emit_json(_document(result, load) | {"version_rules": _rules_of(version)})
    else:
        _print(result, load)
    _say_assumed(version)


def _document(result: Any, load: Any) -> dict[str, object]:
    refusal = result.refusal
    return {
        "attention_block_size_tokens": result.attention_block_size_tokens,
        "mamba_padding_percent": result.mamba_padding_percent,
        "bytes_per_block": result.bytes_per_block,
        "blocks_per_request": result.blocks_per_request,
        "kv_groups": result.kv_groups,
        "padding_layers": result.padding_layers,
        "candidates": [
            {
                "num_gpu_blocks": candidate.num_gpu_blocks,
                "kv_cache_size_tokens": candidate.kv_cache_size_tokens,
                "max_concurrency": candidate.max_concurrency,
            }
            for candidate in result.candidates
        ],
        "load": None
        if load is None
        else {
            "running": load.running,
            "waiting": load.waiting,
            "peak_usage_ratio": load.peak_usage_ratio,
            "running_at_admission": load.running_at_admission,
            "preemptions_expected": load.preemptions_expected,
        },
        "refusal": None
        if refusal is None
        else {
            "type": str(refusal.type),
            "message": refusal.message,
            "needed_bytes": refusal.needed_bytes,
            "available_bytes": refusal.available_bytes,
            "estimated_max_model_len": refusal.estimated_max_model_len,
        },
        "may_be_refused": result.may_be_refused,
    }


def _print(result: Any, load: Any) -> None:
    facts = [
        ("attention block", f"{result.attention_block_size_tokens} tokens"),
        (
            "bytes per block",
            f"{result.bytes_per_block:,} ({result.bytes_per_block / 2**20:.4g} MiB)",
        ),
        ("groups", f"{result.kv_groups} ({result.padding_layers} padding layers)"),
        ("blocks of one request", f"{result.blocks_per_request:,}"),
    ]
    if result.attention_block_size_tokens is None:
        facts = facts[1:]
    if result.mamba_padding_percent is not None:
        facts.append(("padding of the state", f"{result.mamba_padding_percent:.2f} %"))
    for name, value in facts:
        emit_text(f"{name:24}{value}")
    print_table(
        "what vLLM will log",
        ("blocks", "tokens", "concurrency"),
        [
            (f"{c.num_gpu_blocks:,}", f"{c.kv_cache_size_tokens:,}", f"{c.max_concurrency:.2f}x")
            for c in result.candidates
        ],
    )
    if load is not None:
        words = f"{load.running} run at full length, {load.waiting} wait"
        if load.running_at_admission is not None:
            words += f"; {load.running_at_admission} are admitted"
        if load.preemptions_expected:
            words += ", so some are preempted"
        emit_text(f"{words}; peak usage at most {100 * load.peak_usage_ratio:.1f} %")
    if result.refusal is not None:
        say(f"vLLM will refuse to start: {result.refusal.message}")
    elif result.may_be_refused:
        say("the logged GiB is too coarse to tell whether vLLM starts; give --available-bytes")


def fit(
    config: Annotated[
        str, typer.Option(help="the model's config.json, its folder, or OWNER/NAME@REVISION")
    ],
    p95_tokens: Annotated[int, typer.Option(help="tokens of a user's context at P95")],
    gpu: Annotated[
        list[str] | None, typer.Option(help="GPU by name, repeatable; default: all known ones")
    ] = None,
    users: Annotated[int | None, typer.Option(help="users at once: also say how many GPUs")] = None,
    weights_gib: Annotated[
        float | None, typer.Option(help="size of the weights as loaded, GiB")
    ] = None,
    weights_bytes: Annotated[
        int | None, typer.Option(help="size of the weights as loaded, bytes")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="precision of the weights, repeatable: bf16, fp8, int4, nvfp4, ..."),
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="dtype of the KV cache, repeatable; default auto")
    ] = None,
    vllm_version: Annotated[
        str | None, typer.Option(help="vLLM version; default: the pinned one")
    ] = None,
    utilization: Annotated[float, typer.Option(help="gpu_memory_utilization")] = 0.92,
    tp: Annotated[
        int | None, typer.Option(help="tensor parallel size; default: the smallest that fits")
    ] = None,
    prefix_overlap_ratio: Annotated[
        float, typer.Option(help="share of each prompt that all users have in common")
    ] = 0.0,
    language_model_only: Annotated[
        bool, typer.Option("--language-model-only", help="leave the vision tower out")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say how many users fit on a GPU, or how many GPUs given users need.

    Counts in whole cache blocks, as the scheduler does, and beside it as the sizing guide does,
    with its VRAM formula and with its worked example. The weights' size is taken from
    --weights-gib or --weights-bytes, else from the checkpoint beside the config, else counted from
    the config.

    Example: memsweep fit --config models/qwen3.5-4b --gpu L4 --p95-tokens 16000 --weights-gib 4.9
    --kv-cache-dtype fp8
    """
    from tasks.pins import ENGINE_VERSION
    from tasks.plan import gpus, model, sizing
    from tasks.plan.capacity import ServingSettings

    if weights_gib is not None and weights_bytes is not None:
        raise BadInput("weights: got --weights-gib and --weights-bytes; wanted one of them")
    given = round(weights_gib * 2**30) if weights_gib is not None else weights_bytes
    if given is not None and precision:
        raise BadInput("--precision: the weights' size is given; leave one of them out")
    version = ENGINE_VERSION if vllm_version is None else _version(vllm_version)
    with plain_config(config):
        raw = _read(config)
        description = model.describe(raw, where=config)
    sizes = (
        {"as given": given}
        if given is not None
        else _weights(config, raw, precision or [], language_model_only)
    )
    chosen = [gpus.find(name) for name in gpu] if gpu else list(gpus.GPUS)
    workload = sizing.Workload(p95_tokens, users, prefix_overlap_ratio)
    fits, unfit = [], []
    for name, size in sizes.items():
        for dtype in kv_cache_dtype or ["auto"]:
            settings = ServingSettings(version, kv_cache_dtype=dtype)
            for card in chosen:
                try:
                    answer = sizing.fit(
                        description,
                        settings,
                        workload,
                        card,
                        weights_bytes=size,
                        utilization=utilization,
                        tensor_parallel=tp,
                    )
                except BadInput as error:
                    if gpu:
                        raise
                    unfit.append((card.name, name, dtype, str(error)))
                    continue
                fits.append((name, answer))
    if json_:
        emit_json(
            {
                "p95_tokens": p95_tokens,
                "users": users,
                "fits": [_fit_document(name, answer) for name, answer in fits],
                "unfit": [
                    {"gpu": card, "weights": name, "kv_cache_dtype": dtype, "reason": reason}
                    for card, name, dtype, reason in unfit
                ],
                "weights": [{"name": name, "bytes": size} for name, size in sizes.items()],
                "version_rules": _rules_of(version),
            }
        )
    else:
        _print_fits(p95_tokens, users, fits, unfit)
    _say_assumed(version)


def _weights(
    config: str, raw: dict[str, Any], precisions: list[str], language_only: bool
) -> dict[str, int]:
    """Return the loaded bytes by name: as stored, or in each precision that was asked for."""
    from tasks.plan import sizing, weights

    path = Path(config)
    folder = path if path.is_dir() else path.parent
    try:
        checkpoint = weights.stored(folder)
    except BadInput:
        counted = weights.count_parameters(raw, where=config)
        names = precisions or ["bf16", "fp8", "int4"]
        return dict(sizing.precision_table(counted.total, counted.kept_16_bit, names))
    estimate = weights.loaded(checkpoint, language_model_only=language_only)
    if not precisions:
        return {"as stored": estimate.total_bytes}
    parts = estimate.by_component or {}
    kept = sum(size for part, size in parts.items() if part is not weights.Component.LANGUAGE) // 2
    # A checkpoint in 16 bits: half as many parameters as bytes.
    return dict(sizing.precision_table(estimate.total_bytes // 2, kept, precisions))


def _answer(answer: Any) -> dict[str, object]:
    return {"users": answer.users, "pool_bytes": answer.pool_bytes, "meaning": answer.meaning}


def _fit_document(name: str, answer: Any) -> dict[str, object]:
    user = answer.per_user
    return {
        "gpu": answer.gpu.name,
        "compute_capability": ".".join(map(str, answer.gpu.compute_capability)),
        "gpu_total_bytes": answer.gpu.total_bytes,
        "gpu_source": answer.gpu.source,
        "tensor_parallel": answer.tensor_parallel,
        "weights": name,
        "weights_bytes": answer.weights_bytes,
        "kv_cache_dtype": answer.kv_cache_dtype,
        "kv_bytes_per_token": user.kv_bytes_per_token,
        "state_bytes": user.state_bytes,
        "convolution_bytes": user.convolution_bytes,
        "blocks_per_user": user.blocks,
        "bytes_per_block": user.block_bytes,
        "users": answer.on_this_gpu.users,
        "users_low": answer.users_low,
        "users_high": answer.users_high,
        "pool_bytes": answer.pool.value_bytes,
        "pool_error_bytes": answer.pool.error_bytes,
        "pool_source": answer.pool.source,
        "gpus_needed": answer.gpus_needed,
        "guide_formula": _answer(answer.guide_formula),
        "guide_example": _answer(answer.guide_example),
        "real_blocks": _answer(answer.real_blocks),
        "notes": list(answer.notes),
    }


def _print_fits(p95: int, users: int | None, fits: list[Any], unfit: list[Any]) -> None:
    columns = ["GPU", "ranks", "weights", "KV", "users", "error bar", "blocks/user"]
    columns += ["same budget, blocks", "worked example", "VRAM formula"]
    if users is not None:
        columns.append(f"GPUs for {users}")
    rows = []
    for name, answer in fits:
        size = answer.weights_bytes / 2**30
        row: list[object] = [answer.gpu.name, answer.tensor_parallel, f"{name} {size:.1f} GiB"]
        row += [answer.kv_cache_dtype, answer.on_this_gpu.users]
        row += [f"{answer.users_low}–{answer.users_high}", answer.per_user.blocks]
        row += [answer.real_blocks.users, answer.guide_example.users, answer.guide_formula.users]
        if users is not None:
            row.append(answer.gpus_needed)
        rows.append(row)
    print_table(f"users of {p95:,} tokens", columns, rows)
    for name, answer in fits[:1]:
        for way in (
            answer.on_this_gpu,
            answer.real_blocks,
            answer.guide_example,
            answer.guide_formula,
        ):
            say(f"{way.name}: {way.meaning}")
        say(f"non-KV memory: {answer.pool.source}, ± {answer.pool.error_bytes / 2**30:.1f} GiB")
        del name
    seen: set[str] = set()
    for _, answer in fits:
        for note in answer.notes:
            if note not in seen:
                seen.add(note)
                say(f"{answer.gpu.name}, {answer.kv_cache_dtype}: {note}")
    for card, name, dtype, reason in unfit:
        say(f"{card}, {name}, {dtype}: {reason}")
