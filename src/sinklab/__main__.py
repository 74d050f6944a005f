"""`python -m sinklab`: the command line for launchers that want a module, as in
`accelerate launch -m sinklab`.
"""

import sys

from sinklab.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
