"""Megatron-Core's dist_checkpointing on CPU processes, saving what Rust loads and loading what Rust saves.

interop_megatron.py state FILE                     writes what is in the state, for the Rust half
interop_megatron.py save DIR                       Megatron saves DIR/megatron_plain as TP2xPP2,
                                                   DIR/megatron_parallel as TP2xDP2, fully parallel, and
                                                   DIR/megatron_async as TP2xDP2 in the background
interop_megatron.py load RANKS LAYOUTS DIR=SAVED...  Megatron loads each strictly in each of the layouts, such
                                                   as 1x4,4x1, every rank for itself and fully parallel, and
                                                   compares; SAVED is the layout that it was saved in, with
                                                   its number of ranks, such as 2x2x4
interop_megatron.py common DIR                     Megatron loads the common state of a run of 0.19
interop_megatron.py inside DIR...                  PyTorch reads a common state that is inside the data

What a rank holds follows from its coordinates (`leaves`), the bytes of a tensor from its key. Rust's
examples/interop/megatron.rs builds the same from the JSON."""
import argparse
import importlib.metadata
import io
import itertools
import json
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import interop_common as common
import numpy as np
import torch
import torch.distributed as dist
from interop_common import raw, tagged, tensor_by_formula

LAYERS, EXPERTS = 4, 4


# ---- the state --------------------------------------------------------------------------------


def tensors():
    """Every tensor, as it is in the checkpoint. `prepend` axes come before those of a rank's tensor:
    layers, then experts. `tp` is the axis that tensor parallelism cuts; `stage` says which pipeline
    stages hold it. `form`: `plain`; `swiglu`, two halves that a factory cuts apart; `uneven`, rows
    cut into boxes of different sizes, `pieces` of them a rank."""
    found = []

    def tensor(key, dtype, shape, *, path=None, prepend=0, tp=None, stage="all", form="plain", pieces=1):
        path = path or ["model", key.replace("layers.", "layers.{layer}.").replace("experts.experts.", "experts.{expert}.")]
        found.append({"key": key, "path": path, "dtype": dtype, "shape": shape, "prepend": prepend, "tp": tp,
                      "stage": stage, "form": form, "pieces": pieces})

    def layer(name, dtype, shape, tp=None, form="plain", prepend=1, path=None):
        shape = [LAYERS, EXPERTS][:prepend] + shape
        tp = None if tp is None else tp + prepend
        tensor("decoder.layers." + name, dtype, shape, prepend=prepend, tp=tp, stage="layers", form=form, path=path)

    tensor("embedding.word_embeddings.weight", "bfloat16", [32, 8], tp=0, stage="tied")
    layer("self_attention.linear_qkv.weight", "bfloat16", [24, 8], tp=0)
    layer("self_attention.linear_qkv.bias", "float32", [24], tp=0)
    layer("self_attention.linear_qkv.layer_norm_weight", "float32", [8])
    layer("self_attention.linear_proj.weight", "bfloat16", [8, 12], tp=1)
    layer("mlp.linear_fc1.weight", "bfloat16", [32, 8], tp=0, form="swiglu")
    layer("mlp.linear_fc1.bias", "float32", [32], tp=0, form="swiglu")
    layer("mlp.linear_fc2.weight", "bfloat16", [8, 16], tp=1)
    layer("mlp.router.expert_bias", "float32", [4])
    layer("mlp.experts.experts.linear_fc1.weight", "bfloat16", [16, 8], form="swiglu", prepend=2)
    layer("mlp.experts.experts.linear_fc2.weight", "bfloat16", [8, 8], prepend=2)
    tensor("decoder.final_layernorm.weight", "float32", [8], stage="last")
    tensor("mask", "bool", [3, 7])
    tensor("counts", "int64", [12], tp=0)
    tensor("scalar", "float32", [])
    tensor("half", "float16", [3, 8], tp=1)
    tensor("double", "float64", [2, 2])
    tensor("bytes", "uint8", [4, 3, 5], tp=0)
    # A state dict may have numbers for names; they are no part of what is stored.
    state = ["optimizer", "state", "{number}", "exp_avg"]
    tensor("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", "float32", [LAYERS, 32, 8], prepend=1, tp=1,
           stage="layers", form="swiglu", path=state)
    tensor("optimizer.uneven.rows", "bfloat16", [23, 5], form="uneven", path=["optimizer", "rows"])
    tensor("optimizer.uneven (torch.bfloat16, torch.float32).param", "float32", [97], form="uneven", pieces=2,
           path=["optimizer", "param"])
    return found


def extra_state(cell):
    """Of no two kinds alike: nothing, a tensor, bytes, and a structure of them."""
    return [None, torch.arange(6, dtype=torch.uint8), b"\x00\xfffp8", {"amax": torch.ones(2), "steps": [1, 2**70]}][cell % 4]


def objects(tp, pp, world):
    """Sharded objects: (key, path, grid, place of a rank in it or "layers", function of the offset)."""
    plain = lambda key: lambda offset: {"key": key, "offset": list(offset), "blob": bytes(offset)}
    return [
        ("rng_state", ["rng_state"], (pp, tp), "pp_tp", plain("rng_state")),
        ("rerun_state_machine_state", ["rerun_state_machine"], (world,), "world", plain("rerun_state_machine_state")),
        ("decoder.layers.self_attention.linear_qkv._extra_state",
         ["model", "decoder.layers.{layer}.self_attention.linear_qkv._extra_state"], (LAYERS,), "layers", lambda o: extra_state(o[0])),
    ]


# These exist once per rank or model-parallel rank, so other layouts cannot request them.
TIED_TO_RANKS = {"rng_state", "rerun_state_machine_state"}


def common_state(whole):
    """What is no shard; `whole` with the objects that Rust carries without having a name for them."""
    state = {
        "checkpoint_version": 3.0, "iteration": 10, "num_floating_point_operations_so_far": 1.5e21,
        "opt_param_scheduler": {"max_lr": 1e-4, "lr_decay_style": "cosine", "num_steps": 2**40, "min_lr": 0.0},
        "optimizer": {"param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "wd_mult": 1.0, "is_expert": False, "names": ["a", "б"]}]},
        "empty": {}, "none": None, "blob": b"\x00\xff", "huge": 2**80 + 1,
    }
    args = {
        "num_layers": LAYERS, "hidden_size": 8, "num_attention_heads": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
        "num_experts": EXPERTS, "bf16": True, "params_dtype": torch.bfloat16, "data_path": ["a", "b"], "swiglu": True, "missing": None,
    }
    if whole:
        import pathlib

        args["save"] = pathlib.PosixPath("/checkpoints")
        state["tensor"] = torch.arange(12, dtype=torch.int32).reshape(3, 4)
        state["random"] = ("MT19937", np.arange(5, dtype=np.uint32), 3)
        # Megatron-Core before 0.16 saves this, but does not load it.
        if importlib.metadata.version("megatron-core") >= "0.16":
            state["file"] = io.BytesIO(b"\x01\x02")
        state["numbers"] = {0: "zero", 1: {2: "two"}}
    state["args"] = argparse.Namespace(**args)
    return state


CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def state(path):
    """The Rust half's description of all that."""
    cells = [tagged(extra_state(layer)) for layer in range(LAYERS)]
    made = common_state(False)
    description = {
        "layers": LAYERS, "experts": EXPERTS, "tensors": tensors(), "content": tagged(CONTENT),
        "objects": [{"key": key, "path": path, "place": place, "values": cells if place == "layers" else None}
                    for key, path, _, place, _ in objects(1, 1, 1)],
        "common": tagged(made), "args": tagged(vars(made["args"])), "common_whole": tagged(common_state(True)),
    }
    # Rust makes the arguments of what is in them.
    del made["args"]
    description["made"] = tagged(made)
    with open(path, "w") as file:
        json.dump(description, file, indent=1)


# ---- a rank's part of it ----------------------------------------------------------------------


def uneven(size, parts):
    """The bounds of parts that grow."""
    return [size * part * (part + 1) // (parts * (parts + 1)) for part in range(parts + 1)]


def whole_of(spec):
    return tensor_by_formula(spec["key"], getattr(torch, spec["dtype"]), spec["shape"], 0)


def set_at(into, path, value):
    for name in path[:-1]:
        into = into.setdefault(name, {})
    assert path[-1] not in into, path
    into[path[-1]] = value


def leaves(rank, world, tp_size, pp_size, fill):
    """The sharded state dict of a rank: filled, or empty to be loaded into. And what is to be found:
    path to tensor, or list of tensors, or object."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory

    tp, pp, dp = rank % tp_size, rank // tp_size % pp_size, rank // tp_size // pp_size
    layers = range(pp * LAYERS // pp_size, (pp + 1) * LAYERS // pp_size)
    state, expected = {}, {}

    def put(path, value, wanted):
        set_at(state, path, value)
        set_at(expected, path, wanted)

    def blank(tensor):
        return tensor.clone() if fill else torch.zeros_like(tensor)

    def sharded(spec, path, local, offsets, replica):
        key, prepend, tp_axis = spec["key"], spec["prepend"], spec["tp"]
        if spec["form"] == "plain":
            if tp_axis is not None:
                offsets = offsets + [(tp_axis, tp, tp_size)]
            value = ShardedTensor.from_rank_offsets(key, blank(local), *offsets, replica_id=replica, prepend_axis_num=prepend)
        else:
            axis, size, at = (prepend, 1, 0) if tp_axis is None else (tp_axis, tp_size, tp)

            def build(key, tensor, replica_id, flattened_range=None):
                halves = tensor.chunk(2, axis - prepend)
                return [
                    ShardedTensor.from_rank_offsets(key, half, *offsets, (axis, at + number * size, 2 * size), replica_id=replica_id, prepend_axis_num=prepend)
                    for number, half in enumerate(halves)
                ]

            value = ShardedTensorFactory(key, blank(local), build, lambda halves: torch.cat(halves, axis - prepend), replica)
        put(path, value, local)

    def cut(spec, whole, number, parts):
        """The part of a rank, of each half where there are two."""
        tp_axis, prepend = spec["tp"], spec["prepend"]
        if tp_axis is None:
            return whole
        axis = tp_axis - prepend
        halves = whole.chunk(2, axis) if spec["form"] == "swiglu" else [whole]
        return torch.cat([half.chunk(parts, axis)[number] for half in halves], axis)

    for spec in tensors():
        whole, stage, path = whole_of(spec), spec["stage"], spec["path"]
        named = lambda layer, expert=0: [
            layer - layers.start if name == "{number}" else name.format(layer=layer - layers.start, expert=expert) for name in path
        ]
        # Copies for other tensor-parallel ranks, unless these hold parts of their own.
        copy = 0 if spec["tp"] is not None else tp
        if stage == "layers":
            for layer in layers:
                at = [(0, layer, LAYERS)]
                if spec["prepend"] == 1:
                    sharded(spec, named(layer), cut(spec, whole[layer], tp, tp_size), at, (0, copy, dp))
                    continue
                mine = range(tp * EXPERTS // tp_size, (tp + 1) * EXPERTS // tp_size)
                for expert in mine:
                    sharded(spec, named(layer, expert - mine.start), whole[layer, expert], at + [(1, expert, EXPERTS)], (0, 0, dp))
        elif spec["form"] == "uneven":
            parts = spec["pieces"]
            bounds = uneven(spec["shape"][0], world * parts)
            mine = [bounds[rank * parts + part : rank * parts + part + 2] for part in range(parts)]
            found = [
                ShardedTensor(spec["key"], blank(whole[a:b]), whole.dtype, tuple(whole[a:b].shape), tuple(whole.shape),
                              (a,) + (0,) * (whole.dim() - 1), axis_fragmentations=None, replica_id=0)
                for a, b in mine
            ]
            wanted = [whole[a:b] for a, b in mine]
            put(path, *((found, wanted) if parts > 1 else (found[0], wanted[0])))
        else:
            held = {"first": [0], "last": [pp_size - 1], "tied": [0, pp_size - 1], "all": range(pp_size)}[stage]
            if pp in held:
                replica = (0 if stage == "last" else held.index(pp) if stage == "tied" else pp, copy, dp)
                sharded(spec, path, cut(spec, whole, tp, tp_size), [], replica)

    for key, path, grid, place, value in objects(tp_size, pp_size, world):
        offsets = {"pp_tp": [(pp, tp)], "world": [(rank,)], "layers": [(layer,) for layer in layers]}[place]
        replica = {"pp_tp": dp, "world": 0, "layers": (0, tp, dp)}[place]
        for offset in offsets:
            named = [name.format(layer=offset[0] - layers.start) for name in path]
            put(named, ShardedObject(key, value(offset) if fill else None, grid, offset, replica_id=replica), value(offset))

    local = {"params": [rank, "local"]}
    put(["optimizer", "local"], LocalNonpersistentObject(local), local)
    return state, expected


def same(found, wanted, at):
    """Types, keys, bits."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), "%s is a %s" % (at, type(found).__name__)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, "%s is %s %s" % (at, found.dtype, tuple(found.shape))
        assert raw(found) == raw(wanted), "%s differs" % at
    elif isinstance(wanted, (dict, argparse.Namespace)):
        assert type(found) is type(wanted), "%s is a %s" % (at, type(found).__name__)
        if isinstance(wanted, argparse.Namespace):
            found, wanted = vars(found), vars(wanted)
        assert set(found) == set(wanted), "%s: %s" % (at, set(found) ^ set(wanted))
        for name, value in wanted.items():
            same(found[name], value, "%s.%s" % (at, name))
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted), "%s is %r" % (at, found)
        for number, value in enumerate(wanted):
            same(found[number], value, "%s[%d]" % (at, number))
    elif isinstance(wanted, io.BytesIO):
        assert found.getvalue() == wanted.getvalue(), at
    else:
        assert tagged(found) == tagged(wanted), "%s is %r, not %r" % (at, found, wanted)


def merged(one, other):
    """Both, where they do not meet."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: merged(one[name], other[name]) if name in one and name in other else one.get(name, other.get(name)) for name in {**one, **other}}
    raise AssertionError("two values for one name")


# ---- Megatron ---------------------------------------------------------------------------------


def without_cuda():
    """Megatron-Core requests CUDA devices by name; here they are the CPU."""
    if not hasattr(np, "product"):  # Megatron-Core before 0.16 is older than numpy 2.
        np.product = np.prod
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    for name in ("empty", "empty_like", "tensor", "ones", "zeros", "arange"):
        create = getattr(torch, name)

        def on_cpu(*args, create=create, **kwargs):
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return create(*args, **kwargs)

        setattr(torch, name, on_cpu)


def listing_works():
    """Megatron-Core 0.16 hands what torch 2.15 makes of a tensor's properties, whoever wrote them,
    to torch.empty, which does not know `strides`."""
    create = torch.empty

    def without_strides(*args, strides=None, **kwargs):
        return create(*args, **kwargs)

    torch.empty = without_strides


def save_rank(rank, world, folder):
    without_cuda()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    groups = [dist.new_group(list(range(first, world, 2))) for first in range(2)]
    queue = AsyncCallsQueue()
    for name, tp, pp in (("plain", 2, 2), ("parallel", 2, 1), ("async", 2, 1)):
        state, _ = leaves(rank, world, tp, pp, fill=True)
        strategy = get_default_save_sharded_strategy()
        if name == "parallel":
            strategy = FullyParallelSaveStrategyWrapper(strategy, groups[rank % 2])
        path = os.path.join(folder, "megatron_" + name)
        whole, beside = merged(state, common_state(True)), name == "async"
        request = dist_checkpointing.save(whole, path, strategy, content_metadata=dict(CONTENT), async_sharded_save=beside)
        if beside:
            queue.schedule_async_request(request)
            assert not os.path.exists(os.path.join(path, "metadata.json")), "committed before it was written"
            queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


def save(folder):
    for name in ("plain", "parallel", "async"):
        os.makedirs(os.path.join(folder, "megatron_" + name))
    common.on_ranks(save_rank, 4, folder)


def load_rank(rank, world, layouts, checkpoints):
    without_cuda()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from megatron.core.dist_checkpointing.validation import StrictHandling

    listing_works()
    # Rounds of gathering are not for gloo, whose parts have one size.
    exchanges = itertools.cycle(("broadcast", "gather_object"))
    for checkpoint in checkpoints:
        path, saved = checkpoint.split("=")
        assert dist_checkpointing.load_content_metadata(path) == CONTENT, path
        for layout, exchange in zip(layouts.split(","), exchanges):
            tp, pp = map(int, layout.split("x"))
            same_ranks = saved == "%sx%d" % (layout, world)
            for strict in (StrictHandling.RETURN_ALL, StrictHandling.RAISE_ALL if same_ranks else StrictHandling.RAISE_UNEXPECTED):
                request, expected = leaves(rank, world, tp, pp, fill=False)
                if not same_ranks:
                    for name in ("rng_state", "rerun_state_machine"):
                        del request[name], expected[name]
                strategy = get_default_load_sharded_strategy(path)
                if strict != StrictHandling.RETURN_ALL:
                    strategy = FullyParallelLoadStrategyWrapper(strategy, exchange_algo=exchange)
                loaded = dist_checkpointing.load(request, path, strategy, validate_access_integrity=True, strict=strict)
                if strict == StrictHandling.RETURN_ALL:
                    loaded, missing, unexpected = loaded
                    wanted = set() if same_ranks else TIED_TO_RANKS
                    assert missing == wanted, "%s: Megatron misses %s" % (path, sorted(missing ^ wanted))
                    assert not unexpected, "%s: Megatron does not expect %s" % (path, sorted(unexpected))
                wanted = merged(expected, common_state("random" in loaded))
                wanted["content_metadata"] = CONTENT
                same(loaded, wanted, path)
            if rank == 0:
                print("Megatron loads %s as TP%d PP%d on %d ranks" % (os.path.basename(path), tp, pp, world), flush=True)


def load(ranks, layouts, *checkpoints):
    common.on_ranks(load_rank, int(ranks), layouts, checkpoints)


def inside(*checkpoints):
    """No Megatron-Core on PyPI reads this form yet, but PyTorch reads what it is made of."""
    for checkpoint in checkpoints:
        inside_one(checkpoint)


def inside_one(checkpoint):
    import torch.distributed.checkpoint as dcp

    assert not os.path.exists(os.path.join(checkpoint, "common.pt")), "common.pt"
    with open(os.path.join(checkpoint, "metadata.json")) as file:
        assert file.read() == '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    state = {spec["key"]: torch.zeros_like(whole_of(spec)) for spec in tensors()}
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            state[name] = None
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    for spec in tensors():
        same(state[spec["key"]], whole_of(spec), spec["key"])
    (found,) = state["common_state/shard_0_1"]
    assert found.pop("content_metadata") == CONTENT
    same(found, common_state("random" in found), "common_state")


def load_common(checkpoint):
    from megatron.core.dist_checkpointing import load_common_state_dict

    args = load_common_state_dict(checkpoint)["args"]
    assert isinstance(args, argparse.Namespace), args
    assert isinstance(args.params_dtype, torch.dtype), args.params_dtype
    if checkpoint.endswith("v019"):
        # An enumeration of 0.18 and later, and one that 0.14 and 0.15 do not allow.
        assert (args.inference_cuda_graph_scope, args.exit_signal) == (1, 15), args
    print("%d arguments" % len(vars(args)))


if __name__ == "__main__":
    commands = {"common": load_common, "state": state, "save": save, "load": load, "inside": inside}
    common.main(lambda what, *args: commands[what](*args))
