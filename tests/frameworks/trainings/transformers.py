"""The Trainer of transformers: GPT-2, stopped in the middle of an epoch."""

import torch
import transformers
from transformers import (
    GPT2Config,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import worker_client.accelerate
from tests.frameworks.resumption import MIDDLE, STEPS, Trained, main

transformers.utils.logging.set_verbosity_error()
WORDS, LENGTH = 50, 12


class Losses(Trainer):
    """A trainer that keeps its losses."""

    def __init__(self, **given):
        super().__init__(**given)
        self.losses = []

    def training_step(self, *given, **options):
        loss = super().training_step(*given, **options)
        self.losses.append(loss.item())
        return loss


class Stop(TrainerCallback):
    """Saves and stops in the middle."""

    def on_step_end(self, _, state, control, **__):
        control.should_save = control.should_training_stop = state.global_step == MIDDLE


def trainer_of(folder, callbacks, ddp_backend="gloo"):
    """Return a trainer of a small GPT-2; with two ranks 6 of its steps are an epoch."""
    transformers.set_seed(0)
    shape = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **shape)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(WORDS, (24, LENGTH), generator=generator)
    options = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.01}
    options |= {"save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
    options |= {"use_cpu": True, "ddp_backend": ddp_backend, "disable_tqdm": True}
    trainer = Losses(
        model=transformers.AutoModelForCausalLM.from_config(config),
        args=TrainingArguments(str(folder), **options),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_gpt2(part):
    trainer = trainer_of(part.folder, [Stop()] if part.begins else [])
    client = None if part.stock else worker_client.accelerate.attach(trainer.accelerator)
    trainer.train(
        resume_from_checkpoint=f"{part.folder}/checkpoint-{MIDDLE}" if part.resumes else None
    )
    trainer.accelerator.wait_for_everyone()
    return Trained(trainer.losses, client.bytes_reduced if client else 0)


if __name__ == "__main__":
    main(globals())
