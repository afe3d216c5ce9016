"""``python -m aiodatadist`` is the command ``aiodatadist``."""

import sys

from aiodatadist.cli import main

sys.exit(main())
