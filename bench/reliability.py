"""What the gateway does when things go wrong, in counts.

    python bench/reliability.py [--only kill,disk] [--kills N] [--gigabytes G] [--fuzz-minutes M] [--json PATH]

Everything runs here: the gateway as ``outrider gateway``, a scripted upstream, and clients that know which of
their calls were answered. A line that misses what is wanted ends in ``NO``, and the command then exits with 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import reliability_clients
import reliability_disk
import reliability_fuzz
import reliability_kill
from reliability_rig import Result

Checks = dict[str, Callable[[argparse.Namespace], list[Result]]]

CHECKS: Checks = {
    "kill": lambda given: reliability_kill.check(given.kills, given.gigabytes, given.seed),
    "restart": lambda given: reliability_kill.check_restart(),
    "disk": lambda given: reliability_disk.check(),
    "stalled": lambda given: reliability_disk.check_stalled(given.stall_s),
    "slow": lambda given: reliability_clients.slow_clients(),
    "body": lambda given: reliability_clients.large_bodies() + reliability_clients.bombs(),
    "leaks": lambda given: reliability_clients.leaks(given.calls),
    "fuzz": lambda given: reliability_fuzz.check(given.fuzz_minutes, given.seed),
}


def main() -> int:
    given = arguments()
    names = given.only.split(",") if given.only else list(CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        sys.exit(f"--only: there is no {unknown[0]!r}; choose from {', '.join(CHECKS)}.")
    memory = psutil.virtual_memory().total >> 30
    print(f"{platform.platform()}, Python {platform.python_version()}, {psutil.cpu_count()} CPUs, {memory} GiB\n")
    results: list[Result] = []
    for name in names:
        began = time.monotonic()
        found = CHECKS[name](given)
        results += found
        for result in found:
            wanted = f"  (wanted: {result.wanted})" if result.wanted else ""
            print(f"{result.check:44} {result.figure}{wanted}{'' if result.ok else '  NO'}", flush=True)
        print(f"{'':44} [{name}: {time.monotonic() - began:.0f} s]\n", flush=True)
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    failed = sum(not result.ok for result in results)
    print(f"{failed} of {len(results)} lines miss what is wanted" if failed else "all as wanted")
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"joined by commas, some of {', '.join(CHECKS)}; empty for all")
    parser.add_argument("--kills", type=int, default=20, help="how often the gateway is killed, for each store")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the large store")
    parser.add_argument("--stall-s", type=float, default=30.0, help="how long the store's writer is held up")
    parser.add_argument("--calls", type=int, default=4000, help="calls of each kind whose memory is measured")
    parser.add_argument("--fuzz-minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the lines here too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
