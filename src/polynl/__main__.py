"""The command `polynl`, which is also `python -m polynl`."""

import sys

from polynl.extras import install_hint


def main() -> None:
    """Run :func:`polynl.cli.main`; if a package is missing, say which extra installs it."""
    try:
        from polynl import cli  # needs packages of its own, which the core does not bring

        cli.main()
    except ModuleNotFoundError as error:
        hint = install_hint(error)
        if hint is None:
            raise
        print(f"polynl: {hint}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
