"""`python -m polynl` is `polynl`."""

from polynl.cli import main

if __name__ == "__main__":
    main()
