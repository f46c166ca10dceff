"""`python -m ckptfix`: the same program as the `ckptfix` command."""

from ckptfix.cli import main

if __name__ == "__main__":
    main()
