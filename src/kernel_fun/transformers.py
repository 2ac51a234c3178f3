"""The KDA layers of transformers (KimiLinear, GLM-5.3-Flash) on our kernels.

    import kernel_fun.transformers
    kernel_fun.transformers.patch(model)                      # this model
    kernel_fun.transformers.patch(KimiLinearForCausalLM)      # every model built from now on

A patched layer has the same parameters, cache and mathematics. It differs in what it runs: one causal
convolution over q, k and v, and ``chunk_kda`` or ``fused_recurrent_kda`` with gate, norm and sigmoid inside;
padding is removed by packing, and boundaries of packed sequences (``cu_seqlens``, or ``cu_seq_lens_q`` of the
flattening collator of transformers) reach both.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from kernel_fun._common import support
from kernel_fun.cconv import causal_conv1d, causal_conv1d_update
from kernel_fun.kda import chunk_kda, fused_recurrent_kda

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Patch", "patch"]

LAYERS = {
    "KimiLinearDeltaAttention": "transformers.models.kimi_linear.modeling_kimi_linear",
    "Glm5NextTextLinearAttention": "transformers.models.glm5_next.modeling_glm5_next",
}
"""KDA layers of transformers, and where they are defined."""

PARAMETERS = ("self", "hidden_states", "cache", "attention_mask")
"""What the forward of a layer takes in the versions tested."""
TESTED = ("5.24.0",)


@dataclass
class Patch:
    """What :func:`patch` changed. A context manager: leaving it undoes the patch."""

    layers: tuple[str, ...]
    """Names of the layers of a model, or of the layer class for a model class."""
    _undo: list[Any]

    def undo(self) -> None:
        """The layers are transformers' own again; models built from a patched class stay as they are."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch(target: nn.Module | type[nn.Module]) -> Patch:
    """Run the KDA layers of a model, or of every model built from a class, on our kernels.

    Args:
        target: A model: the class of each of its KDA layers becomes a subclass with our forward; parameters,
            hooks, names and state dict stay. Or a model class (or layer class) of KimiLinear or glm5_next: it
            is given our layer by transformers' own replacement of classes (``register_patch_mapping``),
            for ``from_pretrained``, ``from_config`` and direct construction. Patch before wrapping (FSDP,
            accelerate's device maps).

    Returns:
        A :class:`Patch`, to look at or undo. Patching what is patched changes nothing.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: the installed transformers has no such layers, or others than were tested.
        TypeError, ValueError: the target has no KDA layer, or one that is already wrapped or of another form.
    """
    if not support.module_found("transformers"):
        raise ImportError("kernel_fun.transformers needs transformers >= 5.24 (pip install transformers)")
    if isinstance(target, torch.nn.Module):
        return _patch_model(target)
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        return _patch_class(target)
    given = f"class {target.__name__}" if isinstance(target, type) else type(target).__name__
    raise TypeError(f"`target` must be a model or a model class, got {given}")


def __getattr__(name: str) -> Any:
    """Our subclass of a layer, by the layer's name; it is made when it is asked for (also by pickle)."""
    if name in LAYERS:
        return _subclass(_layer_class(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _patch_model(model: nn.Module) -> Patch:
    names: list[str] = []
    undo: list[Any] = []
    found = 0
    for name, module in model.named_modules():
        original = next((c for c in type(module).__mro__ if _is_layer(c)), None)
        if original is None:
            continue
        found += 1
        ours = _subclass(original)
        if type(module) is ours:
            continue
        if type(module) is not original or "forward" in vars(module):
            raise ValueError(
                f"`target` must not be wrapped before it is patched, got {type(module).__name__} at {name!r}"
            )
        _check(name, module)
        module.__class__ = ours
        names.append(name)
        undo.append(lambda module=module, original=original: setattr(module, "__class__", original))
    if not found:
        raise ValueError(
            f"`target` must be a model with KDA layers of transformers ({', '.join(LAYERS)}), "
            f"got {type(model).__name__} without any"
        )
    support.log.info(f"kernel-fun: {len(names)} KDA layers of {type(model).__name__} patched")
    return Patch(tuple(names), undo)


def _patch_class(model_class: type[nn.Module]) -> Patch:
    name = next((n for n, module in LAYERS.items() if model_class.__module__ == module), None)
    if name is None:
        raise TypeError(
            f"`target` must be a model class of {' or '.join(m.split('.')[2] for m in LAYERS.values())}, "
            f"got {model_class.__module__}.{model_class.__name__}"
        )
    patching = importlib.import_module("transformers.monkey_patching")
    ours = _subclass(_layer_class(name))
    if patching.get_patch_mapping().get(name) is ours:
        return Patch((), [])
    patching.register_patch_mapping({name: ours})
    # the mapping alone reaches from_pretrained and from_config; held open it reaches every construction
    held = patching.apply_patches()
    held.__enter__()

    def undo() -> None:
        patching.unregister_patch_mapping([name])
        held.__exit__(None, None, None)

    support.log.info(f"kernel-fun: {name} patched in every model built from now on")
    return Patch((name,), [undo])


def _is_layer(c: type) -> bool:
    return LAYERS.get(c.__name__) == c.__module__


def _layer_class(name: str) -> type[nn.Module]:
    """transformers' layer class; RuntimeError where it is absent or takes other arguments."""
    version = support.version_of("transformers")
    modeling: Any = None
    try:
        modeling = importlib.import_module(LAYERS[name])
        layer = vars(modeling)[name]
    except (ImportError, KeyError):
        raise RuntimeError(
            f"transformers {version} has no {name} (tested: {', '.join(TESTED)}; needed: 5.24 or newer)"
        ) from None
    if layer.__module__ == __name__:  # ours stands there while a class is patched
        layer = layer.__mro__[1]
    given = tuple(inspect.signature(layer.forward).parameters)[: len(PARAMETERS)]
    if given != PARAMETERS:
        raise RuntimeError(
            f"{name}.forward of transformers {version} takes {given}, tested was {PARAMETERS} "
            f"(versions: {', '.join(TESTED)})"
        )
    return layer


@lru_cache(maxsize=8)
def _subclass(layer: Any) -> Any:
    """The layer with our forward."""
    hooks = importlib.import_module("transformers.integrations.accelerate").force_accelerate_hooks
    renamed = importlib.import_module("transformers.utils.deprecation").deprecate_kwarg
    run = hooks(["conv1d", "forget_gate"])(forward)
    run = renamed("cache_params", "5.40.0", new_name="cache")(run)
    members = {"forward": run, "__module__": __name__, "__doc__": f"{layer.__name__} on kernel-fun."}
    return type(layer.__name__, (layer,), members)


def _check(name: str, layer: Any) -> None:
    """ValueError where a layer is not of the form we compute."""
    if layer.activation not in ("silu", "swish"):
        raise ValueError(f"`target` must have silu convolutions, got {layer.activation!r} at {name!r}")


def forward(
    self: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """A KDA layer of transformers.

    Args:
        hidden_states: ``[B, T, hidden]``.
        cache: transformers' cache, read and updated, or None.
        attention_mask: ``[B, T]``, 0 at padding, or None. Padding is removed by packing, so it changes no
            state; its rows of the output are 0. Under torch.compile, where a number of tokens that
            depends on values would break the graph, it is set to zero instead, as transformers does.
        **kwargs: ``cu_seqlens`` or ``cu_seq_lens_q``: boundaries of packed sequences, with B = 1.
            transformers does not pass ``position_ids`` here: they separate nothing.

    Returns:
        ``[B, T, hidden]``.

    Raises:
        ValueError: ``attention_mask`` has another shape.
    """
    B, T = hidden_states.shape[:2]
    x, kept, cu_seqlens = _tokens(hidden_states, attention_mask, kwargs)
    conv_state = state = None
    if cache is not None:
        conv_state, state = cache.get_conv_state(self.layer_idx), cache.get_recurrent_state(self.layer_idx)
    recording = torch.is_grad_enabled() or torch.compiler.is_compiling()
    step = T == 1 and cu_seqlens is None and conv_state is not None and not recording

    qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
    qkv = _convolved(self, qkv, cache, conv_state, cu_seqlens, step)
    q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in qkv.chunk(3, -1))
    gate = self.forget_gate
    o, state = (fused_recurrent_kda if step else chunk_kda)(
        q=q,
        k=k,
        v=v,
        g=gate.f_b_proj(gate.f_a_proj(x)).unflatten(-1, (-1, self.head_dim)),
        beta=self.b_proj(x),
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
        initial_state=state,
        output_final_state=cache is not None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=getattr(gate, "safe_gate_lower_bound", None),
        cu_seqlens=cu_seqlens,
    )
    if cache is not None:
        cache.update_recurrent_state(state, self.layer_idx)

    out_gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (-1, self.head_dim))
    y = self.o_proj(self.o_norm(o, out_gate).flatten(-2))
    if kept is None:
        return y
    whole = y.new_zeros(B * T, y.shape[-1])
    return whole.index_copy(0, kept, y[0]).unflatten(0, (B, T))


def _tokens(
    hidden_states: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(the tokens to compute, the rows they come from or None for all, boundaries of packed sequences)."""
    cu_seqlens = kwargs.get("cu_seqlens")
    if cu_seqlens is None:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
    if mask is None:
        return hidden_states, None, cu_seqlens
    if mask.shape != hidden_states.shape[:2]:
        B, T = hidden_states.shape[:2]
        raise ValueError(f"`attention_mask` must have shape [B, T] = {[B, T]}, got {list(mask.shape)}")
    if cu_seqlens is not None or torch.compiler.is_compiling():
        return hidden_states * mask[:, :, None].to(hidden_states.dtype), None, cu_seqlens
    kept, boundaries = packing(mask)
    if kept.numel() == mask.numel():  # nothing is padding
        return hidden_states, None, None
    return hidden_states.flatten(0, 1)[kept][None], kept, boundaries


def _convolved(
    layer: Any, qkv: Tensor, cache: Any, state: Tensor | None, cu_seqlens: Tensor | None, step: bool
) -> Tensor:
    """The short convolution of all channels; its state moves on in the cache."""
    weight = layer.conv1d.weight.squeeze(1)
    W = weight.shape[1]
    if step and state is not None:
        return causal_conv1d_update(qkv, state, None, weight, layer.conv1d.bias, "silu")[0]
    y, final_state = causal_conv1d(
        qkv,
        weight,
        layer.conv1d.bias,
        initial_state=None if state is None else state[..., -W:],
        output_final_state=cache is not None,
        activation="silu",
        cu_seqlens=cu_seqlens,
    )
    if cache is not None:
        cache.update_conv_state(final_state, layer.layer_idx, conv_kernel_size=W)
    return y


def packing(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(rows that are no padding ``[tokens]``, boundaries of the sequences without it ``[B + 1]``)."""
    present = mask != 0
    lengths = present.sum(1, dtype=torch.int64)
    return present.flatten().nonzero().squeeze(1), torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
