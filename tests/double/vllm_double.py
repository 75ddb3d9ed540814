"""A double of ``vllm serve``: real processes, real HTTP, an exact scheduler, no model.

Started by an executable named ``vllm`` that :func:`tests.double.engine.make_engine` writes, so
the run's code runs unchanged. Standard library only. One process serves HTTP and steps the
scheduler; a second one stands for EngineCore: when it is killed, this one prints what vLLM prints
and leaves with exit code 0, as vLLM does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.double import logs
from tests.double.replay import Replay
from tests.double.scheduler import Request, Scheduler
from tests.double.wire import chunk, event, follow, reply, tell

#: Every key of the configuration file with its default; see tests/double/README.md.
DEFAULTS: dict[str, Any] = {
    "version": "0.27.0",
    "boot_s": 0.1,
    "step_s": 0.001,
    "block_size": 128,
    "bytes_per_block": 262_144,
    "state_blocks": 0,
    "template_tokens": 6,
    "total_memory_bytes": 16 << 30,
    "old_names": False,
    "page_padding_bytes": 0,
    "device": "cpu",  # "cuda": the log tells of loading, available memory and graphs
    "refuse_lines": None,
    "refuse_exit_code": 1,
    "fail": None,  # {"at": a step of logs.STEPS or "serving", "lines": [...], "after": requests}
    "replay": None,  # folder of a run's outputs: its log and metrics again, at their own times
    "replay_speed": 1.0,
    "hang_at_boot": False,
    "die_on_first_request": False,
    "hang_on_request": False,
    "fail_requests_after": None,
    "think": False,
    "alias": None,
    "reported_max_model_len": None,
    "garble_metrics_every": None,
    "slow_metrics_s": 0.0,
    "dying_s": 0.3,
    "ignore_sigterm": False,
    "orphan_worker": None,  # "group": stays in the group; "session": leaves it
}

DIED: dict[str, object] = {
    "error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError"}
}
STAND_IN = (
    "import signal,sys,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n"
)
ENGINE = "import signal,sys\nsignal.signal(signal.SIGTERM, signal.{})\nsys.stdin.read()\n"


class Double:
    """The server: settings from the command line, behaviour from the configuration."""

    def __init__(self, config: dict[str, Any], options: argparse.Namespace) -> None:
        self.config = {**DEFAULTS, **config}
        self.options = options
        size = options.kv_cache_memory_bytes or int(
            self.config["total_memory_bytes"] * options.gpu_memory_utilization
        )
        self.scheduler = Scheduler(
            num_blocks=size // self.config["bytes_per_block"],
            block_size=options.block_size or self.config["block_size"],
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            state_blocks=self.config["state_blocks"],
        )
        self.boot = logs.Boot(
            version=self.config["version"],
            model=options.model,
            port=options.port,
            max_model_len=options.max_model_len,
            arguments={k: v for k, v in vars(options).items() if v is not None},
            num_blocks=self.scheduler.num_blocks,
            block_size=self.scheduler.block_size,
            state_blocks=self.config["state_blocks"],
            kv_cache_bytes=size,
            total_bytes=self.config["total_memory_bytes"],
            device=self.config["device"],
        )
        self.counters = dict.fromkeys(
            ("prompt_tokens", "generation_tokens", "success", "requests", "scrapes"), 0
        )
        self.progress: dict[str, asyncio.Event] = {}
        self.engine: subprocess.Popen[bytes] | None = None
        self.dead = False

    # Life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Print the start-up log and start what vLLM starts; may leave the process."""
        pid = os.getpid()
        tell(logs.banner(self.boot, pid))
        time.sleep(self.config["boot_s"])
        if self.config["hang_at_boot"]:
            time.sleep(3600)
        self._refuse(pid)
        self._fail_at_start(pid)
        program = ENGINE.format("SIG_IGN" if self.config["ignore_sigterm"] else "SIG_DFL")
        self.engine = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
        tell(logs.engine_start(self.boot, self.engine.pid))
        tell(logs.engine_done(self.boot, self.engine.pid))
        worker = self.config["orphan_worker"]
        if worker:
            subprocess.Popen(
                [sys.executable, "-c", STAND_IN], start_new_session=worker == "session"
            )

    def _refuse(self, pid: int) -> None:
        lines = self.config["refuse_lines"]
        if lines is None and self.boot.kv_cache_bytes > 0.9 * self.boot.total_bytes:
            lines = logs.refused_kv(self.boot, pid)
        if lines is None and self.boot.concurrency < 1:
            lines = logs.refused_length(self.boot, pid)
        if lines is not None:
            tell(lines)
            sys.exit(self.config["refuse_exit_code"])

    def _fail_at_start(self, pid: int) -> None:
        fail = self.config["fail"]
        if fail is not None and fail["at"] != "serving":
            tell(logs.engine_start(self.boot, pid, fail["at"]))
            tell(fail["lines"])
            tell(logs.start_failed(pid))
            sys.exit(1)

    async def serve(self) -> int:
        """Serve until SIGTERM or the engine's end; returns the exit code."""
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            ignore = self.config["ignore_sigterm"]
            loop.add_signal_handler(number, (lambda: None) if ignore else stopped.set)
        server = await asyncio.start_server(self._client, self.options.host, self.options.port)
        tell(logs.ready(self.boot, os.getpid()))
        stepping = asyncio.create_task(self._steps())
        watching = asyncio.create_task(self._engine_alive())
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
        stepping.cancel()
        if watching.done():
            await self._die()
        server.close()
        self._end_engine()
        return 0

    async def _engine_alive(self) -> None:
        while self.engine is not None and self.engine.poll() is None:
            await asyncio.sleep(0.05)

    async def _die(self) -> None:
        """End every stream with an error under status 200, as vLLM does, and linger a moment."""
        tell(logs.engine_died(self.boot, os.getpid()))
        self.dead = True
        for waiter in self.progress.values():
            waiter.set()
        await asyncio.sleep(self.config["dying_s"])

    def _end_engine(self) -> None:
        if self.engine is not None:
            self.engine.kill()
            self.engine.wait()

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.config["step_s"])
            for request in self.scheduler.step():
                self.counters["generation_tokens"] += 1
                self.progress[request.name].set()

    # HTTP ------------------------------------------------------------------------------------

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await follow(reader, writer, self._answer)

    async def _answer(
        self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if (method, path) == ("GET", "/health"):
            reply(writer, 503 if self.dead else 200, b"")
        elif path == "/version":
            reply(writer, 200, {"version": self.config["version"]})
        elif path == "/v1/models":
            reply(writer, 200, self._models())
        elif path == "/metrics":
            await self._metrics(writer)
        elif (method, path) == ("POST", "/v1/chat/completions"):
            await self._complete(json.loads(body), writer)
        else:
            reply(writer, 404, {"detail": "Not Found"})
        await writer.drain()

    def _models(self) -> dict[str, object]:
        limit = self.config["reported_max_model_len"] or self.options.max_model_len
        entry = {"id": self._alias, "object": "model", "root": self.options.model}
        return {"object": "list", "data": [{**entry, "max_model_len": limit}]}

    @property
    def _alias(self) -> str:
        return str(self.config["alias"] or self.options.served_model_name)

    async def _metrics(self, writer: asyncio.StreamWriter) -> None:
        self.counters["scrapes"] += 1
        if self.config["slow_metrics_s"]:
            await asyncio.sleep(self.config["slow_metrics_s"])
        every = self.config["garble_metrics_every"]
        if every and self.counters["scrapes"] % every == 0:
            kind = self.counters["scrapes"] // every % 3
            if kind == 0:
                reply(writer, 500, b"Internal Server Error")
            elif kind == 1:
                reply(writer, 200, b"\x00\xff garbled" * 50)
            else:
                reply(
                    writer, 200, self.page().replace("perc{", "perc{ ").encode()[:40] + b" NaNope"
                )
            return
        reply(writer, 200, self.page().encode(), kind="text/plain; version=0.0.4")

    def page(self) -> str:
        """Return the /metrics page, under old or new names."""
        scheduler, counters = self.scheduler, self.counters
        labels = f'engine="0",model_name="{self.options.served_model_name}"'
        old = self.config["old_names"]
        families: list[tuple[str, str, float]] = [
            ("vllm:num_requests_running", "", len(scheduler.running)),
            ("vllm:num_requests_waiting", "", len(scheduler.waiting)),
            (
                "vllm:gpu_cache_usage_perc" if old else "vllm:kv_cache_usage_perc",
                "",
                scheduler.usage,
            ),
            ("vllm:num_preemptions_total", "", scheduler.preemptions),
            ("vllm:prompt_tokens_total", "", counters["prompt_tokens"]),
            ("vllm:generation_tokens_total", "", counters["generation_tokens"]),
            ("vllm:request_success_total", ',finished_reason="stop"', 0),
            ("vllm:request_success_total", ',finished_reason="length"', counters["success"]),
            ("vllm:prefix_cache_queries_total", "", 0),
            ("vllm:prefix_cache_hits_total", "", 0),
        ]
        lines: list[str] = []
        for name, more, value in families:
            lines.append(f"# TYPE {name} gauge")
            lines.append(f"{name}{{{labels}{more}}} {float(value)}")
        lines.append(f"vllm:cache_config_info{{{self._cache_config()}}} 1.0")
        padding = 'vllm:request_latency_bucket{le="0.5",' + labels + "} 0.0"
        lines += [padding] * (self.config["page_padding_bytes"] // len(padding))
        return "\n".join(lines) + "\n"

    def _cache_config(self) -> str:
        scheduler, options = self.scheduler, self.options
        values = {
            "block_size": scheduler.block_size,
            "cache_dtype": options.kv_cache_dtype,
            "enable_prefix_caching": options.enable_prefix_caching,
            "engine": 0,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "kv_cache_max_concurrency": self.boot.concurrency,
            "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
            "kv_cache_size_tokens": self.boot.tokens,
            "num_gpu_blocks": scheduler.num_blocks,
        }
        return ",".join(f'{name}="{value}"' for name, value in values.items())

    # Completions -----------------------------------------------------------------------------

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.counters["requests"] += 1
        fatal = self._fatal()
        if fatal and self.engine is not None:
            tell(fatal)
            self.engine.kill()
            await asyncio.sleep(5)
            return
        if self.config["hang_on_request"]:
            await asyncio.sleep(3600)
        after = self.config["fail_requests_after"]
        if self.dead or (after is not None and self.counters["requests"] > after):
            reply(writer, 500, DIED)
            return
        text = " ".join(str(message.get("content", "")) for message in body["messages"])
        prompt = len(text.split()) + self.config["template_tokens"]
        name = f"chatcmpl-{self.counters['requests']}"
        request = Request(name, prompt, int(body.get("max_tokens") or 16))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": request.max_output,
            "total_tokens": prompt + request.max_output,
        }
        self.progress[name] = asyncio.Event()
        self.scheduler.add(request)
        try:
            if body.get("stream"):
                await self._stream(request, usage, writer)
            else:
                await self._whole(request, usage, writer)
        finally:
            self.scheduler.drop(request)
            del self.progress[name]
        self.counters["prompt_tokens"] += prompt
        self.counters["success"] += 1

    def _fatal(self) -> list[str]:
        """Return the engine's last words if this request is to kill it."""
        fail = self.config["fail"]
        if fail is not None and fail["at"] == "serving":
            return list(fail["lines"]) if self.counters["requests"] > fail.get("after", 0) else []
        died = self.config["die_on_first_request"]
        return ["RuntimeError: Unexpected head dim size, 32"] if died else []

    async def _whole(
        self, request: Request, usage: dict[str, int], writer: asyncio.StreamWriter
    ) -> None:
        while not request.finished:
            await self._progress(request)
            if self.dead:
                reply(writer, 500, DIED)
                return
        message: dict[str, object] = {"role": "assistant", "content": "a " * request.max_output}
        if self.config["think"]:
            message["reasoning_content"] = "Let me think."
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        reply(writer, 200, {"id": request.name, "model": self._alias, "choices": [choice],
                            "usage": usage})  # fmt: skip

    async def _stream(
        self, request: Request, usage: dict[str, int], writer: asyncio.StreamWriter
    ) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        sent = 0
        while not request.finished:
            await self._progress(request)
            if self.dead:
                event(writer, DIED)
                break
            while sent < request.output:
                sent += 1
                finish = "length" if sent == request.max_output else None
                delta = {"index": 0, "delta": {"content": "a "}, "finish_reason": finish}
                event(writer, {"id": request.name, "model": self._alias, "choices": [delta]})
            await writer.drain()
        if not self.dead:
            event(writer, {"id": request.name, "model": self._alias, "choices": [], "usage": usage})
        chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    async def _progress(self, request: Request) -> None:
        waiter = self.progress[request.name]
        await waiter.wait()
        waiter.clear()


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse vLLM's command line; an unknown flag ends with vLLM's usage error and code 2."""
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for name, kind, default in (
        ("served-model-name", str, None),
        ("host", str, "127.0.0.1"),
        ("port", int, 8000),
        ("max-model-len", int, 2048),
        ("gpu-memory-utilization", float, 0.9),
        ("max-num-seqs", int, 256),
        ("max-num-batched-tokens", int, 2048),
        ("dtype", str, "auto"),
        ("kv-cache-dtype", str, "auto"),
        ("kv-cache-memory-bytes", int, None),
        ("block-size", int, None),
        ("tensor-parallel-size", int, 1),
        ("pipeline-parallel-size", int, 1),
        ("seed", int, 0),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    for name in ("enable-prefix-caching", "enforce-eager", "language-model-only"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=False)
    return parser.parse_args(argv)


def main() -> int:
    """``vllm_double.py CONFIG.json serve MODEL ...``."""
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    options = parse(sys.argv[2:])
    if config.get("replay"):
        replay = Replay(Path(config["replay"]), float(config.get("replay_speed", 1.0)))
        return asyncio.run(replay.serve(options.host, options.port))
    double = Double(config, options)
    double.start()
    return asyncio.run(double.serve())


if __name__ == "__main__":
    sys.exit(main())
