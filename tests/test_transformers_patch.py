"""Tiny KimiLinear and GLM-5.3-Flash models of transformers, as they are and patched."""

from __future__ import annotations

import copy
import inspect
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun._common import support
from kernel_fun.testing import relative_error

pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")

import transformers
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.monkey_patching import get_patch_mapping

import kernel_fun.transformers as ours

pytestmark = pytest.mark.filterwarnings("ignore")

FUNCTIONS = (
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


@pytest.fixture(autouse=True)
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers' own torch functions, also where fla is installed; and no patch outlives its test."""
    support.forget_logged()
    for modeling in (kimi, glm):
        for name in FUNCTIONS:
            monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    yield
    assert get_patch_mapping() == {}


def kimi_config() -> Any:
    return KimiLinearConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16,
        qk_nope_head_dim=16, num_local_experts=4, num_experts_per_tok=2, linear_head_dim=16,
        linear_num_heads=2, layer_types=["linear_attention", "linear_attention", "full_attention"],
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def kimi_model() -> Any:
    """KDA, KDA with experts, full attention."""
    torch.manual_seed(0)
    return kimi.KimiLinearForCausalLM(kimi_config()).float().eval()


class WithHead(torch.nn.Module):
    """GLM's text model and a head: its whole model also wants images."""

    def __init__(self) -> None:
        super().__init__()
        config = Glm5NextTextConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16, v_head_dim=16,
            qk_nope_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, index_topk=128, index_kpool=4,
            index_head_dim=8, index_n_heads=2, linear_head_dim=16, linear_num_heads=2,
            layer_types=["linear_attention", "linear_attention", "indexed_attention"], pad_token_id=0,
        )  # fmt: skip
        self.model = glm.Glm5NextTextModel(config)
        self.head = torch.nn.Linear(32, 97, bias=False)

    def forward(self, **kwargs: Any) -> Any:
        out = self.model(**kwargs)
        out.logits = self.head(out.last_hidden_state)
        return out


def glm_model() -> Any:
    torch.manual_seed(0)
    return WithHead().float().eval()


MODELS = pytest.mark.parametrize("build", [kimi_model, glm_model], ids=["KimiLinear", "GLM-5.3-Flash"])


def tokens(B: int, T: int) -> Tensor:
    return torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(T))


def learn(model: Any, text: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of the next-token loss where both tokens count."""
    model.zero_grad()
    logits = model(input_ids=text, use_cache=False, **kwargs).logits
    mask = kwargs.get("attention_mask", torch.ones_like(text)).bool()
    counts = mask[:, :-1] & mask[:, 1:]
    torch.nn.functional.cross_entropy(logits[:, :-1][counts], text[:, 1:][counts]).backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@MODELS
@pytest.mark.parametrize("T", [1, 7, 64, 130])
def test_same_logits_and_gradients(build: Any, T: int, caplog: pytest.LogCaptureFixture) -> None:
    model, text = build(), tokens(2, max(T, 2))
    logits, gradients = learn(model, text)
    with ours.patch(model) as patched, caplog.at_level(logging.INFO, logger="kernel_fun"):
        assert len(patched.layers) == 2
        found, found_gradients = learn(model, text)
    assert "engaged (chunk_kda on eager, CPU" in caplog.text
    assert "engaged (causal_conv1d on eager, CPU" in caplog.text
    assert relative_error(logits, found) < 1e-5
    assert found_gradients.keys() == gradients.keys()
    for part in ("A_log", "dt_bias", "conv1d.weight"):
        assert any(part in name for name in gradients)
    for name, gradient in gradients.items():
        # those of the hyper-connections are sums of 1e-3 that cancel to 1e-6
        limit = 1e-3 if "_hc." in name else 5e-5
        assert relative_error(gradient, found_gradients[name]) < limit, name
    assert torch.equal(learn(model, text)[0], logits), "undone"


@MODELS
def test_same_text_from_a_cache(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Prefill in two pieces, then token by token: the states of both are in the cache."""
    model, text = build(), tokens(2, 90)
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="kernel_fun"), ours.patch(model):
        whole = model(input_ids=text, use_cache=False).logits
        out = model(input_ids=text[:, :70], use_cache=True)
        pieces = [out.logits]
        for first, last in ((70, 73), *((t, t + 1) for t in range(73, 90))):
            out = model(input_ids=text[:, first:last], cache=out.cache, use_cache=True)
            pieces.append(out.logits)
    assert "engaged (fused_recurrent_kda on eager" in caplog.text
    assert "engaged (causal_conv1d_update on eager" in caplog.text
    assert relative_error(whole, torch.cat(pieces, 1)) < 1e-5


@pytest.mark.parametrize("prompt", [2, 70])
def test_generation_writes_the_same_text(prompt: int) -> None:
    model, text = kimi_model(), tokens(2, prompt)
    mask = torch.ones_like(text)
    mask[0, : prompt // 2] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    before = model.generate(text, **settings)
    with ours.patch(model):
        assert torch.equal(model.generate(text, **settings), before)
        beams = model.generate(text, num_beams=2, **settings)
    assert torch.equal(beams, model.generate(text, num_beams=2, **settings))


@MODELS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_packed(build: Any, side: str, caplog: pytest.LogCaptureFixture) -> None:
    """Logits and gradients are those of the unpadded rows alone; tokens at padding reach nothing."""
    model, text = build(), tokens(3, 75)
    mask = torch.ones_like(text)
    mask[0, :20] = 0
    mask[2, :70] = 0
    if side == "right":
        mask = mask.flip(1)
    with ours.patch(model), caplog.at_level(logging.INFO, logger="kernel_fun"):
        logits, gradients = learn(model, text, attention_mask=mask)
        assert f"engaged (chunk_kda on eager, CPU: N=3 T={int(mask.sum())} packed" in caplog.text
        alone = model(input_ids=text[:1][:, mask[0].bool()], use_cache=False).logits
        assert relative_error(alone[0], logits[0][mask[0].bool()]) < 1e-5
        changed = torch.where(mask.bool(), text, 5)
        logits_changed, gradients_changed = learn(model, changed, attention_mask=mask)
    kept = mask.bool()
    assert torch.equal(logits[kept], logits_changed[kept])
    for name, gradient in gradients.items():
        if "embed" not in name:  # experts sum over tokens in an order that depends on all of them
            assert relative_error(gradient, gradients_changed[name]) < (1e-3 if "_hc." in name else 1e-5), (
                name
            )
    if side == "left":
        theirs, their_gradients = learn(model, text, attention_mask=mask)
        assert relative_error(theirs[kept], logits[kept]) < 1e-5
        for name, gradient in their_gradients.items():
            assert relative_error(gradient, gradients[name]) < (1e-3 if "_hc." in name else 5e-5), name


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
def test_packed_sequences_do_not_leak(name: str) -> None:
    layer = kimi.KimiLinearDeltaAttention(kimi_config(), 0).float()
    x = torch.randn(1, 50, 32)
    with ours.patch(layer), torch.no_grad():
        packed = layer(x, **{name: torch.tensor([0, 13, 13, 50])})
        assert relative_error(layer(x[:, :13]), packed[:, :13]) < 1e-6
        assert relative_error(layer(x[:, 13:]), packed[:, 13:]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_parameters(dtype: torch.dtype) -> None:
    """As loaded in bfloat16: dt_bias stays float32, A_log does not."""
    model, text = kimi_model(), tokens(2, 40)
    reference = model(input_ids=text, use_cache=False).logits
    model.to(dtype)
    for layer in model.model.layers[:2]:
        layer.self_attn.forget_gate.dt_bias.data = layer.self_attn.forget_gate.dt_bias.data.float()
    theirs, _ = learn(model, text)
    with ours.patch(model):
        logits, gradients = learn(model, text)
    own = relative_error(reference, logits)
    assert own < 2 * relative_error(reference, theirs) + 1e-3, own
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert gradient.dtype == dict(model.named_parameters())[name].dtype


class TestModelClass:
    def test_every_model_built_from_it(self, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
        plain, text = kimi_model(), tokens(1, 20)
        plain.save_pretrained(tmp_path)
        logits = plain(input_ids=text).logits
        with ours.patch(kimi.KimiLinearForCausalLM) as done:
            assert done.layers == ("KimiLinearDeltaAttention",)
            assert ours.patch(kimi.KimiLinearForCausalLM).layers == ()
            built = kimi_model()
            loaded = kimi.KimiLinearForCausalLM.from_pretrained(tmp_path)
        for model in (built, loaded):
            assert type(model.model.layers[0].self_attn).__module__ == "kernel_fun.transformers"
            assert isinstance(model.model.layers[0].self_attn, kimi.KimiLinearDeltaAttention)
            assert relative_error(logits, model(input_ids=text).logits) < 1e-5
        after = kimi_model()
        assert type(after.model.layers[0].self_attn) is kimi.KimiLinearDeltaAttention
        assert type(after.model.layers[0].self_attn).__module__ != "kernel_fun.transformers"

    def test_glm_too(self) -> None:
        with ours.patch(glm.Glm5NextForConditionalGeneration) as done:
            assert done.layers == ("Glm5NextTextLinearAttention",)
            layer = glm_model().model.layers[0].self_attn
        assert type(layer).__module__ == "kernel_fun.transformers"
        assert isinstance(layer, glm.Glm5NextTextLinearAttention)

    def test_the_state_dict_is_unchanged(self) -> None:
        plain = kimi_model()
        with ours.patch(kimi.KimiLinearForCausalLM):
            assert kimi_model().state_dict().keys() == plain.state_dict().keys()


def test_a_patched_model_is_copied_and_pickled() -> None:
    model, text = kimi_model(), tokens(1, 20)
    ours.patch(model)
    expected = model(input_ids=text).logits
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert type(twin.model.layers[0].self_attn).__module__ == "kernel_fun.transformers"
        assert torch.equal(twin(input_ids=text).logits, expected)


def test_patching_twice_and_undoing_once() -> None:
    model = kimi_model()
    first, second = ours.patch(model), ours.patch(model)
    assert len(first.layers) == 2
    assert second.layers == ()
    second.undo()
    assert type(model.model.layers[0].self_attn).__module__ == "kernel_fun.transformers"
    first.undo()
    assert type(model.model.layers[0].self_attn) is kimi.KimiLinearDeltaAttention


def test_what_cannot_be_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be a model with KDA layers of transformers .* got Linear"):
        ours.patch(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a model class of kimi_linear or glm5_next, got torch\.nn"):
        ours.patch(torch.nn.Linear)
    with pytest.raises(TypeError, match="must be a model or a model class, got str"):
        ours.patch("moonshotai/Kimi-Linear")  # pyright: ignore
    with pytest.raises(TypeError, match="must be a model or a model class, got class AutoModelForCausalLM"):
        ours.patch(transformers.AutoModelForCausalLM)
    model = kimi_model()
    layer = model.model.layers[0].self_attn
    layer.forward = layer.forward  # as accelerate's hooks do
    with pytest.raises(ValueError, match=r"must not be wrapped .* at 'model\.layers\.0\.self_attn'"):
        ours.patch(model)
    del layer.forward
    layer.activation = "gelu"
    with pytest.raises(ValueError, match="must have silu convolutions, got 'gelu'"):
        ours.patch(model)
    monkeypatch.delattr(kimi, "KimiLinearDeltaAttention")
    with pytest.raises(RuntimeError, match=r"has no KimiLinearDeltaAttention \(tested: 5\.24\.0"):
        ours.patch(kimi.KimiLinearForCausalLM)


def test_gradient_checkpointing_changes_no_bit() -> None:
    model, text = kimi_model().train(), tokens(2, 40)
    with ours.patch(model):
        logits, gradients = learn(model, text)
        model.gradient_checkpointing_enable()
        again, gradients_again = learn(model, text)
    assert torch.equal(logits, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


@pytest.mark.parametrize("shape", [(3, 70), (2, 50), (2, 70, 1), (2, 1, 70, 70)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    layer = kimi.KimiLinearDeltaAttention(kimi_config(), 0).float()
    with ours.patch(layer), pytest.raises(ValueError, match=r"`attention_mask` must have shape \[B, T\]"):
        layer(torch.randn(2, 70, 32), attention_mask=torch.ones(shape))


def test_padding_of_one_token_leaves_the_states_of_its_row() -> None:
    model, text, x = kimi_model(), tokens(2, 9), torch.randn(2, 1, 32)
    layer = model.model.layers[0].self_attn
    with torch.no_grad(), ours.patch(model):
        cache, all_present = (model(input_ids=text, use_cache=True).cache for _ in range(2))
        before = cache.get_recurrent_state(0).clone(), cache.get_conv_state(0)[..., -4:].clone()
        y = layer(x, cache=cache, attention_mask=torch.tensor([[1], [0]]))
        expected = layer(x, cache=all_present)
    after = cache.get_recurrent_state(0), cache.get_conv_state(0)[..., -4:]
    stepped = all_present.get_recurrent_state(0), all_present.get_conv_state(0)[..., -4:]
    assert relative_error(expected[0], y[0]) < 1e-5
    assert not y[1].any()
    for was, now, step in zip(before, after, stepped, strict=True):
        assert relative_error(step[0], now[0]) < 1e-5
        assert torch.equal(was[1], now[1])


def test_a_patched_layer_compiles_without_a_break() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    layer = kimi.KimiLinearDeltaAttention(kimi_config(), 0).float()
    counter = CompileCounterWithBackend("aot_eager")
    with ours.patch(layer):
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        for T in (70, 100, 131):
            x, mask = torch.randn(2, T, 32), torch.ones(2, T)
            mask[0, :20] = 0
            expected, found = (f(x, attention_mask=mask)[mask.bool()] for f in (layer, compiled))
            assert relative_error(expected, found) < 1e-5
    assert counter.frame_count == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@MODELS
def test_on_a_gpu_as_on_the_cpu(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """float32: logits and gradients of a patched model on the GPU are those of the CPU, and the log says who ran."""
    model, text = build(), tokens(2, 75)
    mask = torch.ones_like(text)
    mask[0, :20] = 0
    with ours.patch(model), caplog.at_level(logging.INFO, logger="kernel_fun"):
        logits, gradients = learn(model, text, attention_mask=mask)
        found, found_gradients = learn(model.cuda(), text.cuda(), attention_mask=mask.cuda())
    assert "causal_conv1d on triton" in caplog.text
    kept = mask.bool()
    assert relative_error(logits[kept], found.cpu()[kept]) < 1e-3
    for name, gradient in gradients.items():
        if "_hc." not in name:
            assert relative_error(gradient, found_gradients[name].cpu()) < 1e-2, name
