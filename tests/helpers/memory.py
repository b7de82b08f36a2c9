"""How much memory a call takes at its peak, beyond what was there before: measured in a process of its own."""

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


def extra_bytes(setup, call, warm="None"):
    code = PROBE.format(setup=setup, call=call, warm=warm)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
