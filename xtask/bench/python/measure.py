"""Runs a command to its end and prints its seconds and its peak memory in bytes as JSON."""
import json
import resource
import subprocess
import sys
import time

start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
seconds = time.perf_counter() - start
# Linux counts in KiB; the command is the only child.
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak": peak}))
