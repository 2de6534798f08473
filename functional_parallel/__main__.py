"""Entry point of `python -m functional_parallel`."""

import sys

from .cli import main

sys.exit(main())
