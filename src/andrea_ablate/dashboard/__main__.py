"""The report's page, live: ``python -m andrea_ablate.dashboard``, then open the address that it prints."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from andrea_ablate.command import command
from andrea_ablate.dashboard.server import Dashboard, is_loopback
from andrea_ablate.registry import ConfigError


@command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.dashboard", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    parser.add_argument("--sweeps", type=Path, default=Path("sweeps"), help="folder of the sweeps (default: sweeps)")
    parser.add_argument("--port", type=int, default=8265, help="0 takes a free one (default: 8265)")
    parser.add_argument("--host", default="127.0.0.1", help="another address asks for a token (default: 127.0.0.1)")
    parser.add_argument("--token", help="what visitors must know (default: made up, where --host is not loopback)")
    given = parser.parse_args()
    token = given.token or (None if is_loopback(given.host) else secrets.token_urlsafe(24))
    try:
        with Dashboard((given.host, given.port), given.sweeps, given.runs, token) as server:
            print(f"{server.url}\nCtrl-C ends it.", flush=True)
            server.serve_forever()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot serve on {given.host}:{given.port}: {error}; give another --host or --port"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
