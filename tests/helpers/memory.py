"""How much memory a call takes at its peak, beyond what was there before: measured in a process of its own."""

import os
import subprocess
import sys

# /proc/self/clear_refs takes the kernel's peak back to what is resident now
PROBE = """
import torch, rainfusion
from rainfusion.bench.memory import peak_memory
torch.set_num_threads(2)
{setup}
warm = lambda: {warm}
warm()
with torch.no_grad():
    result, extra = peak_memory(lambda: {call}, torch.device("cpu"))
print(extra)
"""

# tensors go back to the system when they are freed: glibc keeps what a thread freed for that thread, and the peak
# then depends on which thread came first (195 to 295 MB for one and the same call)
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}


def extra_bytes(setup, call, warm="None"):
    code = PROBE.format(setup=setup, call=call, warm=warm)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **MALLOC})
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
