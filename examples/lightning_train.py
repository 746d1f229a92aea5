"""Lightning with our class: a strategy, by name or with options.

python examples/lightning_train.py --strategy fastreduce_fp16
python examples/lightning_train.py --compression int8:error_feedback
"""

import argparse

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastreduce.lightning import FastreduceStrategy


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_end(self) -> None:
        ddp = self.trainer.model  # this module as the strategy has wrapped it
        wrapper = f"{type(ddp).__module__} {getattr(ddp, 'compression', '')}"
        self.print(f"{wrapper}: loss {self.losses[0]:.3f} to {self.losses[-1]:.3f}")


def train(strategy: str | DDPStrategy, epochs: int = 2) -> Digits:
    seed_everything(0, verbose=False)
    model = Digits()
    digits = load_digits()
    images = torch.tensor(digits.data[:1024], dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target[:1024]))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="fastreduce", help="or fastreduce_fp16, …, or ddp (torch's class)")
    parser.add_argument("--compression", help="a setting without a name of its own, such as int8:block=64")
    options = parser.parse_args()
    train(FastreduceStrategy(compression=options.compression) if options.compression else options.strategy)


if __name__ == "__main__":
    main()
