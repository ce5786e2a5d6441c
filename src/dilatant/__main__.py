"""`python -m dilatant` is `dilatant`."""

from dilatant.cli.app import main

if __name__ == "__main__":
    main()
