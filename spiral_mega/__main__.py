"""`spiral-mega`, and `python -m spiral_mega`, which is how torchrun starts the ranks."""

from spiral_mega.ending import without_teardown


def main() -> None:
    with without_teardown():
        from spiral_mega.cli import app

        app()


if __name__ == "__main__":
    main()
