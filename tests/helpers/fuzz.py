"""How hard to try: `RAINFUSION_FUZZ=20` (make test-all) runs 20 times as many random examples, new ones each time."""

import os

FACTOR = int(os.environ.get("RAINFUSION_FUZZ", "1"))


def examples(number):
    return number * FACTOR
