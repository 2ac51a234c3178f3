"""A tiny KimiLinear model of transformers with its chunk function replaced by ours."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernel_fun.kda import chunk_kda, fused_recurrent_kda
from kernel_fun.testing import relative_error

if TYPE_CHECKING:
    from torch import Tensor

modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
configuration = pytest.importorskip("transformers.models.kimi_linear.configuration_kimi_linear")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model() -> Any:
    """Three layers: KDA, KDA with experts, full attention."""
    torch.manual_seed(0)
    config = configuration.KimiLinearConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=16,
        linear_num_heads=2,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return modeling.KimiLinearForCausalLM(config).float().eval()


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own torch functions, also where a kernel package is installed."""
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn"):
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))


def use_ours(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The replacement a user makes, counting calls so that a green test is not theirs twice."""
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape[1])
        return chunk_kda(*args, **kwargs)

    monkeypatch.setattr(modeling, "chunk_kimi_delta_attention", counted)
    return calls


def logits_and_gradients(model: Any, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


@pytest.mark.parametrize("T", [7, 64, 130])
def test_same_logits_and_parameter_gradients(
    model: Any, theirs: None, backend: str, monkeypatch: pytest.MonkeyPatch, T: int
) -> None:
    tokens = torch.randint(3, 97, (2, T), generator=torch.Generator().manual_seed(T))
    logits, gradients = logits_and_gradients(model, tokens)
    calls = use_ours(monkeypatch)
    ours, our_gradients = logits_and_gradients(model, tokens)
    assert calls == [T, T]
    assert relative_error(logits, ours) < 1e-5
    assert our_gradients.keys() == gradients.keys()
    assert any("A_log" in name for name in gradients)
    for name, gradient in gradients.items():
        assert relative_error(gradient, our_gradients[name]) < 2e-5, name


def test_same_text_with_a_cache(
    model: Any, theirs: None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill with chunk_kda, then decode with fused_recurrent_kda from the cached state."""
    prompt = torch.randint(3, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    calls = use_ours(monkeypatch)
    monkeypatch.setattr(modeling, "recurrent_kimi_delta_attention", fused_recurrent_kda)
    ours = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert calls == [70, 70]
    assert torch.equal(text, ours)
