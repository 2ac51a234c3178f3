"""is_supported and warmup answer in every setting a caller may ask in, and refuse with a sentence."""

from __future__ import annotations

import pytest
import torch

from kernel_fun._common import compat, config
from kernel_fun.kda import chunk_kda, is_supported, warmup
from kernel_fun.testing import make_inputs

Q, V = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
SMALL = dict(K=8, V=8, HV=1, dtype=torch.float32, device="cpu")


@pytest.fixture(autouse=True)
def _no_fla(monkeypatch):
    monkeypatch.setattr(compat, "check_fla", lambda: None)


def test_is_supported_refuses_what_chunk_kda_refuses():
    with pytest.raises(TypeError, match="unexpected keyword argument 'A_lgo'"):
        is_supported(Q, V, A_lgo=1)
    with pytest.raises(ValueError, match=r"`q` must have shape \[B, T, H, K\], got \[4, 2, 8\]"):
        is_supported(Q[0], V)
    with pytest.raises(TypeError, match=r"`v` must be a torch.Tensor, got list"):
        is_supported(Q, [1])
    with pytest.raises(TypeError, match="`q` must be a dense tensor, got layout sparse_coo"):
        is_supported(Q.to_sparse(), V)


@pytest.mark.parametrize("switch", [config.DISABLE, config.DEBUG, config.FALLBACK, config.KDA_MIN_CTAS])
def test_a_word_that_is_none_raises_in_the_question_as_in_the_call(switch, monkeypatch):
    monkeypatch.setenv(switch.name, "loud")
    x = make_inputs(T=8, H=1, K=16, V=16, beta="raw")
    with pytest.raises(ValueError, match=f"{switch.name} must be .*, got 'loud'"):
        chunk_kda(**x)
    with pytest.raises(ValueError, match=f"{switch.name} must be .*, got 'loud'"):
        is_supported(x["q"], x["v"])


@pytest.mark.parametrize("backend", ["sm90", "fla"])
def test_is_supported_answers_under_a_backend_that_cannot_serve(backend, monkeypatch):
    monkeypatch.setenv(config.KDA_BACKEND.name, backend)
    served, reason = is_supported(Q, V)
    assert not served
    assert f"KERNEL_FUN_KDA_BACKEND={backend} cannot serve" in reason


def test_a_misspelt_parameter_is_named_and_not_called_missing():
    with pytest.raises(TypeError, match="unexpected keyword argument 'a_log'"):
        chunk_kda(Q, Q, V, Q, Q[..., 0], use_gate_in_kernel=True, a_log=torch.zeros(2))


def test_meta_and_sparse_tensors_are_refused():
    with pytest.raises(ValueError, match="`q` must hold data, got a tensor on the meta device"):
        chunk_kda(*(x.to("meta") for x in (Q, Q, V, Q, Q[..., 0])))
    with pytest.raises(TypeError, match="`q` must be a dense tensor"):
        chunk_kda(Q.to_sparse(), Q, V, Q, Q[..., 0])


@pytest.mark.parametrize("setting", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_warmup_in_any_grad_mode(setting):
    with setting():
        assert warmup(**SMALL) > 0


@pytest.mark.parametrize("dtype", [torch.int32, "bfloat16"])
def test_warmup_names_a_wrong_dtype(dtype):
    with pytest.raises(TypeError, match=r"`dtype` must be a floating-point torch.dtype, got"):
        warmup(**{**SMALL, "dtype": dtype})
