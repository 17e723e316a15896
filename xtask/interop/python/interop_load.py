"""interop_load.py: torch reads what Rust wrote.

    state FILE DIR WORLD NAME=SALT...  loads DIR/NAME on WORLD ranks into layouts of its own, compares
                                       every tensor with the formula and every object with FILE,
                                       and on one rank converts it by dcp_to_torch_save; DIR may
                                       be a URL
    objects DIR                        loads the objects that Rust carried over unread
"""
import json
import os
import tempfile

import interop_common as common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interop_common import VERSION, DTensor, Replicate, Shard, device_mesh
from torch.distributed.checkpoint import FileSystemReader

# Wrong in every byte where it is not overwritten, in the tensors that hold anything.
UNTOUCHED = 0xA5


def load(state, path):
    if VERSION < (2, 2):
        return dcp.load_state_dict(state, FileSystemReader(path), no_dist=not dist.is_initialized())
    return dcp.load(state, checkpoint_id=path)


def reader(path):
    """Of a folder or, with a scheme, of an object store."""
    if "://" in path:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader

        return FsspecReader(path)
    return FileSystemReader(path)


def untouched(dtype, shape):
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).fill_(1 if dtype == torch.bool else UNTOUCHED)
    return tensor


def target(number, dtype, shape, meshes):
    """A destination: a plain tensor, or a DTensor in one of many layouts."""
    tensor = untouched(dtype, shape)
    if not meshes or not shape:
        return tensor
    choices = [None, ("line", [Replicate()])]
    world = dist.get_world_size()
    # 2.1 cannot split an axis over more ranks than it has rows, and 2.4 not an empty one.
    least = world if VERSION < (2, 2) else 1
    for axis, size in enumerate(shape):
        if size >= least:
            choices.append(("line", [Shard(axis)]))
    if "square" in meshes and len(shape) >= 2 and min(shape) >= least:
        choices += [("square", [Shard(0), Shard(1)]), ("square", [Shard(1), Shard(0)]), ("square", [Replicate(), Shard(1)])]
    choice = choices[(number + world) % len(choices)]
    if choice is None or 0 in shape:
        return tensor
    mesh, placements = choice
    return common.spread(tensor, meshes[mesh], placements)


def put(state, path, value):
    """state[path[0]][path[1]]... = value, with lists where the path has numbers."""
    for here, below in zip(path, path[1:]):
        fresh = [] if isinstance(below, int) else {}
        if isinstance(here, int):
            state.extend([None] * (here + 1 - len(state)))
            state[here] = state[here] if state[here] is not None else fresh
            state = state[here]
        else:
            state = state.setdefault(here, fresh)
    if isinstance(path[-1], int):
        state.extend([None] * (path[-1] + 1 - len(state)))
    state[path[-1]] = value


def get(state, path):
    for item in path:
        state = state[item]
    return state


def same_tensor(path, spec, loaded, salt):
    """Compares the rank's own part, for which no gathering is needed."""
    dtype = getattr(torch, spec["dtype"])
    whole = common.tensor_by_formula(spec["fqn"], dtype, spec["shape"], salt)
    assert loaded.dtype == dtype and list(loaded.shape) == spec["shape"], "%s: %s is %s %s" % (path, spec["fqn"], loaded.dtype, tuple(loaded.shape))
    if isinstance(loaded, DTensor):
        expected = common.spread(whole, loaded.device_mesh, loaded.placements).to_local()
        loaded = loaded.to_local()
    else:
        expected = whole
    assert loaded.shape == expected.shape, "%s: %s has a part of %s, not %s" % (path, spec["fqn"], tuple(loaded.shape), tuple(expected.shape))
    assert common.raw(loaded) == common.raw(expected), "%s: %s differs" % (path, spec["fqn"])


def check(rank, world, file, root, names):
    with open(file) as opened:
        expected = json.load(opened)
    meshes = {}
    if dist.is_initialized():
        meshes["line"] = device_mesh((world,))
    if world == 4 and VERSION >= (2, 2):
        # 2.1 has one-dimensional meshes only.
        meshes["square"] = device_mesh((2, 2))
    for name, salt in names:
        path = os.path.join(root, name)
        keys = set(reader(path).read_metadata().state_dict_metadata)
        wanted = {item["fqn"] for kind in ("tensors", "objects") for item in expected[kind]}
        assert keys == wanted, "%s: keys differ: %s" % (path, sorted(keys ^ wanted))

        # Until 2.3 a dict without tensors was one pickled item, so nested dicts do not flatten to
        # the keys of today; a flat dict does in every version.
        where = (lambda item: [item["fqn"]]) if VERSION < (2, 4) else (lambda item: item["path"])
        state = {}
        for number, item in enumerate(expected["tensors"]):
            put(state, where(item), target(number, getattr(torch, item["dtype"]), item["shape"], meshes))
        for item in expected["objects"]:
            put(state, where(item), "untouched")
        load(state, path)
        for item in expected["tensors"]:
            same_tensor(path, item, get(state, where(item)), salt)
        for item in expected["objects"]:
            loaded = common.tagged(get(state, where(item)))
            assert loaded == item["value"], "%s: %s is %s" % (path, item["fqn"], loaded)
        # It reads from folders only.
        if world == 1 and "://" not in path:
            convert(path, expected, salt)


def convert(path, expected, salt):
    """dcp_to_torch_save reads nothing but the checkpoint, so it shows the stored keys."""
    try:
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    except ImportError:  # until 2.2
        return
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "all.pt")
        dcp_to_torch_save(path, file)
        options = {} if VERSION < (2, 4) else {"weights_only": False}
        state = torch.load(file, **options)
    leaves = len(list(walk(state, [item["path"] for kind in ("tensors", "objects") for item in expected[kind]])))
    assert leaves == len(expected["tensors"]) + len(expected["objects"]), "%s: %d leaves after dcp_to_torch_save" % (path, leaves)
    for item in expected["tensors"]:
        same_tensor(path, item, get(state, item["path"]), salt)
    for item in expected["objects"]:
        assert common.tagged(get(state, item["path"])) == item["value"], "%s: %s differs after dcp_to_torch_save" % (path, item["fqn"])


def walk(state, paths):
    """Every leaf of a converted state dict; a list is a container only where a path enters it."""
    inner = {tuple(path[:depth]) for path in paths for depth in range(1, len(path))}

    def visit(value, path):
        if isinstance(value, (dict, list)) and (path in inner or not path):
            for key, below in value.items() if isinstance(value, dict) else enumerate(value):
                yield from visit(below, path + (key,))
        else:
            yield path

    return visit(state, ())


def check_objects(path):
    zoo = common.object_zoo()
    keys = set(FileSystemReader(path).read_metadata().state_dict_metadata)
    state = {}
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, _ = flatten_state_dict(zoo)
    assert keys == set(flat), "%s: keys differ: %s" % (path, sorted(keys ^ set(flat)))
    for fqn, value in flat.items():
        state[fqn] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else "untouched"
    load(state, path)
    for fqn, value in flat.items():
        assert common.tagged(state[fqn]) == common.tagged(value), "%s: %s is %r" % (path, fqn, state[fqn])


def everything(what, *args):
    if what == "objects":
        return check_objects(*args)
    file, root, world, *names = args
    names = [(name, int(salt)) for name, salt in (name.split("=") for name in names)]
    if int(world) == 1:
        # Without a group, and below also as the only rank of one.
        check(0, 1, file, root, names)
    common.on_ranks(check, int(world), file, root, names)


if __name__ == "__main__":
    common.main(everything)
