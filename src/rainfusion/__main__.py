import sys

from rainfusion.cli import main

sys.exit(main())
