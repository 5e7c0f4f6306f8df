"""The command `polynl`, which is also `python -m polynl`."""

import sys

from polynl import __version__
from polynl.terminal import end_on_signals, run_to_the_end, set_up_streams


def main() -> None:
    """Run :func:`polynl.cli.main`; if a package is missing, say which extra installs it."""
    end_on_signals()
    set_up_streams()
    if sys.argv[1:] == ["--version"]:
        print(f"polynl {__version__}")
        return
    try:
        from polynl.cli import main as run  # needs packages of its own, which the core does not bring

        run_to_the_end(run)
    except ModuleNotFoundError as error:
        from polynl.extras import install_hint

        hint = install_hint(error)
        if hint is None:
            raise
        print(f"polynl: {hint}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
