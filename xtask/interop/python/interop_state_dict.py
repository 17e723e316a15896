"""interop_state_dict.py: state dicts of a model and AdamW, by torch's helpers and by dcp-state.

    save DIR    trains a small model in torch.compile and DDP, and saves to DIR/nested and DIR/flat
                what get_state_dict gives, to DIR/raw what model and optimizer give, and describes
                both in DIR/model.json
    check DIR   sets what Rust saved to DIR/ours_nested and DIR/ours_flat on a fresh model, and
                compares
"""
import json
import os
import sys

import interop_common as common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """A tied and a frozen parameter, a buffer that is saved and one that is not, and extra state."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.module = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.module.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.module(self.embed(tokens))))

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        assert state == {"seen": 3}, state


def make(seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(torch.compile(Net(), backend="eager"))
    params = dict(model.named_parameters())
    norms = [param for name, param in params.items() if ".norm." in name]
    others = [param for name, param in params.items() if ".norm." not in name]
    groups = [{"params": others}, {"params": norms, "weight_decay": 0.0, "lr": 0.25}]
    return model, torch.optim.AdamW(groups, lr=0.125)


def options(flat):
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def state_of(model, optimizer, flat):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options(flat))
    return {"model": model_state, "optimizer": optimizer_state}


def trained():
    model, optimizer = make(1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.arange(7).roll(step)).square().mean()
        loss.backward()
        optimizer.step()
    return model, optimizer


def save(folder):
    model, optimizer = trained()
    for name, flat in [("nested", False), ("flat", True)]:
        dcp.save(state_of(model, optimizer, flat), checkpoint_id=os.path.join(folder, name))
    raw = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(raw, checkpoint_id=os.path.join(folder, "raw"))
    with open(os.path.join(folder, "model.json"), "w") as file:
        json.dump(describe(model, optimizer), file)


def describe(model, optimizer):
    """The names of the model, and the groups of the optimizer, by numbers of parameters."""
    ids = {param: number for number, param in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    params = dict(model.named_parameters(remove_duplicate=False))
    entries = []
    for name in model.state_dict():
        param = params.get(name)
        entries.append({"name": name, "id": None if param is None else ids[param], "frozen": param is not None and not param.requires_grad})
    groups = [[ids[param] for param in group["params"]] for group in optimizer.param_groups]
    return {"entries": entries, "groups": groups}


def flat_leaves(value, path=()):
    """By path; lists of plain values are leaves."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat_leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, inner in enumerate(value):
            yield from flat_leaves(inner, (*path, number))
    else:
        yield path, value


def compare(ours, theirs, what):
    ours, theirs = dict(flat_leaves(ours)), dict(flat_leaves(theirs))
    assert ours.keys() == theirs.keys(), (what, ours.keys() ^ theirs.keys())
    for path, value in theirs.items():
        same = torch.equal(ours[path], value) and ours[path].dtype == value.dtype if torch.is_tensor(value) else ours[path] == value
        assert same, (what, path, ours[path], value)


def check(folder):
    trained_model, trained_optimizer = trained()
    for name, flat in [("nested", False), ("flat", True)]:
        path = os.path.join(folder, "ours_" + name)
        theirs = FileSystemReader(os.path.join(folder, name)).read_metadata()
        ours = FileSystemReader(path).read_metadata()
        assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys(), name
        assert ours.planner_data == theirs.planner_data, name
        model, optimizer = make(2)
        state = state_of(model, optimizer, flat)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options(flat))
        compare(state_of(model, optimizer, flat), state_of(trained_model, trained_optimizer, flat), name)
        compare(optimizer.state_dict(), trained_optimizer.state_dict(), name)


if __name__ == "__main__":
    common.torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    {"save": save, "check": check}[sys.argv[1]](sys.argv[2])
    dist.destroy_process_group()
