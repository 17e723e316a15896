"""interop_state_ranks.py: what each of several ranks holds of the state dicts of an FSDP2 model and
its AdamW, by torch's helpers; dcp-state compares its own with it.

    save DIR RANKS     saves what model and optimizer give to DIR/raw, describes them in
                       DIR/model.json, and saves to DIR/OPTIONS.RANK what get_state_dict gives to a
                       rank with these options, and to DIR/set.RANK what the rank has after a
                       broadcast of rank 0's
    check DIR RANKS    sets what Rust gathered on rank 0 and saved to DIR/ours on fresh models, by
                       broadcasts of rank 0 and from whole state dicts of all ranks, and compares
                       what each rank then has with the model that was gathered
"""
import copy
import json
import os
import sys

import interop_common as common
import torch
import torch.distributed.checkpoint as dcp
from interop_common import DTensor
from interop_state_dict import Net, compare, describe
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

LAYOUTS = [("nested", False), ("flat", True)]
# What full_state_dict and cpu_offload make of the two.
OPTIONS = {"sharded": (False, False), "offloaded": (False, True), "full": (True, False), "rank0": (True, True)}
RANK0 = {"full_state_dict": True, "cpu_offload": True}
BROADCAST = {"full_state_dict": True, "broadcast_from_rank0": True}


def make(seed, world):
    torch.manual_seed(seed)
    mesh = common.device_mesh((world,))
    model = Net()
    fully_shard(model.module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = dict(model.named_parameters())
    norms = [param for name, param in params.items() if name.startswith("norm.")]
    others = [param for name, param in params.items() if not name.startswith("norm.")]
    groups = [{"params": others}, {"params": norms, "weight_decay": 0.0, "lr": 0.25}]
    return model, torch.optim.AdamW(groups, lr=0.125)


def trained(world):
    model, optimizer = make(1, world)
    for step in range(3):
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.full_like(param, step + 0.5)
        optimizer.step()
    model.norm.running_mean += 0.5
    return model, optimizer


def state_of(model, optimizer, **options):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": model_state, "optimizer": optimizer_state}


def held(value):
    """What this rank holds: of a DTensor its part, and where that is."""
    if isinstance(value, DTensor):
        local = value.to_local().detach()
        _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        if local.numel() == 0:
            return {"shape": str(list(value.shape)), "offsets": "", "local": None}
        return {"shape": str(list(value.shape)), "offsets": str(list(offsets)), "local": local.clone()}
    if isinstance(value, dict):
        return {key: held(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [held(inner) for inner in value]
    return value


def keep(state, folder, name, rank):
    counts = {"of_" + part: len(of_part) for part, of_part in state.items()}
    dcp.save({**held(state), **counts}, checkpoint_id=os.path.join(folder, f"{name}.{rank}"), no_dist=True)


def set_together(model, optimizer, state, **options):
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(**options),
    )
    of_tuples(optimizer)


def set_apart(model, optimizer, state, **options):
    set_model_state_dict(model, state["model"], options=StateDictOptions(**options))
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=StateDictOptions(**options))
    of_tuples(optimizer)


def of_tuples(optimizer):
    """set_state_dict (2.15) makes a list of the tuple."""
    for group in optimizer.param_groups:
        group["betas"] = tuple(group["betas"])


def broadcast(state, rank, world):
    """A fresh model and optimizer that got the state of rank 0, in the nested layout: the flat one
    is a KeyError in 2.15."""
    model, optimizer = make(2, world)
    if rank != 0:
        state = {"model": {}, "optimizer": {}}
    # set_state_dict (2.15) hangs: a rank with an empty state dict of the model sets the optimizer only.
    set_apart(model, optimizer, state, **BROADCAST)
    return model, optimizer


def save(rank, world, folder):
    model, optimizer = trained(world)
    raw = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(raw, checkpoint_id=os.path.join(folder, "raw"))
    if rank == 0:
        with open(os.path.join(folder, "model.json"), "w") as file:
            json.dump(describe(model, optimizer), file)
    for layout, flat in LAYOUTS:
        for name, (full, offload) in OPTIONS.items():
            state = state_of(model, optimizer, full_state_dict=full, cpu_offload=offload, flatten_optimizer_state_dict=flat)
            keep(state, folder, f"{name}_{layout}", rank)
    fresh = broadcast(state_of(model, optimizer, **RANK0), rank, world)
    keep(state_of(*fresh), folder, "set", rank)


def check(rank, world, folder):
    expected = held(state_of(*trained(world)))
    # Of another model than those that are set: the state dict has buffers of the model itself.
    whole = state_of(*make(3, world), full_state_dict=True)
    untrained = torch.equal(whole["model"]["norm.running_mean"], torch.zeros(4))
    assert untrained and len(whole["optimizer"]["state"]) > 0
    dcp.load(whole, checkpoint_id=os.path.join(folder, "ours"), no_dist=True)

    # Setting changes the state dict, so each takes a copy.
    compare(held(state_of(*broadcast(copy.deepcopy(whole), rank, world))), expected, (rank, "broadcast"))
    model, optimizer = make(4, world)
    # A rank that passes its own state dict of the model receives rank 0's by set_state_dict, too.
    state = copy.deepcopy(whole) if rank == 0 else {"model": model.state_dict(), "optimizer": {}}
    set_together(model, optimizer, state, cpu_offload=True, **BROADCAST)
    compare(held(state_of(model, optimizer)), expected, (rank, "broadcast, together"))
    for offload in (False, True):
        model, optimizer = make(5, world)
        set_together(model, optimizer, copy.deepcopy(whole), full_state_dict=True, cpu_offload=offload)
        compare(held(state_of(model, optimizer)), expected, (rank, "whole", offload))


if __name__ == "__main__":
    function = {"save": save, "check": check}[sys.argv[1]]
    common.on_ranks(function, int(sys.argv[3]), sys.argv[2])
