"""The PyTorch half of `cargo xtask bench`: one measurement per run, printed as a line of JSON.

save DIR GIB [THREADS] | save-ranks DIR GIB RANKS | stall DIR GIB | load DIR GIB | save-one DIR | slice DIR rows|columns | inspect DIR | evict PATH
save-random DIR MIB | save-rows DIR | save-llama DIR MIB | to-torch-save DIR FILE
"""
import json
import math
import os
import shutil
import sys
import tempfile
import time

TENSOR = (2048, 4096)
LARGE = (65536, 4096)


def evict(path):
    """Drops files from the page cache, so that the disk is measured and not memory."""
    files = [path] if os.path.isfile(path) else [os.path.join(path, name) for name in os.listdir(path)]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_read():
    with open("/proc/self/io") as counters:
        return int(dict(line.split(": ") for line in counters)["rchar"])


def model(gib):
    import torch

    count = int(float(gib) * 1024) // 32
    return {"layers.%d.weight" % n: torch.full(TENSOR, float(n % 251 + 1)) for n in range(count)}


def llama(path, mib):
    """A model of Hugging Face's Llama of about so many MiB: random numbers in one safetensors file."""
    import torch

    hidden, ffn, heads, groups, size, vocab = 2048, 5632, 16, 4, 128, 32000
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (groups * size, hidden),
        "self_attn.v_proj": (groups * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    count = lambda shape: math.prod(shape) * 2
    room = mib * 2**20 - sum(map(count, shapes.values()))
    layers = max(1, room // sum(map(count, of_layer.values())))
    layers -= layers % 2
    for layer in range(layers):
        shapes.update({"model.layers.%d.%s.weight" % (layer, name): shape for name, shape in of_layer.items()})
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = at + count(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    os.makedirs(path)
    with open(os.path.join(path, "model.safetensors"), "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for shape in shapes.values():
            torch.randn(shape).bfloat16().view(torch.uint8).numpy().tofile(file)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": size, "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(config, file)


def warm_up(path):
    import torch
    import torch.distributed.checkpoint as dcp

    path += ".warm-up"
    state = {"small": torch.zeros(4)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    shutil.rmtree(path)


def timed(function):
    before, start = bytes_read(), time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes_read": bytes_read() - before}


def save_rows(rank, ranks, gib, path, meeting, seconds):
    """One rank of a sharded data-parallel job, which has rows of each tensor."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    part = lambda n: torch.full((TENSOR[0] // ranks, TENSOR[1]), float(n % 251 + 1))
    names = range(int(float(gib) * 1024) // 32)
    state = {"layers.%d.weight" % n: DTensor.from_local(part(n), mesh, [Shard(0)]) for n in names}
    warm = {"small": DTensor.from_local(torch.zeros(1, 4), mesh, [Shard(0)])}
    dcp.save(warm, checkpoint_id=path + ".warm-up")
    dist.barrier()
    start = time.perf_counter()
    dcp.save(state, checkpoint_id=path)
    seconds[rank] = time.perf_counter() - start
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path + ".warm-up")
    dist.destroy_process_group()


def save_ranks(path, gib, ranks):
    """The time of the slowest rank, each a process."""
    import torch.multiprocessing as processes

    seconds = processes.get_context("spawn").Array("d", ranks)
    # Ranks that find the file of an earlier group connect to processes that are gone.
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, gib, path, os.path.join(folder, "ranks"), seconds)
        processes.spawn(save_rows, args, nprocs=ranks)
    return {"seconds": max(seconds)}


def main(what, path, *args):
    if what == "evict":
        return evict(path)
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed.checkpoint as dcp

    if what == "inspect":
        # What `dcp inspect` lists: every key with its dtype and shape.
        metadata = dcp.FileSystemReader(path).read_metadata()
        for fqn, entry in sorted(metadata.state_dict_metadata.items()):
            if hasattr(entry, "size"):
                print(fqn, entry.properties.dtype, list(entry.size), len(entry.chunks))
            else:
                print(fqn, "object")
        return
    if what == "save-random":
        tensors = {"layers.%d.weight" % n: torch.randn(TENSOR) for n in range(int(args[0]) // 32)}
        dcp.save({"model": tensors, "step": 1000}, checkpoint_id=path, no_dist=True)
        return
    if what == "save-rows":
        # For resharding to 200 ranks: each then has a row of each.
        tensors = {"layers.%d.weight" % n: torch.zeros(200, 2) for n in range(1000)}
        dcp.save({"model": tensors}, checkpoint_id=path, no_dist=True)
        return
    if what == "save-llama":
        return llama(path, int(args[0]))
    if what == "to-torch-save":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        return dcp_to_torch_save(path, args[0])
    if what == "save":
        state = model(args[0])
        warm_up(path)
        writer = dcp.FileSystemWriter(path, thread_count=int(args[1]) if args[1:] else 1)
        result = timed(lambda: dcp.save(state, storage_writer=writer, no_dist=True))
    elif what == "save-ranks":
        result = save_ranks(path, args[0], int(args[1]))
    elif what == "stall":
        # async_save needs a process group with a CPU backend, also for one process.
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        state = model(args[0])
        stager = BlockingAsyncStager()
        save = lambda: dcp.async_save(state, checkpoint_id=path, async_stager=stager)
        save().result()
        saving = []
        result = timed(lambda: saving.append(save()))
        saving[0].result()
    elif what == "load":
        state = model(args[0])
        warm_up(path)
        result = timed(lambda: dcp.load(state, checkpoint_id=path, no_dist=True))
    elif what == "save-one":
        state = {"large": torch.ones(LARGE)}
        result = timed(lambda: dcp.save(state, checkpoint_id=path, no_dist=True))
    elif what == "slice":
        rows, columns = LARGE
        offset, size = ((37 * rows // 64, 0), (rows // 64, columns)) if args[0] == "rows" else ((0, 37 * columns // 64), (rows, columns // 64))
        # A part of a larger tensor without a process group: 2.15's CheckpointableTensor protocol.
        part = torch.zeros(size)
        part.global_shape, part.global_offsets, part.local_offsets, part.local_sizes = LARGE, (offset,), ((0, 0),), (size,)
        result = timed(lambda: dcp.load({"large": part}, checkpoint_id=path, no_dist=True))
        assert (part == 1).all()
        result["bytes_needed"] = part.numel() * 4
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
