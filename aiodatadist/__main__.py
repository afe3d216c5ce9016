"""``python -m aiodatadist`` is the command ``aiodatadist``."""

import sys

from aiodatadist import _as_program
from aiodatadist._cli import main

_as_program.imported()
sys.exit(main())
