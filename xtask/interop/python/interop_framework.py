"""interop_framework.py DIR: a model and AdamW of candle or burn go on in torch, and the reverse.

Loads DIR/rust, computes what DIR/expected has, and compares. Trains a model of its own on the same
batches, and saves it to DIR/torch and what it computes then to DIR/torch_expected.
"""
import os
import sys

import interop_common as common
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 13)
        self.fc2 = nn.Linear(13, 5)

    def forward(self, rows):
        return self.fc2(self.fc1(rows).relu())


def make(seed, lr):
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def train(model, optimizer, inputs, targets):
    losses = []
    for rows, target in zip(inputs, targets):
        optimizer.zero_grad()
        loss = (model(rows) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def exchange(folder):
    expected = _load_state_dict_from_keys(checkpoint_id=os.path.join(folder, "expected"))
    before = expected["before_inputs"], expected["before_targets"]
    after = expected["after_inputs"], expected["after_targets"]

    model, optimizer = make(1, lr=0.5)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=os.path.join(folder, "rust"))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert optimizer.param_groups[0]["lr"] == 0.01, optimizer.param_groups[0]
    assert all(one["step"] == len(before[0]) for one in optimizer.state.values())
    logits = model(after[0][0])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-5)
    losses = train(model, optimizer, *after)
    torch.testing.assert_close(losses, expected["losses"], rtol=0, atol=1e-5)

    model, optimizer = make(2, lr=0.02)
    train(model, optimizer, *before)
    dcp.save(state_of(model, optimizer), checkpoint_id=os.path.join(folder, "torch"))
    computed = {"logits": model(after[0][0]).detach()}
    computed["losses"] = train(model, optimizer, *after)
    dcp.save(computed, checkpoint_id=os.path.join(folder, "torch_expected"))


if __name__ == "__main__":
    common.main(exchange)
