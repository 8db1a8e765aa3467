"""`python -m reducer` is `reducer`."""

from reducer.cli import main

if __name__ == "__main__":
    main()
