"""Training states in the layouts that programs have, for `dcp convert --model-only`,
`--no-optimizer` and `--to hf`.

interop_parts.py save DIR        writes each layout as a folder of DCP and as a file of torch.save
interop_parts.py check DIR OUT   compares what the command kept of each
"""
import os

import interop_common as common
import torch
import torch.distributed.checkpoint as dcp
from interop_hf import open_folder
from safetensors.torch import load_file
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class AppState(Stateful):
    """As in PyTorch's tutorial."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def trained(kind=torch.optim.AdamW):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def flat(tree, prefix=""):
    """A nested dict as one of names."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {name: leaf for key, value in tree.items() for name, leaf in flat(value, f"{prefix}.{key}" if prefix else str(key)).items()}


def layouts():
    """Name to (state, what a model name begins with where the model is not found by its name)."""
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    by_name = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    _, other = trained(torch.optim.RMSprop)
    moments = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    return {
        "app": ({"app": AppState(model, optimizer)}, ""),
        "flat": (flat({"app": {"model": weights, "optim": states}}), ""),
        "root": ({**weights, **states}, ""),
        "by_name": ({**weights, **by_name}, ""),
        "jax": ({"params": weights, "opt_state": {"0": {"count": torch.tensor(1), "mu": moments, "nu": moments}}}, ""),
        "gan": ({"g": weights, "opt_g": optimizer.state_dict(), "opt_d": other.state_dict()}, "g."),
        "trainer": ({"model": weights, "optimizer": states, "step": 3}, ""),
    }, weights


def save(folder):
    states, _ = layouts()
    for name, (state, _) in states.items():
        path = os.path.join(folder, name)
        planner = DefaultSavePlanner(flatten_state_dict=name != "flat")
        dcp.save(dict(state), checkpoint_id=path, planner=planner, no_dist=True)
        plain = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
        torch.save(plain, path + ".pt")


def check(folder, out):
    states, weights = layouts()
    for name, (_, prefix) in states.items():
        for source in (name, name + ".pt"):
            wanted = {prefix + key: tensor for key, tensor in weights.items()}
            for how in ("model-only", "hf"):
                path = os.path.join(out, source + "." + how)
                found = open_folder(path) if how == "hf" else load_file(path + ".safetensors")
                assert set(found) == set(wanted), "%s %s: %s" % (source, how, sorted(set(found) ^ set(wanted)))
                for key, tensor in wanted.items():
                    assert common.raw(found[key]) == common.raw(tensor), "%s %s: %s differs" % (source, how, key)
            found = set(load_file(os.path.join(out, source + ".no-optimizer.safetensors")))
            assert len(found) == len(weights) and all(key.endswith(tuple(weights)) for key in found), "%s: %s" % (source, sorted(found))


def check_renamed(folder):
    """The state of `app` with the layer `2` as `head`: everything arrives, the learning rate too."""
    model, optimizer = trained()
    other = torch.nn.Sequential()
    for name, layer in zip(("0", "1", "head"), (torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))):
        other.add_module(name, layer)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    state = {"app": AppState(other, fresh)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert fresh.param_groups[0]["lr"] == 0.1, fresh.param_groups
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"])


def everything(what, *args):
    if what == "save":
        os.makedirs(args[0])
        save(*args)
    else:
        check(*args)
        check_renamed(os.path.join(args[1], "renamed"))


if __name__ == "__main__":
    common.main(everything)
