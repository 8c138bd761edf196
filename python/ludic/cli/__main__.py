"""`python -m ludic.cli`."""

from ludic.cli.app import main

if __name__ == "__main__":
    main()
