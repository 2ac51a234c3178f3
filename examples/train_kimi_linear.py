"""KimiLinear of transformers, trained on our kernels: ``python examples/train_kimi_linear.py``."""

import pydoc_data.topics

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

import kernel_fun.transformers

gpu = torch.cuda.is_available()
dim = 128 if gpu else 16
config = KimiLinearConfig(
    vocab_size=256, hidden_size=4 * dim, intermediate_size=4 * dim, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=dim, qk_rope_head_dim=8, v_head_dim=dim,
    qk_nope_head_dim=dim, linear_head_dim=dim, linear_num_heads=2, num_local_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=dim, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
)  # fmt: skip
model = KimiLinearForCausalLM(config).to("cuda" if gpu else "cpu", torch.bfloat16 if gpu else torch.float32)
kernel_fun.transformers.patch(model)  # the one line that switches its KDA layers over

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.frombuffer(bytearray(str(pydoc_data.topics.topics), "utf-8"), dtype=torch.uint8).long()
for step in range(20):
    starts = torch.randint(len(text) - 256, (4, 1), generator=torch.Generator().manual_seed(step))
    batch = text[starts + torch.arange(256)].to(model.device)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2}  loss {loss.item():.3f}")
