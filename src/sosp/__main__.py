"""``python -m sosp``, and ``torchrun -m sosp``: the command line."""

from sosp.cli import main

if __name__ == "__main__":
    main()
