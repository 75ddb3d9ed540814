"""``memsweep capacity``: what vLLM will log about its KV cache, before anything boots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.output import emit_json, emit_text, print_table, say

GROUP = "Plan"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("capacity", rich_help_panel=GROUP)(capacity)


def _config_path(config: Path) -> dict[str, Any]:
    from tasks.plan import model

    return model.load(config)


def _capability(text: str | None) -> tuple[int, int] | None:
    from warehouse.errors import BadInput

    if text is None:
        return None
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise BadInput(f"--compute-capability {text!r}: wanted a number like 8.9")
    return int(major), int(minor)


def capacity(
    config: Annotated[Path, typer.Option(help="the model's config.json, or its folder")],
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
        bool | None, typer.Option("--prefix-caching/--no-prefix-caching", show_default=False)
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
    from warehouse.errors import BadInput

    if (requests is None) != (tokens_per_request is None):
        raise BadInput("--requests and --tokens-per-request belong together: got one of them")
    if prompt_tokens is not None and requests is None:
        raise BadInput("--prompt-tokens: needs --requests and --tokens-per-request")
    description = model.describe(_config_path(config), where=str(config))
    settings = ServingSettings(
        vllm_version=vllm_version,
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
        emit_json(_document(result, load))
    else:
        _print(result, load)


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
