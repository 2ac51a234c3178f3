"""Context parallel: which tokens of one packed batch each rank of a process group holds.

The packed batch of T tokens is cut into *slots* of equal length: one per rank (``contiguous``, rank r holds
slot r) or two (``zigzag``, rank r of R holds slots r and 2R-1-r, in this order). A *piece* is a slot as its
rank holds it: consecutive rows of the local buffer. A sequence may lie in many slots; in each it is a local
sequence. Chunks start anew at every piece.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_fun._common import check
from kernel_fun._common.check import ContractError, ContractTypeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

LAYOUTS = ("contiguous", "zigzag")


@dataclass(eq=False, frozen=True)
class ContextParallel:
    """What one rank knows of the partition; made by :func:`build_cp_context`.

    The fields up to ``pre_num_conv_tokens_by_part`` have the names and meanings of fla's ``FLACPContext``, so
    that fla's operations take this context too, as those of kernel-fun take fla's.
    """

    group: ProcessGroup | None
    cu_seqlens: Tensor
    """``[N + 1]`` int32, boundaries of the local sequences, on the device of the global ones."""
    cu_seqlens_cpu: Tensor
    layout: str = "contiguous"
    conv1d_kernel_size: int | None = None
    is_first_rank: bool | None = None
    """The first local sequence begins here (contiguous; zigzag has a pair, front and back piece)."""
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    """Slots before this one that hold earlier tokens of its first sequence."""
    post_num_ranks: int | None = None
    pre_num_conv_tokens: int | None = None
    """Tokens of the first sequence that lie before this slot."""
    pre_num_ranks_dev: Tensor | None = None
    post_num_ranks_dev: Tensor | None = None
    part_len: int | None = None
    front_num_seqs: int | None = None
    pre_num_ranks_by_part: tuple[int, ...] | None = None
    post_num_ranks_by_part: tuple[int, ...] | None = None
    is_first_by_part: tuple[bool, ...] | None = None
    is_last_by_part: tuple[bool, ...] | None = None
    pre_num_conv_tokens_by_part: tuple[int, ...] | None = None

    sequences: tuple[int, ...] = ()
    """Of each local sequence, its number in the global ``cu_seqlens``."""
    token_ranges: tuple[tuple[int, int], ...] = ()
    """Global tokens ``[start, stop)`` of each piece, in the order of the local buffer."""
    tokens: int = 0
    """Of the whole packed batch."""
    reduce_gradients: bool = False
    """Sum the gradients of A_log and dt_bias (of a convolution: weight and bias) over the group."""
    fingerprint: int = 0
    """Of what all ranks must agree on; 0: unknown."""
    bounds: tuple[int, ...] = ()
    """Boundaries of the local sequences: ``cu_seqlens`` as it was made."""

    @property
    def num_seqs(self) -> int:
        """Local sequences."""
        return self.cu_seqlens.numel() - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None

    def copy_for_backward(self) -> ContextParallel:
        """The same context with its own tensors."""
        return replace(self, cu_seqlens=self.cu_seqlens.clone(), cu_seqlens_cpu=self.cu_seqlens_cpu.clone())

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor that holds the whole packed batch along ``dim``.

        Raises:
            ValueError: it does not have such a dimension, or not as many tokens along it.
            TypeError: no tensor.
        """
        import torch

        check.is_tensor("x", x)
        if not -x.dim() <= dim < x.dim():
            raise ContractError(
                f"`x` must have a dimension {dim} that holds the tokens, got shape {list(x.shape)}: give the "
                "one that does as `dim`"
            )
        if x.shape[dim] != self.tokens:
            raise ContractError(
                f"`x` must hold the {self.tokens} tokens of the packed batch along dim {dim}, "
                f"got shape {list(x.shape)}"
            )
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.token_ranges], dim)


def build_cp_context(
    cu_seqlens: Tensor,
    group: ProcessGroup,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    *,
    reduce_gradients: bool = False,
) -> ContextParallel:
    """Cut one packed batch over the ranks of a process group.

    Takes the arguments of ``fla.ops.cp.build_cp_context`` of fla-core 0.6.0. Nothing is communicated, and
    nothing is remembered between calls.

    Args:
        cu_seqlens: ``[N + 1]`` int32 or int64 boundaries of the *global* packed batch, the same on every
            rank. Sequences may be empty; each belongs to the rank that holds its position.
        group: Ranks in the order of the tokens; of a device mesh, ``mesh["cp"].get_group()``.
        conv1d_kernel_size: Taps of the model's short convolution. fla's convolution needs them; ours reads
            them where a rank must tell the others that its call came without a weight.
        cu_seqlens_cpu: The same boundaries on the CPU; spares a wait for the device.
        use_tf32x3_affine_chain: Accepted as True only, as in fla.
        layout: ``"contiguous"``: rank r of R holds the r-th part of R. ``"zigzag"``: rank r holds the parts r
            and 2R-1-r of 2R, in this order, which balances causal attention layers of the same model.
        reduce_gradients: Sum the gradients of parameters that every rank holds a copy of (A_log, dt_bias; a
            convolution's weight and bias) over the group in each backward. Leave it off where the trainer
            reduces gradients over these ranks itself, as FSDP and DDP do.

    Returns:
        The context of this rank, for ``chunk_kda(..., cp_context=)`` and ``causal_conv1d(..., cp_context=)``.

    Raises:
        ValueError: the number of tokens is not a positive multiple of the ranks (zigzag: twice the ranks),
            the boundaries are none, an unknown layout, or this process is not in the group.
        TypeError: an argument of another type.
    """
    cu = check.is_tensor("cu_seqlens", cu_seqlens)
    host = cu if cu_seqlens_cpu is None else check.is_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
    for name, tensor in (("cu_seqlens", cu), ("cu_seqlens_cpu", host)):
        _boundary_tensor(name, tensor)
        check.holds_data(name, tensor)
    if host.shape != cu.shape:
        raise ContractError(
            f"`cu_seqlens_cpu` must have the shape of `cu_seqlens`, {list(cu.shape)}, got {list(host.shape)}"
        )
    if host is not cu and cu.device.type == "cpu" and host.tolist() != cu.tolist():
        raise ContractError("`cu_seqlens_cpu` must hold the values of `cu_seqlens`, got others")
    if use_tf32x3_affine_chain is not True:
        raise ContractError("`use_tf32x3_affine_chain` must be True, got False: summaries are never narrowed")
    reduces = check.flag("reduce_gradients", reduce_gradients)
    taps = conv1d_kernel_size
    if taps is not None and (isinstance(taps, bool) or not isinstance(taps, int)):
        raise ContractTypeError(f"`conv1d_kernel_size` must be an int or None, got {type(taps).__name__}")
    if taps is not None and taps < 1:
        raise ContractError(f"`conv1d_kernel_size` must be at least 1, got {taps}")
    if layout not in LAYOUTS:
        raise ContractError(f"`layout` must be 'contiguous' or 'zigzag', got {layout!r}")
    rank, ranks = _membership("group", group)
    bounds: list[int] = host.tolist()
    check.boundaries("cu_seqlens", bounds, bounds[-1])
    parts = LAYOUTS.index(layout) + 1
    if bounds[-1] < 1 or bounds[-1] % (parts * ranks):
        whose = "world_size" if parts == 1 else "2 * world_size"
        raise ContractError(
            f"`cu_seqlens` must end at a number of tokens that is positive and divisible by {whose} = "
            f"{parts * ranks}, got {bounds[-1]}: pad the batch"
        )
    slots = (rank, 2 * ranks - 1 - rank)[:parts]
    shares = [_share(bounds, slot, parts * ranks) for slot in slots]
    fingerprint = zlib.crc32(repr((bounds, layout, reduces)).encode()) or 1
    return replace(
        _context(cu, group, layout, shares),
        conv1d_kernel_size=conv1d_kernel_size,
        tokens=bounds[-1],
        reduce_gradients=reduces,
        fingerprint=fingerprint,
    )


class _Share(NamedTuple):
    """One slot of the global batch."""

    slot: int
    start: int
    stop: int
    sequences: range
    """Global sequences with a token here, and the empty ones."""
    cu: list[int]
    """Boundaries of these, from the slot's start."""
    pre: int
    post: int
    before: int
    """Tokens of the first sequence before the slot."""


def _share(bounds: list[int], slot: int, slots: int) -> _Share:
    size = bounds[-1] // slots
    start, stop = slot * size, (slot + 1) * size

    def here(n: int) -> bool:
        first, last = bounds[n], bounds[n + 1]
        if first == last:
            return start <= first < stop or (first == stop == bounds[-1])
        return first < stop and last > start

    members = [n for n in range(len(bounds) - 1) if here(n)]
    first, last = bounds[members[0]], bounds[members[-1] + 1]
    return _Share(
        slot,
        start,
        stop,
        range(members[0], members[-1] + 1),
        [min(max(b, start), stop) - start for b in bounds[members[0] : members[-1] + 2]],
        pre=slot - first // size if first < start else 0,
        post=(last - 1) // size - slot if last > stop else 0,
        before=max(0, start - first),
    )


def _context(cu: Tensor, group: ProcessGroup, layout: str, shares: list[_Share]) -> ContextParallel:
    import torch

    size = shares[0].stop - shares[0].start
    local = list(shares[0].cu)
    for share in shares[1:]:
        local += [b + size for b in share.cu[1:]]
    on_cpu = torch.tensor(local, dtype=torch.int32)
    context = ContextParallel(
        group,
        on_cpu.to(cu.device, non_blocking=True),
        on_cpu,
        layout,
        sequences=tuple(n for share in shares for n in share.sequences),
        token_ranges=tuple((share.start, share.stop) for share in shares),
        bounds=tuple(local),
    )
    pre, post = tuple(s.pre for s in shares), tuple(s.post for s in shares)
    before = tuple(s.before for s in shares)
    if layout == "contiguous":
        return replace(
            context,
            is_first_rank=pre[0] == 0,
            is_last_rank=post[0] == 0,
            pre_num_ranks=pre[0],
            post_num_ranks=post[0],
            pre_num_conv_tokens=before[0],
        )
    return replace(
        context,
        part_len=size,
        front_num_seqs=len(shares[0].sequences),
        pre_num_ranks_by_part=pre,
        post_num_ranks_by_part=post,
        is_first_by_part=tuple(n == 0 for n in pre),
        is_last_by_part=tuple(n == 0 for n in post),
        pre_num_conv_tokens_by_part=before,
    )


class Piece(NamedTuple):
    """One slot as its rank holds it."""

    slot: int
    """Its place in the order of the tokens."""
    first: int
    """Its first and last local sequence."""
    last: int
    pre: int
    """Slots before it that hold earlier tokens of its first sequence."""
    post: int
    """Slots after it that hold later tokens of its last sequence."""

    @property
    def passes_through(self) -> bool:
        """One sequence fills it, begun before and ending after: what a slot does to a state is then a map."""
        return self.first == self.last and self.pre > 0 and self.post > 0


class Split(NamedTuple):
    """A context, of kernel-fun or of fla, as the operations read it."""

    group: Any
    rank: int
    ranks: int
    bounds: tuple[int, ...]
    """Boundaries of the local sequences."""
    pieces: tuple[Piece, ...]
    reduce_gradients: bool
    fingerprint: int

    @property
    def place(self) -> tuple[Any, ...]:
        """All of it but the group."""
        return self[1:]

    @property
    def one_each(self) -> bool:
        """Every piece is one local sequence: where it begins and ends is known without the boundaries."""
        return len(self.bounds) - 1 == len(self.pieces)

    def rows(self, sequence: int) -> tuple[int, int]:
        return self.bounds[sequence], self.bounds[sequence + 1]

    @property
    def piece_rows(self) -> int:
        """Rows of every piece."""
        return self.bounds[-1] // len(self.pieces)

    def home(self, slot: int) -> tuple[int, int]:
        """The rank that holds a slot, and which of its pieces it is."""
        return (slot, 0) if slot < self.ranks else (2 * self.ranks - 1 - slot, 1)

    def begun_elsewhere(self) -> list[int]:
        """Local sequences whose first token another piece holds."""
        return [p.first for p in self.pieces if p.pre]

    def ended_elsewhere(self) -> list[int]:
        """Local sequences whose last token another piece holds."""
        return [p.last for p in self.pieces if p.post]


def read(context: Any) -> Split | None:
    """A context as the operations read it; None where it has no group: then it only packs sequences.

    Raises ContractError or ContractTypeError for what is no context, or one of a group this process is not
    in. What is raised here follows from the context alone. A context of ours is read once, while its group
    exists.
    """
    if not isinstance(context, ContextParallel) or getattr(context, "cu_seqlens", None) is None:
        return _read(context)
    cu = context.cu_seqlens
    version = 0 if cu.is_inference() else cu._version
    split, read_at = _splits.get(context, (None, version))
    if context.bounds:
        now = [x.tolist() for x in (context.cu_seqlens_cpu, cu) if x.device.type == "cpu"]
        other = [x for x in now if tuple(x) != context.bounds] or ["others since"] * (version != read_at)
        if other:
            built = f"the boundaries it was built with, {list(context.bounds)}, got {other[0]}"
            raise ContractError(f"`cp_context` must have {built}: build another one")
    if split is not None:
        _membership("cp_context.group", split.group)  # it may be gone
        return split
    split = _read(context)
    if split is not None:
        _splits[context] = split, version
    return split


_splits: weakref.WeakKeyDictionary[ContextParallel, tuple[Split, int]] = weakref.WeakKeyDictionary()
"""Of contexts that were read before, with the version that ``cu_seqlens`` had. Their fields do not change."""


def _read(context: Any) -> Split | None:
    for name in ("group", "cu_seqlens"):
        if not hasattr(context, name):
            raise ContractTypeError(
                "`cp_context` must be a context of kernel_fun.kda.build_cp_context or of fla, "
                f"got {type(context).__name__} without `{name}`"
            )
    if context.cu_seqlens is None:
        raise ContractError(
            "cu_seqlens is required for CP: `cp_context.cu_seqlens` must be a tensor, got None"
        )
    cu = check.is_tensor("cp_context.cu_seqlens", context.cu_seqlens)
    _boundary_tensor("cp_context.cu_seqlens", cu)
    check.holds_data("cp_context.cu_seqlens", cu)
    if context.group is None:
        return None
    rank, ranks = _membership("cp_context.group", context.group)
    host = getattr(context, "cu_seqlens_cpu", None)
    bounds: tuple[int, ...] = tuple((cu if host is None else host).tolist())
    check.boundaries("cp_context.cu_seqlens", list(bounds), bounds[-1])
    split = Split(
        context.group,
        rank,
        ranks,
        bounds,
        tuple(_pieces(context, rank, ranks, len(bounds) - 1)),
        bool(getattr(context, "reduce_gradients", False)),
        int(getattr(context, "fingerprint", 0)),
    )
    _consistent(split)
    return split


def _pieces(context: Any, rank: int, ranks: int, N: int) -> list[Piece]:
    layout = getattr(context, "layout", "contiguous")
    if layout == "contiguous":
        known = (context.pre_num_ranks, context.post_num_ranks)
        if None in known:
            raise ContractError(
                "`cp_context` must hold `pre_num_ranks` and `post_num_ranks`, got None: build it for a rank"
            )
        return [Piece(rank, 0, N - 1, *known)]
    if layout != "zigzag":
        raise ContractError(f"`cp_context.layout` must be 'contiguous' or 'zigzag', got {layout!r}")
    front, pre, post = context.front_num_seqs, context.pre_num_ranks_by_part, context.post_num_ranks_by_part
    if None in (front, pre, post):
        raise ContractError(
            "`cp_context` of layout zigzag must hold `front_num_seqs`, `pre_num_ranks_by_part` and "
            "`post_num_ranks_by_part`, got None"
        )
    return [
        Piece(rank, 0, front - 1, pre[0], post[0]),
        Piece(2 * ranks - 1 - rank, front, N - 1, pre[1], post[1]),
    ]


def _consistent(split: Split) -> None:
    """A context must describe slots of its group: pieces of one length, each with a sequence."""
    slots = split.ranks * len(split.pieces)
    for piece in split.pieces:
        inside = 0 <= piece.pre <= piece.slot and 0 <= piece.post <= slots - 1 - piece.slot
        if not inside or not 0 <= piece.first <= piece.last < len(split.bounds) - 1:
            raise ContractError(
                f"`cp_context` must describe rank {split.rank} of {split.ranks} in its group, "
                f"got one that reaches {piece.pre} slots before and {piece.post} after slot {piece.slot}"
            )
    if len(split.pieces) == 2 and 2 * split.bounds[split.pieces[1].first] != split.bounds[-1]:
        raise ContractError("`cp_context` of layout zigzag must hold two pieces of equal length, got others")


def check_local(split: Split, name: str, x: Tensor, initial_state: Any) -> None:
    """The tensors of a call must be this rank's part, no more: a whole batch would pass for a padded one."""
    rows, tokens = x.shape[:2]
    if rows != 1:
        raise ContractError(
            f"`{name}` must have batch size 1 with `cp_context`, got {rows}: flatten the sequences into one "
            "row and give build_cp_context their boundaries"
        )
    if tokens != split.bounds[-1]:
        raise ContractError(
            f"`{name}` must hold this rank's T = {split.bounds[-1]} tokens of the packed batch that "
            f"`cp_context` cuts (context.shard), got {tokens}"
        )
    N = len(split.bounds) - 1
    if initial_state is not None and check.is_tensor("initial_state", initial_state).shape[:1] != (N,):
        raise ContractError(
            f"`initial_state` must have a row for each of the {N} local sequences of `cp_context` "
            f"(context.sequences are their global numbers), got shape {list(initial_state.shape)}"
        )


def local_boundaries(context: Any, device: torch.device, split: Split | None = None) -> tuple[Tensor, Tensor]:
    """Boundaries of the local sequences, on a device and on the CPU. ``split``: the context as it is read, of
    an operation that has no need of them where every piece is one sequence: then they stay on the CPU."""
    cu = context.cu_seqlens
    on_cpu = getattr(context, "cu_seqlens_cpu", None)
    on_cpu = cu.cpu() if on_cpu is None else on_cpu
    if split is not None and split.one_each:
        return on_cpu, on_cpu
    if cu.device.type == "cpu" and device.type == "cuda" and not _captures():
        return cu.pin_memory().to(device, non_blocking=True), on_cpu  # the host need not wait
    return cu.to(device), on_cpu


def _captures() -> bool:
    """Whether a CUDA graph is being captured, which would copy from the host's memory at each replay."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def _boundary_tensor(name: str, cu: Tensor) -> None:
    import torch

    check.dtype(name, cu, (torch.int64, torch.int32))
    if cu.dim() != 1 or cu.numel() < 2:
        raise ContractError(f"`{name}` must have shape [N+1] with N >= 1, got {list(cu.shape)}")


def _membership(name: str, group: Any) -> tuple[int, int]:
    """This process's rank in a group, and the ranks it has."""
    import torch.distributed as dist

    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        outside = dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER
        given = "one it is not in" if outside else type(group).__name__
        raise ContractTypeError(
            f"`{name}` must be a torch.distributed process group this process is in "
            f"(of a mesh: mesh['cp'].get_group()), got {given}"
        )
    try:
        return dist.get_rank(group), dist.get_world_size(group)
    except (ValueError, RuntimeError) as error:
        raise ContractError(
            f"`{name}` must be a process group that exists, got one that was destroyed"
        ) from error
