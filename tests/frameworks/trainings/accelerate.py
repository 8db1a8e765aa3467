"""Accelerate, stopped in the middle of an epoch, with a schedule."""

import warnings

import torch
from accelerate import Accelerator, DataLoaderConfiguration

import worker_client.accelerate
from tests.frameworks import small
from tests.frameworks.resumption import MIDDLE, Trained, main
from worker_client.client.bootstrap import connect

warnings.filterwarnings("ignore")
PER_EPOCH = 6


def train(part, client):
    loading = DataLoaderConfiguration(use_seedable_sampler=True)  # for epochs to be resumed
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    if client:
        worker_client.accelerate.attach(accelerator, client)
    torch.manual_seed(0)
    network = small.network(64, 64)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02)
    model, optimizer, data, schedule = accelerator.prepare(
        network,
        optimizer,
        small.data(8 * 2 * PER_EPOCH, shuffle=True),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    if part.resumes:
        accelerator.load_state(str(part.folder))
    losses = []
    step = part.steps.start
    while step < part.steps.stop:
        data.set_epoch(step // PER_EPOCH)
        done = step % PER_EPOCH
        for inputs, labels in accelerator.skip_first_batches(data, done) if done else data:
            loss = small.loss_of(model(inputs), labels)
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if part.begins and step == MIDDLE:
                accelerator.save_state(str(part.folder))
            if step == part.steps.stop:
                break
    accelerator.wait_for_everyone()
    return Trained(losses, client.bytes_reduced if client else 0)


def train_accelerate(part):
    return train(part, None if part.stock else worker_client.init())


def train_accelerate_in_8_bits(part):
    with connect(job="8 bits", wire_dtype="int8") as client:
        return train(part, client)


if __name__ == "__main__":
    main(globals())
