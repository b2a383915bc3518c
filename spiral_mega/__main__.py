"""`python -m spiral_mega`, which is how torchrun starts the ranks."""

from spiral_mega.cli import app

if __name__ == "__main__":
    app()
