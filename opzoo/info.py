"""``python -m opzoo.info [--json]``: what is installed, what opzoo was built for, and what is wrong.

Made for broken installations, so it needs the standard library only and every probe may fail.
:mod:`opzoo` itself is tried in a child process, where even a crash is only a finding.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opzoo._diagnosis import Facts, diagnose, holds_kernels

PACKAGE = Path(__file__).resolve().parent
PCI = Path("/sys/bus/pci/devices")
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import opzoo
print("opzoo-info:" + json.dumps(opzoo.build_info()))
"""


def collect() -> Facts:
    """Everything the command prints, as a tree of JSON values; ``problems`` says what is wrong and what to do."""
    facts: Facts = {
        "opzoo": _opzoo(),
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "torch": _torch(),
        "torchvision": _distribution("torchvision"),
        "numpy": _distribution("numpy"),
        "driver": _driver(),
        "gpu_on_bus": _gpu_on_bus(),
        "nvcc": _nvcc(),
    }
    facts["opzoo"].update(_try_opzoo() if facts["torch"]["version"] else {"loads": False, "error": None, "build": None})
    build = facts["opzoo"]["build"]
    archs = build["cuda_archs"] if build and build["cuda"] else ""
    facts["devices"] = _devices(facts["torch"])
    for device in facts["devices"]:
        device["has_kernels"] = holds_kernels(archs, device["capability"])
    facts["problems"] = diagnose(facts)
    return facts


def _opzoo() -> Facts:
    version = re.search(r'__version__ = "([^"]+)"', _read(PACKAGE / "_version.py"))
    libraries = sorted(path for pattern in ("_C.*so", "_C.*pyd") for path in PACKAGE.glob(pattern))
    loadable = [p for p in libraries if p.name.removeprefix("_C") in importlib.machinery.EXTENSION_SUFFIXES]
    return {
        "version": version.group(1) if version else None,
        "location": str(PACKAGE),
        "library": str(loadable[0]) if loadable else None,
        "other_libraries": [str(path) for path in libraries if path not in loadable],
    }


def _torch() -> Facts:
    facts: Facts = {"version": None, "cuda": None, "cuda_available": False, "location": None, "error": None}
    try:
        torch: Any = importlib.import_module("torch")
        facts["version"] = str(torch.__version__)
        facts["location"] = str(Path(torch.__file__).parent)
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
        facts["installed"] = _distribution("torch")
        return facts
    try:
        facts["cuda"] = torch.version.cuda
        facts["cuda_available"] = bool(torch.cuda.is_available())
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def _try_opzoo() -> Facts:
    """Import opzoo as a user would, with the same search path."""
    path = json.dumps([str(PACKAGE.parent), *sys.path])
    try:
        command = [sys.executable, "-c", _CHILD, path]
        child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        return {"loads": False, "error": f"{type(error).__name__}: {error}", "build": None}
    found = re.search(r"^opzoo-info:(.*)$", child.stdout, re.MULTILINE)
    if child.returncode == 0 and found:
        return {"loads": True, "error": None, "build": json.loads(found.group(1))}
    if child.returncode < 0:
        return {"loads": False, "error": f"the process died of {_signal_name(-child.returncode)}", "build": None}
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    return {"loads": False, "error": lines[-1] if lines else f"exit code {child.returncode}", "build": None}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except Exception:  # also metadata that is damaged
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _nvidia_smi(field: str) -> list[str]:
    lines = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _driver() -> str | None:
    found = re.search(r"Kernel Module\D*?(\d+(?:\.\d+)+)", _read(Path("/proc/driver/nvidia/version")))
    if found:
        return found.group(1)
    versions = [line for line in _nvidia_smi("driver_version") if line[:1].isdigit()]
    return versions[0] if versions else None


def _gpu_on_bus() -> bool:
    """Whether a display controller of NVIDIA's is plugged in, with or without its driver."""
    return any(
        _read(device / "vendor").strip() == "0x10de" and _read(device / "class").startswith("0x03")
        for device in PCI.glob("*")
    )


def _nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    program = next((path for path in candidates if os.access(path, os.X_OK)), None) or shutil.which("nvcc")
    found = re.search(r"release ([\d.]+)", _output(program, "--version")) if program else None
    return f"{found.group(1)} ({program})" if found else None


def _devices(torch_facts: Facts) -> list[Facts]:
    """The GPUs torch can use; where it can use none, those the driver knows."""
    devices: list[Facts] = []
    if torch_facts["cuda_available"]:
        try:
            torch: Any = importlib.import_module("torch")
            for index in range(torch.cuda.device_count()):
                major, minor = torch.cuda.get_device_capability(index)
                devices.append({"name": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"})
            return devices
        except Exception:
            devices.clear()
    for line in _nvidia_smi("name,compute_cap"):
        name, _, capability = line.rpartition(", ")
        if re.fullmatch(r"\d+\.\d+", capability):
            devices.append({"name": name, "capability": capability})
    return devices


def _text(facts: Facts) -> str:
    opzoo, torch = facts["opzoo"], facts["torch"]
    absent = "none found"
    lines = [
        ("opzoo", f"{opzoo['version']} in {opzoo['location']}"),
        ("_C", opzoo["library"] or absent),
        ("loads", "yes" if opzoo["loads"] else f"no{': ' + opzoo['error'] if opzoo['error'] else ''}"),
        *((f"built: {key}", str(value) or "-") for key, value in (opzoo["build"] or {}).items()),
        ("python", f"{facts['python']['version']} ({facts['python']['executable']})"),
        ("platform", facts["python"]["platform"]),
        ("torch", f"{torch['version'] or absent}, CUDA {torch['cuda'] or '-'}, usable: {torch['cuda_available']}"),
        ("torchvision", facts["torchvision"] or absent),
        ("numpy", facts["numpy"] or absent),
        ("driver", facts["driver"] or absent),
        ("nvcc", facts["nvcc"] or absent),
    ]
    for index, device in enumerate(facts["devices"]):
        kernels = "_C holds kernels for it" if device["has_kernels"] else "no kernels for it"
        lines.append((f"device {index}", f"{device['name']}, capability {device['capability']}, {kernels}"))
    if not facts["devices"]:
        lines.append(("devices", "no CUDA GPU found"))
    text = "\n".join(f"{name:<26}{value}" for name, value in lines)
    for problem in facts["problems"]:
        text += f"\n\nPROBLEM: {problem['what']}\nDO:      {problem['do']}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 0 when opzoo imports and every GPU can be used."""
    parser = argparse.ArgumentParser(prog="python -m opzoo.info", description="What opzoo runs on, and why not.")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    arguments = parser.parse_args(argv)
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else _text(facts))
    return 1 if facts["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
