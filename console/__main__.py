"""`python -m console` is `posttrain`."""

import sys

from console.cli import main

sys.exit(main())
