"""From what :mod:`opzoo.info` found to what is wrong and what to do. Standard library only."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

Facts: TypeAlias = "dict[str, Any]"

MIN_TORCH = (2, 11)
# By major version of the CUDA runtime linked into _C: the first driver branch that runs it.
MIN_DRIVER = {12: 525, 13: 580}
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def holds_kernels(archs: str, capability: str) -> bool:
    """Whether a build for ``archs``, as in ``"8.6;9.0a;12.0+PTX"``, runs on a GPU of this capability.

    Machine code runs on its own major version from its minor version on; ``a`` on that one GPU only.
    PTX is compiled by the driver for any later GPU.
    """
    major, minor = (int(part) for part in capability.split("."))
    for arch in archs.replace(",", ";").split(";"):
        found = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch.strip())
        if not found:
            continue
        built = int(found.group(1)), int(found.group(2))
        same_major = built[0] == major and built[1] <= minor and found.group(3) != "a"
        from_ptx = built <= (major, minor) and found.group(4) and not found.group(3)
        if built == (major, minor) or same_major or from_ptx:
            return True
    return False


def diagnose(facts: Facts) -> list[dict[str, str]]:
    """What keeps opzoo, or its CUDA half, from working here: ``what`` and ``do``, one plain sentence each."""
    problem = _cannot_import(facts)
    return [problem] if problem else _cannot_use_gpu(facts)


def _problem(what: str, do: str) -> dict[str, str]:
    return {"what": what, "do": do}


def release_of(version: str) -> tuple[int, int] | None:
    """Major and minor of ``"2.14.1+cu130"``; None for words."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else None


def _cannot_import(facts: Facts) -> dict[str, str] | None:
    opzoo, torch = facts["opzoo"], facts["torch"]
    floor = ".".join(map(str, MIN_TORCH))
    python = facts["python"]["executable"]
    if torch["version"] is None:
        if torch.get("installed"):
            return _problem(
                f"torch {torch['installed']} is installed but does not import ({torch['error']}).",
                "Reinstall torch; opzoo cannot load before `import torch` works.",
            )
        return _problem(f"torch is not installed for {python}.", f"pip install 'torch>={floor}'")
    release = release_of(torch["version"])
    if release and release < MIN_TORCH:
        return _problem(
            f"torch {torch['version']} is too old: opzoo needs {floor} or newer.", f"pip install -U 'torch>={floor}'"
        )
    if opzoo["loads"]:
        return None
    if opzoo["library"] is None:
        if opzoo["other_libraries"]:
            return _problem(
                f"The compiled part, {opzoo['other_libraries'][0]}, is for another Python or platform.",
                f"Install opzoo with {python} -m pip, or build it with that Python.",
            )
        return _problem(
            f"The compiled part of opzoo is missing: there is no _C in {opzoo['location']}.",
            "In the source tree: pip install --no-build-isolation -e .",
        )
    return _load_failure(opzoo["error"] or "", torch["version"])


def _load_failure(error: str, torch_version: str) -> dict[str, str]:
    symbol = re.search(r"undefined symbol: (\w+)", error)
    if symbol:
        return _problem(
            f"_C needs the symbol {symbol.group(1)}, which torch {torch_version} does not have: "
            "it was built against another torch.",
            f"Build opzoo against the installed torch: {REBUILD}",
        )
    if re.search(r"invalid ELF header|file too short|wrong ELF class|not a valid", error):
        return _problem(
            "The file of _C is damaged or of another platform.", f"Install opzoo again, or rebuild: {REBUILD}"
        )
    missing = re.search(r"version [`'](GLIBC\w*_[\d.]+)' not found", error)
    if missing:
        return _problem(f"_C was built on a newer system: it needs {missing.group(1)}.", f"Build it here: {REBUILD}")
    missing = re.search(r"(lib[\w.+-]+): cannot open shared object file", error)
    if missing:
        return _problem(
            f"_C needs the library {missing.group(1)}, which is not found.",
            f"If torch itself works, build opzoo against it: {REBUILD}",
        )
    return _problem(
        f"opzoo does not import: {error}.", "If the message does not help, report it together with this output."
    )


def _missing_driver(facts: Facts) -> list[dict[str, str]]:
    """Only where CUDA is installed: who wants the CPU alone needs no driver."""
    wanted = facts["opzoo"]["build"]["cuda"] and facts["torch"]["cuda"]
    if not (wanted and facts["gpu_on_bus"]) or facts["driver"]:
        return []
    return [
        _problem(
            "There is an NVIDIA GPU, but no NVIDIA driver is loaded.",
            "Install the driver; in a container, start it with its GPUs (docker run --gpus all).",
        )
    ]


def _cannot_use_gpu(facts: Facts) -> list[dict[str, str]]:
    build, torch, devices = facts["opzoo"]["build"], facts["torch"], facts["devices"]
    if not devices:
        return _missing_driver(facts)
    name = devices[0]["name"]
    if not build["cuda"]:
        return [
            _problem(
                f"There is a CUDA GPU ({name}), but this build of opzoo holds CPU kernels only.",
                "Install a wheel with CUDA, or build with the toolkit: OPZOO_CUDA=1 pip install --no-build-isolation .",
            )
        ]
    if not torch["cuda"]:
        return [
            _problem(
                f"There is a CUDA GPU ({name}), but torch {torch['version']} is a CPU-only build.",
                "Install a CUDA build of torch: https://pytorch.org/get-started/locally",
            )
        ]
    problems = []
    built_with = re.search(r"\+cu(\d+)\d$", build["built_with_torch"])
    runtime = int(built_with.group(1)) if built_with else None
    needed = MIN_DRIVER.get(runtime or 0)
    driver = facts["driver"]
    if needed and driver and int(driver.split(".")[0]) < needed:
        problems.append(
            _problem(
                f"The NVIDIA driver {driver} is too old: the CUDA {runtime} runtime in _C needs {needed} or newer.",
                f"Update the driver, or build opzoo with an older CUDA toolkit: {REBUILD}",
            )
        )
    elif not torch["cuda_available"]:
        problems.append(
            _problem(
                f"There is a CUDA GPU ({name}), but torch cannot use it.",
                "See what `python -c 'import torch; torch.cuda.init()'` says.",
            )
        )
    for device in devices:
        if not device["has_kernels"]:
            capability, archs = device["capability"], build["cuda_archs"]
            problems.append(
                _problem(
                    f"{device['name']} has compute capability {capability}, but _C was built for {archs}.",
                    f"TORCH_CUDA_ARCH_LIST={capability} {REBUILD}",
                )
            )
    return problems
