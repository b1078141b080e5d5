"""`python -m foredraft`, for launchers that start modules."""

from foredraft.cli import main

if __name__ == "__main__":
    main()
