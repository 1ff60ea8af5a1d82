"""`python -m paracore`: the same as the command `paracore`."""

import sys

from paracore.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
