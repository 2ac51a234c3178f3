"""fla's KDA model, trained on our kernels: ``python examples/train_fla.py``, on a GPU or, tiny, on a CPU."""

import pydoc_data.topics

import torch
from fla.models import KDAConfig, KDAForCausalLM

import kernel_fun.fla

kernel_fun.fla.register()  # the one line that switches fla's models over

gpu = torch.cuda.is_available()
sizes = (
    {"hidden_size": 512, "head_dim": 128, "num_heads": 4}
    if gpu
    else {"hidden_size": 64, "head_dim": 16, "num_heads": 2}
)
config = KDAConfig(**sizes, num_hidden_layers=2, vocab_size=256, fuse_norm=gpu, fuse_cross_entropy=False)
model = KDAForCausalLM(config).to("cuda" if gpu else "cpu", torch.bfloat16 if gpu else torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.frombuffer(bytearray(str(pydoc_data.topics.topics), "utf-8"), dtype=torch.uint8).long()
for step in range(20):
    starts = torch.randint(len(text) - 256, (4, 1), generator=torch.Generator().manual_seed(step))
    batch = text[starts + torch.arange(256)].to(model.device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2}  loss {loss.item():.3f}")
