"""The measurements of `cargo xtask bench python`, each a process of its own that prints a line of JSON.

make DIR GIB | make-hf DIR GIB FILES
save WHO DIR GIB        WHO: distcp, writer, torch1, torch2, torch4 (threads), plain
load WHO DIR GIB        WHO: distcp, reader, torch, plain
hf WHO DIR              WHO: distcp, torch, safetensors; a folder into FSDP2 on 2 ranks
stall WHO DIR GIB       WHO: distcp, thread, process; seconds that async_save holds the caller
beside WHO DIR GIB      WHO: distcp, thread; Python's speed during async_save, as a part of that without
start WHAT              WHAT: python, distcp, torch; seconds of an interpreter that imports it
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings

warnings.simplefilter("ignore")

TENSOR = (2048, 4096)


def model(gib, value=1.0):
    import torch

    count = int(float(gib) * 1024) // 32
    return {f"layers.{n}.weight": torch.full(TENSOR, float(n % 251) + value) for n in range(count)}


def make(folder, gib):
    import torch.distributed.checkpoint as dcp

    dcp.save(model(gib), checkpoint_id=folder, no_dist=True)


def make_hf(folder, gib, files):
    from safetensors.torch import save_file

    os.makedirs(folder)
    tensors, names = list(model(gib).items()), {}
    for n in range(int(files)):
        name = f"model-{n + 1:05}-of-{int(files):05}.safetensors"
        part = dict(tensors[n :: int(files)])
        save_file(part, os.path.join(folder, name), metadata={"format": "pt"})
        names.update(dict.fromkeys(part, name))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as index:
        json.dump({"metadata": {"total_size": len(tensors) * TENSOR[0] * TENSOR[1] * 4}, "weight_map": names}, index)


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def save(who, folder, gib):
    state = model(gib)
    if who == "plain":
        os.makedirs(folder)

        def plain():
            with open(os.path.join(folder, "data"), "wb", buffering=0) as file:
                for value in state.values():
                    memory = memoryview(value.numpy()).cast("B")
                    while memory:
                        memory = memory[file.write(memory) :]
                os.fsync(file.fileno())

        return timed(plain)
    import torch.distributed.checkpoint as torch_dcp

    if who == "distcp":
        import distcp.torch as dcp

        return timed(lambda: dcp.save(state, checkpoint_id=folder, no_dist=True))
    if who == "writer":
        from distcp.torch import Writer

        writer = Writer(folder)
    else:
        writer = torch_dcp.FileSystemWriter(folder, thread_count=int(who.removeprefix("torch")))
    return timed(lambda: torch_dcp.save(state, storage_writer=writer, no_dist=True))


def load(who, folder, gib):
    state = model(gib, value=0.0)
    if who == "plain":
        files = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".distcp"))

        def plain():
            for path in files:
                with open(path, "rb", buffering=0) as file:
                    for value in state.values():
                        file.readinto(memoryview(value.numpy()).cast("B"))

        return timed(plain)
    import torch.distributed.checkpoint as torch_dcp

    if who == "distcp":
        import distcp.torch as dcp

        seconds = timed(lambda: dcp.load(state, checkpoint_id=folder, no_dist=True))
    elif who == "reader":
        from distcp.torch import Reader

        seconds = timed(lambda: torch_dcp.load(state, storage_reader=Reader(folder), no_dist=True))
    else:
        seconds = timed(lambda: torch_dcp.load(state, checkpoint_id=folder, no_dist=True))
    assert float(state["layers.1.weight"][5, 5]) == 2.0
    return seconds


def hf_rank(rank, who, folder, rendezvous, results):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    with open(os.path.join(folder, "model.safetensors.index.json")) as index:
        names = list(json.load(index)["weight_map"])
    state = {name: distribute_tensor(torch.zeros(TENSOR), mesh, [Shard(0)]) for name in names}
    dist.barrier()

    def run():
        if who == "distcp":
            import distcp.torch as dcp

            dcp.load(state, checkpoint_id=folder)
        elif who == "torch":
            torch_dcp.load(state, storage_reader=torch_dcp.HuggingFaceStorageReader(folder))
        else:
            from safetensors.torch import load_file

            # As programs do that have no reader: every rank loads all files, and keeps its part.
            for name in sorted(os.listdir(folder)):
                if name.endswith(".safetensors"):
                    for key, value in load_file(os.path.join(folder, name)).items():
                        local = state[key].to_local()
                        local.copy_(value[rank * local.shape[0] : (rank + 1) * local.shape[0]])
        dist.barrier()

    seconds = timed(run)
    assert float(state["layers.1.weight"].to_local()[5, 5]) == 2.0
    dist.destroy_process_group()
    if rank == 0:
        results.put(seconds)


def hf(who, folder):
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as scratch:
        rendezvous = os.path.join(scratch, "rendezvous")
        ranks = [context.Process(target=hf_rank, args=(n, who, folder, rendezvous, results)) for n in range(2)]
        for rank in ranks:
            rank.start()
        seconds = results.get()
        for rank in ranks:
            rank.join()
    return seconds


def background(who):
    """Begins a background save, and returns the future of its end."""
    if who == "distcp":
        import distcp.torch as dcp

        return lambda state, folder: dcp.async_save(state, checkpoint_id=folder, no_dist=True)
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    rendezvous = os.path.join(tempfile.mkdtemp(), "rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    kind = AsyncCheckpointerType.PROCESS if who == "process" else AsyncCheckpointerType.THREAD
    if who == "process":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    return lambda state, folder: torch_dcp.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind)


def stall(who, folder, gib):
    """The second save counts: the first one allocates what is staged to."""
    state, begin = model(gib), background(who)
    begin(state, os.path.join(folder, "first")).result()
    seconds = []
    for n in range(3):
        pending = []
        seconds.append(timed(lambda: pending.append(begin(state, os.path.join(folder, f"step{n}")))))
        pending[0].result()
    return min(seconds)


def beside(who, folder, gib):
    state, begin = model(gib), background(who)
    begin(state, os.path.join(folder, "first")).result()

    def turns(until):
        """Turns of a loop of Python in each second, until a function says so."""
        count, start = 0, time.perf_counter()
        while not until(time.perf_counter() - start):
            for _ in range(1000):
                count += 1
        return count / (time.perf_counter() - start)

    alone = turns(lambda seconds: seconds > 1.0)
    pending = begin(state, os.path.join(folder, "second"))
    during = turns(lambda seconds: pending.done())
    return during / alone


def start(what):
    program = {"python": "pass", "distcp": "import distcp", "torch": "import torch.distributed.checkpoint"}[what]
    return timed(lambda: subprocess.run([sys.executable, "-c", program], check=True))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    functions = {"make": make, "make-hf": make_hf, "save": save, "load": load, "hf": hf, "stall": stall, "beside": beside, "start": start}
    print(json.dumps({"value": functions[name](*arguments)}), flush=True)
    os._exit(0)
