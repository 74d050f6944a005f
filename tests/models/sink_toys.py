"""A batch to train sinks on, and a model with learned keys and values."""

import torch

from tiny_diffusion import MASK, tiny_model

IDS = torch.randint(3, 250, (4, 12), generator=torch.Generator().manual_seed(0))
NOISY = torch.where(
    torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.5, MASK, IDS
)


def train(model, steps=8, lr=0.05, ids=IDS):
    """Losses of a few steps on one batch."""
    model.train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0
    )
    losses = []
    for _ in range(steps):
        logits = model(NOISY, logits_to_keep=NOISY == MASK).logits
        loss = torch.nn.functional.cross_entropy(logits, ids[NOISY == MASK])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def kv_model(count=1, **settings):
    """Its values are not zero, so that it does something."""
    model = tiny_model(sink_kind="kv", sink_count=count, **settings)
    with torch.no_grad():
        for parameter, std in ((model.sink_keys, 2.0), (model.sink_values, 1.0)):
            parameter.normal_(std=std, generator=torch.Generator().manual_seed(count))
    return model


def logit_model(count=1, std=2.0, **settings):
    """Its logits differ from head to head."""
    model = tiny_model(sink_kind="logit", sink_count=count, **settings)
    with torch.no_grad():
        model.sink_logits.normal_(std=std, generator=torch.Generator().manual_seed(count))
    return model
