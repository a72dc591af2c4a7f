"""The command ``sosp``, also as ``python -m sosp`` and ``torchrun -m sosp``."""

import sys

from sosp.core.optional_packages import import_package
from sosp.errors import SospError


def main() -> None:
    """Run the command line, or name the command that installs it."""
    try:
        for name in ("typer", "rich"):
            import_package(name)
    except SospError as missing:
        print(f"sosp: {missing}", file=sys.stderr)
        sys.exit(2)
    from sosp.app import cli

    cli.main()


if __name__ == "__main__":
    main()
