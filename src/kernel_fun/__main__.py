"""`python -m kernel_fun` is `kernel-fun`."""

import sys

from kernel_fun.cli import main

sys.exit(main())
