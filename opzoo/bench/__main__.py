"""``python -m opzoo.bench [op ...]``: measure operators, their distance from the floor and from their peers."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from opzoo.bench import report
from opzoo.bench.machine import Machine, describe
from opzoo.bench.runner import AnyCase, Options, Result, find_all, run_here, run_isolated

PEERS = ("torch", "torchvision")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m opzoo.bench",
        description="Check, then time. Exit code 1 when a case is wrong or raises.",
    )
    parser.add_argument("ops", nargs="*", metavar="op", help="operators to run, or models; all when left out")
    parser.add_argument("--device", help="cuda, cuda:N or cpu; cuda where there is one")
    parser.add_argument(
        "--compare",
        metavar="PEER[,PEER]",
        help="torch, torchvision or none: peers to insist on; when left out, those that are installed",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every number to FILE")
    parser.add_argument("--merge", action="store_true", help="keep what FILE of --csv has of other cases")
    parser.add_argument("--plot", type=Path, metavar="FILE_OR_DIR", help="chart the ratios (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="one small case per operator: does it work at all")
    parser.add_argument("--overhead", action="store_true", help="host time per call on tiny tensors instead")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument(
        "--in-process", action="store_true", help="no worker process, for a debugger or profiler; a crash ends the run"
    )
    return parser


def _peers(parser: argparse.ArgumentParser, asked: str | None) -> tuple[str, ...]:
    if asked is None:
        return PEERS
    peers = tuple(name for name in asked.split(",") if name not in ("", "none"))
    for name in peers:
        if name not in PEERS:
            parser.error(f"--compare: no peer {name!r}; there are {', '.join(PEERS)} and none")
        try:
            importlib.import_module(name)
        except Exception as error:
            parser.error(f"--compare: {name} cannot be imported: {error}")
    return peers


def _options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Options:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cuda", "cpu"):
        parser.error(f"--device: expected cuda, cuda:N or cpu, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    which = "tiny" if arguments.overhead else "quick" if arguments.quick else "full"
    return Options(device, which, _peers(parser, arguments.compare), arguments.overhead)


def _chosen(parser: argparse.ArgumentParser, ops: list[str], options: Options) -> list[AnyCase]:
    cases = find_all(options.which, torch.device(options.device).type)
    known = list(dict.fromkeys(case.op for case in cases))
    for op in ops:
        if op not in known:
            parser.error(f"no operator {op!r}; there are {', '.join(known)}")
    return [case for case in cases if not ops or case.op in ops]


def _print_header(options: Options, machine: Machine) -> None:
    print(f"opzoo {report.commit()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {machine.name}")
    if options.overhead:
        print("Host time per call on tiny tensors; ratio = peer's time / opzoo's.")
        return
    print(f"Floor from {describe(machine)}.")
    cold = "Cold L2, CUDA events" if torch.device(options.device).type == "cuda" else "Warm caches, wall time"
    print(f"{cold}, medians; floor = share of it reached; ratio = peer's time / opzoo's.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    options = _options(parser, arguments)
    cases = _chosen(parser, arguments.ops, options)
    if arguments.list:
        for case in cases:
            print(f"{case.op}: {case.id}")
        return 0
    run = run_here if arguments.in_process else run_isolated
    replies = run(cases, options)
    machine = next(replies)
    assert isinstance(machine, Machine)
    _print_header(options, machine)
    on_cuda = torch.device(options.device).type == "cuda"
    width = max(len(case.id) for case in cases)
    table = report.Table(sys.stdout, width, machine, overhead=options.overhead, memory=on_cuda)
    instead_of = {(case.op, case.id) for case in cases} if arguments.merge else None
    csv_file = report.CsvFile(arguments.csv, instead_of) if arguments.csv else None
    origin = report.commit()
    results = []
    for result in replies:
        assert isinstance(result, Result)
        results.append(result)
        table.add(result)
        if csv_file:
            csv_file.write(report.csv_rows(result, machine, origin))
    if csv_file:
        csv_file.close()
    if arguments.plot:
        for path in report.plot(results, arguments.plot, machine):
            print(f"chart: {path}")
    bad = [result for result in results if result.status != "ok"]
    if bad:
        print(f"\n{len(bad)} of {len(results)} cases are wrong or did not run.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
