"""Run the command line as `python -m insitu`."""

import sys

from insitu.cli import main

sys.exit(main())
