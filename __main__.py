"""`python -m slipstream` is the `slipstream` command."""

from .cli import main

if __name__ == "__main__":
    main()
