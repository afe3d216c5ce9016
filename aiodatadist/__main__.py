"""``python -m aiodatadist`` is the command ``aiodatadist``."""

import sys

from aiodatadist._cli import main

sys.exit(main())
