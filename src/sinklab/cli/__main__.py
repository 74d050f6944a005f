"""`python -m sinklab.cli`: the command line for launchers that want a module, as in `accelerate launch -m`."""

import sys

from sinklab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
