"""``python -m andrea_ablate``."""

from andrea_ablate.cli import main

if __name__ == "__main__":
    main()
