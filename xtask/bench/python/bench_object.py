"""The PyTorch half of `cargo xtask bench object`: one measurement per run, printed as a line of JSON.

save URL GIB | load URL GIB, with fsspec and s3fs, at the store of AWS_ENDPOINT_URL.
"""
import json
import resource
import sys
import time

import torch
import torch.distributed.checkpoint as dcp

from bench import model


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def timed(work):
    memory, cpu, start = peak_memory(), time.process_time(), time.perf_counter()
    work()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "memory": peak_memory() - memory,
    }


def main(what, url, gib):
    state = model(float(gib))
    small = {"small": torch.zeros(4)}
    dcp.save(small, checkpoint_id=url + "-warm-up")
    dcp.load(small, checkpoint_id=url + "-warm-up")
    work = {"save": dcp.save, "load": dcp.load}[what]
    print(json.dumps(timed(lambda: work(state, checkpoint_id=url))))


if __name__ == "__main__":
    main(*sys.argv[1:])
