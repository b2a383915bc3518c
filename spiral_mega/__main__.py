"""`spiral-mega`, and `python -m spiral_mega`, which is how torchrun starts the ranks."""

from spiral_mega.process.exit import skip_teardown


def main() -> None:
    with skip_teardown():
        from spiral_mega.cli import app

        app()


if __name__ == "__main__":
    main()
