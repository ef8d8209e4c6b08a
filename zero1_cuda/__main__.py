"""`python -m zero1_cuda`: hands over to cli/."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
