"""A GPT-2 from `transformers`, with random weights, as a workload for the command line.

    steelyard plan examples/transformers_gpt2.py --memory 60MiB
    steelyard run examples/transformers_gpt2.py --steps 20

Needs `pip install transformers`; nothing is downloaded.
"""

from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import steelyard as sy

CONFIG = GPT2Config(n_layer=4, n_embd=128, n_head=4, n_positions=128, vocab_size=1000)


def loss(model, batch):
    return model(input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {"ids": torch.randint(CONFIG.vocab_size, (8, 128), generator=generator)}


def workload():
    torch.manual_seed(0)
    return sy.Workload(
        model=GPT2LMHeadModel(CONFIG),
        loss=loss,
        batches=batches,
        optimizer=partial(torch.optim.AdamW, lr=3e-4),
    )
