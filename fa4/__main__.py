"""`python -m fa4`: see `fa4.cli`."""

from fa4.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
