"""Deformable convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from opzoo.ops._common import _autocast_enabled, pair, require_tensor
from opzoo.ops._deform_checks import check_branch, check_halves
from opzoo.ops._deform_derivatives import _deform_conv2d
from opzoo.ops.matmul import _torch_precision

if TYPE_CHECKING:
    from typing_extensions import Self

Pair = int | Sequence[int]


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Convolve with taps that are moved by ``offset`` and scaled by ``mask``.

    Every tap (i, j) of every output pixel samples the input bilinearly at its regular place plus its
    own (dy, dx). Without ``mask`` this is Deformable ConvNets (https://arxiv.org/abs/1703.06211), with
    it Deformable ConvNets v2 (https://arxiv.org/abs/1811.11168).

    Args:
        input: ``Tensor[N, C, H, W]``, float64, float32, float16 or bfloat16.
        offset: ``Tensor[N, 2*D*kh*kw, OH, OW]`` in input pixels, any of these dtypes. Channel
            ``2*((d*kh + i)*kw + j)`` is dy of tap (i, j) in offset group d, the next one its dx. D
            follows from the shape and divides C.
        weight: ``Tensor[K, C/G, kh, kw]`` with input's dtype; the number of groups G follows from it.
        bias: ``Tensor[K]`` with input's dtype.
        stride: step between output pixels, in input pixels: one int, or (vertical, horizontal).
        padding: zeros around the input, likewise.
        dilation: step between taps, likewise.
        mask: ``Tensor[N, D*kh*kw, OH, OW]`` of any float dtype; each sample is multiplied with its value.

    Returns:
        ``Tensor[N, K, OH, OW]`` with input's dtype, channels_last when input is, where
        ``OH = (H + 2*padding - dilation*(kh - 1) - 1) // stride + 1`` and OW alike.

    Raises:
        TypeError: an argument is no tensor or no pair of ints.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device, or the input has no
            channels or pixels.
        ValueError: a stride, padding or dilation is out of range, or the output would be empty.

    Pixels outside the map are zero. A sample at or beyond -1 or the size is zero with derivative zero,
    the rule of the original implementation and mmcv; torchvision differs in the derivative exactly at
    -1. An infinite offset samples zero, a NaN offset gives NaN.

    Coordinates, interpolation and sums are float32 (float64 for float64 input) whatever the dtypes;
    float32 products on CUDA are TF32 where ``torch.backends.cuda.matmul.fp32_precision`` permits it.
    Under autocast ``input``, ``weight`` and ``bias`` are cast to autocast's dtype, which the output
    has; ``offset`` and ``mask`` are used as given. (torchvision computes in float32 there; for that call it
    inside ``with torch.autocast(device_type, enabled=False)``, on ``input.float()`` where input is half.)
    Differentiable in reverse mode, by all five tensors, any number of times with ``create_graph=True`` (the
    reference then takes the place of the kernels: right, and slow); ``torch.func.grad`` of ``torch.func.grad``
    and forward mode raise. vmap-able. Deterministic but for
    the gradient of ``input`` on CUDA, which sums in a varying order and raises under
    :func:`torch.use_deterministic_algorithms`. On the CPU the last bits depend on the number of threads,
    as those of torch's matrix products do.

    Example:
        >>> input, weight = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
        >>> offset = torch.zeros(1, 2 * 3 * 3, 2, 2)
        >>> opzoo.deform_conv2d(input, offset, weight)
        tensor([[[[9., 9.],
                  [9., 9.]]]])
    """
    for name, t in (("input", input), ("offset", offset), ("weight", weight)):
        require_tensor("deform_conv2d", name, t)
    for name, optional in (("bias", bias), ("mask", mask)):
        if optional is not None:
            require_tensor("deform_conv2d", name, optional)
    stride_h, stride_w = pair("deform_conv2d", "stride", stride)
    pad_h, pad_w = pair("deform_conv2d", "padding", padding)
    dilation_h, dilation_w = pair("deform_conv2d", "dilation", dilation)
    geometry = stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w
    return _deform_conv2d(input, offset, weight, bias, mask, *geometry, _precision_of(input))


class DeformConv2d(nn.Module):
    """:func:`deform_conv2d` with a weight and a bias of its own.

    Args:
        in_channels: channels C of the input.
        out_channels: channels K of the output.
        kernel_size: one int, or (height, width).
        stride: one int, or (vertical, horizontal).
        padding: likewise.
        dilation: likewise.
        groups: weight groups; divides both numbers of channels.
        bias: whether to add a learned bias.

    Parameters:
        weight: ``Tensor[K, C/groups, kh, kw]``, initialised as that of :class:`torch.nn.Conv2d`.
        bias: ``Tensor[K]`` or None, likewise.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        kernel = pair("deform_conv2d", "kernel_size", kernel_size)
        for name, value in (
            ("in_channels", in_channels),
            ("out_channels", out_channels),
            ("groups", groups),
            ("kernel_size", min(kernel)),
        ):
            if value < 1:
                raise ValueError(f"opzoo::deform_conv2d: {name} must be at least 1, got {value}")
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups != 0:
                raise ValueError(
                    f"opzoo::deform_conv2d: {name} must be divisible by groups, got {channels} and {groups}"
                )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel
        self.stride = pair("deform_conv2d", "stride", stride)
        self.padding = pair("deform_conv2d", "padding", padding)
        self.dilation = pair("deform_conv2d", "dilation", dilation)
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as :class:`torch.nn.Conv2d` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan_in = math.prod(self.weight.shape[1:])
            bound = 1 / math.sqrt(fan_in)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        """``Tensor[N, K, OH, OW]``; see :func:`deform_conv2d`."""
        return deform_conv2d(input, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, mask)

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        parts += [f"padding={self.padding}"] if self.padding != (0, 0) else []
        parts += [f"dilation={self.dilation}"] if self.dilation != (1, 1) else []
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        parts += ["bias=False"] if self.bias is None else []
        return ", ".join(parts)

    @classmethod
    def from_conv(cls, conv: nn.Conv2d) -> Self:
        """A module that continues where ``conv`` stands: its parameters, and with zero offsets its function.

        Args:
            conv: padded with zeros; ``padding="same"`` only where both sides get as much.

        Raises:
            ValueError: ``conv`` pads with something else, or more on one side.
        """
        return cls._from_conv(conv)

    @classmethod
    def _from_conv(cls, conv: nn.Conv2d, **options: Any) -> Self:
        module = cls(
            conv.in_channels,
            conv.out_channels,
            _two(conv.kernel_size),
            _two(conv.stride),
            _padding_of(conv),
            _two(conv.dilation),
            conv.groups,
            bias=conv.bias is not None,
            **options,
        ).to(conv.weight.device, conv.weight.dtype)
        module.weight = cast("nn.Parameter", conv.weight)
        module.bias = cast("nn.Parameter | None", conv.bias)
        return module.train(conv.training)


class DeformConv2dPack(DeformConv2d):
    """:class:`DeformConv2d` with an offset branch of its own, a convolution of the input.

    The branch starts at zero, so the module starts as an ordinary convolution. It runs outside autocast,
    in the dtype of its parameters: offsets are coordinates. The result has autocast's dtype all the same; for
    float32 call the module inside ``with torch.autocast(device_type, enabled=False)``. Parameters have mmcv's
    names.

    Args:
        in_channels: channels C of the input.
        out_channels: channels K of the output.
        kernel_size: one int, or (height, width).
        stride: one int, or (vertical, horizontal).
        padding: likewise.
        dilation: likewise.
        groups: weight groups; divides both numbers of channels.
        offset_groups: groups of input channels with offsets of their own; divides ``in_channels``.
        bias: whether to add a learned bias.

    Parameters:
        weight, bias: as of :class:`DeformConv2d`.
        conv_offset: :class:`torch.nn.Conv2d` of the same geometry, zero at first.
    """

    _maps = 2  # per tap: dy and dx

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        offset_groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        if offset_groups < 1 or in_channels % offset_groups != 0:
            raise ValueError(
                f"opzoo::deform_conv2d: in_channels must be divisible by offset_groups, got {in_channels} and "
                f"{offset_groups}"
            )
        self.offset_groups = offset_groups
        maps = self._maps * offset_groups * math.prod(self.kernel_size)
        self.conv_offset = nn.Conv2d(in_channels, maps, self.kernel_size, self.stride, self.padding, self.dilation)
        nn.init.zeros_(self.conv_offset.weight)
        assert self.conv_offset.bias is not None
        nn.init.zeros_(self.conv_offset.bias)

    def _branch(self, input: Tensor) -> Tensor:
        check_branch(input, self.conv_offset)
        with torch.autocast(input.device.type if _autocast_enabled(input.device.type) else "cpu", enabled=False):
            return cast("Tensor", self.conv_offset(input.to(self.conv_offset.weight.dtype)))

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        """``Tensor[N, K, OH, OW]`` of ``Tensor[N, C, H, W]``."""
        return super().forward(input, self._branch(input))

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, offset_groups: int = 1) -> Self:
        """A module that computes what ``conv`` does, until its offset branch has learned something.

        Args:
            conv: padded with zeros; its parameters become those of the module.
            offset_groups: groups of input channels with offsets of their own.
        """
        return cls._from_conv(conv, offset_groups=offset_groups)


class ModulatedDeformConv2dPack(DeformConv2dPack):
    """:class:`DeformConv2dPack` whose branch makes a mask as well, by a sigmoid: 0.5 at first, as in mmcv.

    Of the branch's channels the first two thirds are offsets, the last third is the mask.
    """

    _maps = 3

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        """``Tensor[N, K, OH, OW]`` of ``Tensor[N, C, H, W]``."""
        maps = self._branch(input)
        offset, mask = maps.split([maps.shape[1] // 3 * 2, maps.shape[1] // 3], dim=1)
        return DeformConv2d.forward(self, input, offset, mask.sigmoid())

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, offset_groups: int = 1) -> Self:
        """A module that computes what ``conv`` does, until its branch has learned something.

        Its weight is twice that of ``conv``, which the mask of 0.5 takes back exactly: a new parameter, so build
        the optimizer afterwards. Its bias is conv's own.

        Args:
            conv: padded with zeros.
            offset_groups: groups of input channels with offsets and masks of their own.
        """
        module = cls._from_conv(conv, offset_groups=offset_groups)
        module.weight = nn.Parameter(2 * conv.weight.detach(), conv.weight.requires_grad)
        return module


def make_offset(dy: Tensor, dx: Tensor) -> Tensor:
    """The offset tensor of :func:`deform_conv2d` from its two halves.

    Args:
        dy: ``Tensor[N, D*kh*kw, OH, OW]``, the vertical offset of each tap in input pixels, row by row of the
            kernel, offset group after offset group.
        dx: the horizontal one, of the same shape.

    Returns:
        ``Tensor[N, 2*D*kh*kw, OH, OW]``: dy and dx of the first tap, then of the second, and so on.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.

    Example:
        >>> opzoo.make_offset(torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1)).flatten()
        tensor([0., 1., 0., 1.])
    """
    check_halves(dy, dx)
    return torch.stack([dy, dx], 2).flatten(1, 2)


def _two(values: Sequence[int]) -> tuple[int, int]:
    return values[0], values[1]


def _padding_of(conv: nn.Conv2d) -> tuple[int, int]:
    """The zeros on each side, where that is what the convolution pads with."""
    if conv.padding_mode != "zeros":
        raise ValueError(f"opzoo::deform_conv2d: padding_mode of conv must be 'zeros', got {conv.padding_mode!r}")
    if not isinstance(conv.padding, str):
        return _two(conv.padding)
    room = [d * (k - 1) if conv.padding == "same" else 0 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if any(both % 2 for both in room):
        raise ValueError("opzoo::deform_conv2d: padding='same' of conv must be even, got more on one side")
    return room[0] // 2, room[1] // 2


def _precision_of(input: Tensor) -> int:
    """The operator's number for the precision of float32 products: torch's switch, where it matters."""
    if input.is_cuda and input.dtype == torch.float32:
        return _torch_precision()
    return 0
