"""Frameworks that call PyTorch's checkpointing, with one line of this package: ``distcp.torch.install()``.

``cargo xtask interop --python`` installs them with the newest PyTorch; without them these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import distcp
import distcp.torch
import ranks

State = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.blocks(x))
        return result


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """All tensors of the model and its optimizer, whole, on every rank."""
    options = StateDictOptions(full_state_dict=True)
    tensors = {f"model.{name}": tensor for name, tensor in get_model_state_dict(model, options=options).items()}
    for name, values in get_optimizer_state_dict(model, optimizer, options=options)["state"].items():
        tensors.update({f"{name}.{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)})
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differing(left: State, right: State) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]


@contextmanager
def installed(is_ours: bool) -> Iterator[None]:
    undo = distcp.torch.install() if is_ours else None
    try:
        yield
    finally:
        if undo is not None:
            undo()


def step_of(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], object]) -> None:
    backward(model(torch.ones(4, 6) * (dist.get_rank() + 1)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def save_and_load(
    save: Callable[[], object], load: Callable[[], object], state: Callable[[], State], train: Callable[[], object]
) -> dict[str, list[str]]:
    """Trains, saves through one side, trains on, and loads through the other: the tensors that differ from those that
    were saved. Every pair of sides but PyTorch's with itself."""
    found = {}
    for saves, loads in ((True, True), (True, False), (False, True)):
        train()
        saved = state()
        with installed(saves):
            save()
        train()
        assert differing(saved, state())
        with installed(loads):
            load()
        found[f"saved by {'us' if saves else 'PyTorch'}, loaded by {'us' if loads else 'PyTorch'}"] = differing(
            saved, state()
        )
    return found


def as_torchrun() -> int:
    """The variables of a process that torchrun started, and the number of ranks. The frameworks take the group that is
    there, so that no address is used."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return dist.get_world_size()


def is_ours(folder: Path) -> bool:
    sidecar = distcp.open(folder).inspect().sidecar
    return sidecar is not None and sidecar["state"] == "found"


def with_accelerate(folder: str) -> dict[str, list[str]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ.update(ACCELERATE_USE_CPU="true", FSDP_VERSION="2")
    as_torchrun()
    PartialState(cpu=True)
    # accelerate has FSDP for accelerators only; its functions that save work on any device.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(1)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    places = iter(range(10))
    last = [""]

    def save() -> None:
        last[0] = os.path.join(folder, f"save_{next(places)}")
        accelerator.save_state(last[0])

    found = save_and_load(
        save,
        lambda: accelerator.load_state(last[0]),
        lambda: whole(model, optimizer.optimizer),
        lambda: step_of(model, optimizer, accelerator.backward),
    )
    return found


@pytest.mark.parametrize("world_size", [2])
def test_accelerate(world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in ranks.run(world_size, tmp_path, with_accelerate, str(tmp_path / "ck")):
        assert len(found) == 3 and not any(found.values()), found
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert is_ours(tmp_path / "ck" / "save_0" / part)
        assert not is_ours(tmp_path / "ck" / "save_2" / part)


def parallelize(model: nn.Module, device_mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=device_mesh["data_parallel"])
    fully_shard(model, mesh=device_mesh["data_parallel"])
    return model


def with_fabric(folder: str) -> dict[str, list[str]]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    world_size = as_torchrun()
    strategy = ModelParallelStrategy(
        parallelize_fn=parallelize,
        data_parallel_size=world_size,
        tensor_parallel_size=1,
        process_group_backend="gloo",
    )
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    module = fabric.setup_module(Model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2))
    inner = module._forward_module
    state = {"model": module, "optimizer": optimizer, "step": 3}
    places = iter(range(10))
    last = [""]

    def save() -> None:
        last[0] = os.path.join(folder, f"epoch={next(places)}.ckpt")
        fabric.save(last[0], state)

    return save_and_load(
        save,
        lambda: fabric.load(last[0], state),
        lambda: whole(inner, optimizer.optimizer),
        lambda: step_of(module, optimizer, fabric.backward),
    )


def test_lightning_fabric(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    for found in ranks.run(2, tmp_path, with_fabric, str(tmp_path / "ck")):
        assert len(found) == 3 and not any(found.values()), found
    assert is_ours(tmp_path / "ck" / "epoch=0.ckpt") and not is_ours(tmp_path / "ck" / "epoch=2.ckpt")


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 37, (5,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def with_trainer(folder: str, resume: str | None, ours: bool) -> State:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

    as_torchrun()
    os.environ.update(
        ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_TRANSFORMER_CLS_TO_WRAP="Qwen2DecoderLayer",
        FSDP_CPU_RAM_EFFICIENT_LOADING="false", FSDP_RESHARD_AFTER_FORWARD="true",
    )  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    torch.manual_seed(3)
    shape = {"hidden_size": 12, "intermediate_size": 17, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=37, num_hidden_layers=1, max_position_embeddings=32, tie_word_embeddings=False, **shape)
    arguments = TrainingArguments(
        output_dir=folder, max_steps=4, save_steps=2, save_strategy="steps", per_device_train_batch_size=2,
        report_to=[], disable_tqdm=True, learning_rate=1e-2, use_cpu=True,
    )  # fmt: skip
    arguments.device  # noqa: B018  resets the state, which names the world again
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    with installed(ours):
        trainer = Trainer(model=Qwen2ForCausalLM(config), args=arguments, train_dataset=Samples())
        trainer.train(resume_from_checkpoint=resume)
    optimizer = trainer.optimizer
    return whole(trainer.model_wrapped, getattr(optimizer, "optimizer", optimizer))


def test_a_trainer_of_transformers_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    runs = [str(tmp_path / name) for name in ("ours", "resumed", "by_pytorch")]
    straight = ranks.run(2, tmp_path, with_trainer, runs[0], None, True)[0]
    checkpoint = f"{runs[0]}/checkpoint-2"
    assert is_ours(Path(checkpoint) / "pytorch_model_fsdp_0")
    for run, ours in zip(runs[1:], (True, False)):
        assert not differing(straight, ranks.run(2, tmp_path, with_trainer, run, checkpoint, ours)[0])
