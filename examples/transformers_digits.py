"""Train a small vision transformer on handwritten digits with the Trainer of transformers.

Run it with ``torchrun --nproc-per-node 2 examples/transformers_digits.py``; with ``--stock`` Gloo
averages the gradients instead. Nothing is downloaded: the model is built from its configuration.
"""

import hashlib
import sys
import tempfile

import torch
import transformers
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import worker_client.accelerate

STOCK = "--stock" in sys.argv
transformers.utils.logging.set_verbosity_error()

pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
labels = torch.tensor(digits)
data = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]

transformers.set_seed(0)  # the same first weights at every rank
shape = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=10,
)
model = ViTForImageClassification(shape)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=3,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    client = None if STOCK else worker_client.accelerate.attach(trainer.accelerator)  # the one line
    trainer.train()

model.eval()
with torch.no_grad():
    loss = model(pixel_values=images, labels=labels).loss
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
reduced = 0 if client is None else client.bytes_reduced
print(
    f"rank {arguments.process_index}: loss {loss:.10g}, weights {digest}, {reduced} bytes reduced",
    flush=True,
)
trainer.accelerator.wait_for_everyone()  # a rank that hosts a reducer leaves when all have theirs
