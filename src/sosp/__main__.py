"""``python -m sosp``, and ``torchrun -m sosp``: the command line."""

from sosp.app.cli import main

if __name__ == "__main__":
    main()
