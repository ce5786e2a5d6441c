"""`python -m dilatant` is `dilatant`."""


def main() -> None:
    """Entry point of the command. Ctrl-C ends it without a trace from the first import on."""
    try:
        from dilatant.cli.app import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
