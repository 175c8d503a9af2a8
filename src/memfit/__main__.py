"""`python -m memfit` is the command `memfit`."""

import sys

from memfit.cli.main import main

sys.exit(main())
