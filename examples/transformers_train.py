"""An ordinary script for transformers' Trainer, which wraps the model through accelerate: in our class if started so:

fastreduce run --compression fp16 --nproc_per_node=2 examples/transformers_train.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from fastreduce import DistributedDataParallel


def train(steps: int = 12) -> Trainer:
    """Teach a tiny model, randomly initialised, to count in steps of 1 to 5, modulo 64."""
    set_seed(0)
    shape = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    starts, strides = torch.randint(64, (512, 1)), torch.randint(1, 6, (512, 1))
    tokens = (starts + strides * torch.arange(32)) % 64
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=1e-2,
        ddp_bucket_cap_mb=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()
    return trainer


def main() -> None:
    trainer = train()
    ddp = trainer.model_wrapped
    assert isinstance(ddp, DistributedDataParallel), "start this script with fastreduce run"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"fastreduce {ddp.compression}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
