"""A two-stage detector: backbone with a deformable convolution, proposals, a head on RoIAlign.

Every detection operator comes from ``ops``, a module with ``DeformConv2d``, ``RoIAlign``, ``nms`` and
``batched_nms``. Both ``opzoo`` and ``torchvision.ops`` are such modules, and weights move between them.

Shapes: ``N`` images, ``G`` ground truths, ``P`` proposals, ``C`` channels, ``K`` classes; class ``K`` is background.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from digits.boxes import anchor_grid, box_iou, clip, decode, encode
from digits.data import NUM_CLASSES

CHANNELS = 48
STRIDE = 4  # pixels per cell of the feature map that proposals and regions read
BETA = 1 / 9  # where the box loss turns from quadratic to linear


class Detections(NamedTuple):
    """What was found in one image, best first."""

    boxes: Tensor  # [D, 4]
    scores: Tensor  # [D]
    labels: Tensor  # int64 [D]


class AnchorOutput(NamedTuple):
    """What the proposal head says about the A anchors, which all images share."""

    objectness: Tensor  # logits [N, A]
    deltas: Tensor  # [N, A, 4]
    anchors: Tensor  # [A, 4]


def conv_bn(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """3x3 convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class DeformBlock(nn.Module):
    """Residual block whose 3x3 kernel chooses where to look (modulated deformable convolution).

    The branch that predicts offsets and mask starts at zero: at first the block is a plain convolution.
    """

    def __init__(self, channels: int, ops: ModuleType) -> None:
        super().__init__()
        self.offset_mask = nn.Conv2d(channels, 3 * 9, 3, padding=1)
        nn.init.zeros_(self.offset_mask.weight)
        nn.init.zeros_(self.offset_mask.bias)  # type: ignore[arg-type]
        self.conv = ops.DeformConv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """``Tensor[N, C, H, W]`` to the same shape."""
        offset, mask = self.offset_mask(x).split([18, 9], 1)  # (dy, dx) and a weight for each of the 9 taps
        return F.relu(x + self.norm(self.conv(x, offset, 2 * mask.sigmoid())))


class Backbone(nn.Module):
    """Features at stride 4, with context from stride 8 added."""

    def __init__(self, ops: ModuleType) -> None:
        super().__init__()
        self.to_stride4 = nn.Sequential(conv_bn(3, 24, 2), conv_bn(24, 48, 2), conv_bn(48, 48))
        self.to_stride8 = nn.Sequential(conv_bn(48, 48, 2), DeformBlock(48, ops))
        self.lateral = nn.Conv2d(48, CHANNELS, 1)
        self.top = nn.Conv2d(48, CHANNELS, 1)

    def forward(self, images: Tensor) -> Tensor:
        """``Tensor[N, 3, H, W]`` in 0..1 to ``Tensor[N, CHANNELS, H / 4, W / 4]``."""
        fine = self.to_stride4(images - 0.5)
        coarse = self.top(self.to_stride8(fine))
        return self.lateral(fine) + F.interpolate(coarse, size=fine.shape[-2:], mode="nearest")


class ProposalHead(nn.Module):
    """Region proposals: every anchor is scored and refined, the best survive NMS."""

    ANCHOR_HEIGHTS = (18.0, 26.0, 37.0)
    ANCHOR_ASPECT = 0.65
    BEFORE_NMS, AFTER_NMS, NMS_IOU = 200, 40, 0.7
    SAMPLES = 64  # anchors per image that enter the loss
    scale: Tensor

    def __init__(self, ops: ModuleType) -> None:
        super().__init__()
        self.nms = ops.nms
        count = len(self.ANCHOR_HEIGHTS)
        self.conv = conv_bn(CHANNELS, CHANNELS)
        self.objectness = nn.Conv2d(CHANNELS, count, 1)
        self.deltas = nn.Conv2d(CHANNELS, 4 * count, 1)
        self.register_buffer("scale", torch.tensor([5.0, 5.0, 4.0, 4.0]))

    def forward(self, features: Tensor) -> AnchorOutput:
        """Score and refine the anchors of ``Tensor[N, C, H, W]``."""
        x = self.conv(features)
        objectness = self.objectness(x).permute(0, 2, 3, 1).flatten(1)
        deltas = self.deltas(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4)
        anchors = anchor_grid(features, STRIDE, self.ANCHOR_HEIGHTS, self.ANCHOR_ASPECT)
        return AnchorOutput(objectness, deltas, anchors)

    @torch.no_grad()
    def proposals(self, output: AnchorOutput, height: int, width: int) -> list[Tensor]:
        """The boxes worth a second look, best first: ``Tensor[P, 4]`` per image."""
        found = []
        for score, delta in zip(output.objectness, output.deltas, strict=True):
            score, best = score.topk(min(self.BEFORE_NMS, len(score)))
            boxes = clip(decode(delta[best], output.anchors[best], self.scale), height, width)
            keep = self.nms(boxes, score, self.NMS_IOU)
            torch._check(keep.shape[0] > 0)  # the best box always stays, which torch.export cannot know
            found.append(boxes[keep[: self.AFTER_NMS]])
        return found

    def losses(self, output: AnchorOutput, truths: list[Tensor]) -> dict[str, Tensor]:
        """Objectness and box loss on a balanced sample of anchors; ``truths``: ``Tensor[G, 4]`` per image."""
        objectness_loss, box_loss = [], []
        for score, delta, truth in zip(output.objectness, output.deltas, truths, strict=True):
            iou = box_iou(output.anchors, truth)
            best, matched = iou.max(1)
            positive = best >= 0.6
            positive |= ((iou == iou.max(0).values) & (iou > 0.2)).any(1)  # every digit gets an anchor
            chosen, is_positive = sample(positive, (best < 0.3) & ~positive, self.SAMPLES, 0.5)
            objectness_loss.append(F.binary_cross_entropy_with_logits(score[chosen], is_positive.to(score.dtype)))
            chosen = chosen[is_positive]
            target = encode(truth[matched[chosen]], output.anchors[chosen], self.scale)
            box_loss.append(F.smooth_l1_loss(delta[chosen], target, reduction="sum", beta=BETA) / self.SAMPLES)
        return {"objectness": torch.stack(objectness_loss).mean(), "proposal box": torch.stack(box_loss).mean()}


class RegionHead(nn.Module):
    """Classify each proposal and refine its box, from features cut out by RoIAlign."""

    POOLED = 5
    SAMPLES = 32  # proposals per image that enter the loss
    SCORE, NMS_IOU, KEEP = 0.05, 0.4, 20
    scale: Tensor

    def __init__(self, ops: ModuleType) -> None:
        super().__init__()
        self.batched_nms = ops.batched_nms
        self.roi_align = ops.RoIAlign(self.POOLED, spatial_scale=1 / STRIDE, sampling_ratio=2, aligned=True)
        self.body = nn.Sequential(
            conv_bn(CHANNELS, CHANNELS),
            nn.Flatten(),
            nn.Linear(CHANNELS * self.POOLED**2, 128),
            nn.ReLU(inplace=True),
        )
        self.classes = nn.Linear(128, NUM_CLASSES + 1)
        self.deltas = nn.Linear(128, 4)
        self.register_buffer("scale", torch.tensor([10.0, 10.0, 5.0, 5.0]))

    def forward(self, features: Tensor, proposals: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Class logits ``Tensor[sum P, K + 1]`` and box deltas ``Tensor[sum P, 4]``."""
        x = self.body(self.roi_align(features, proposals))
        return self.classes(x), self.deltas(x)

    def losses(
        self, features: Tensor, proposals: list[Tensor], truths: list[Tensor], labels: list[Tensor]
    ) -> dict[str, Tensor]:
        """Class and box loss on a balanced sample of the proposals, to which the truths are added."""
        regions, classes, targets = [], [], []
        for boxes, truth, label in zip(proposals, truths, labels, strict=True):
            boxes = torch.cat([boxes, truth])
            best, matched = box_iou(boxes, truth).max(1)
            chosen, is_positive = sample(best >= 0.5, best < 0.5, self.SAMPLES, 0.5)
            boxes, matched = boxes[chosen], matched[chosen]
            regions.append(boxes)
            classes.append(torch.where(is_positive, label[matched], NUM_CLASSES))
            targets.append(encode(truth[matched], boxes, self.scale))
        logits, deltas = self(features, regions)
        target_class = torch.cat(classes)
        positive = target_class < NUM_CLASSES
        box_loss = F.smooth_l1_loss(deltas[positive], torch.cat(targets)[positive], reduction="sum", beta=BETA)
        return {"class": F.cross_entropy(logits, target_class), "box": box_loss / len(target_class)}

    def detections(self, logits: Tensor, deltas: Tensor, proposals: Tensor, height: int, width: int) -> Detections:
        """The final boxes of one image, from its rows of :meth:`forward` and its proposals ``Tensor[P, 4]``."""
        scores = logits.softmax(1)[:, :NUM_CLASSES]
        boxes = clip(decode(deltas, proposals, self.scale), height, width)
        region, label = torch.nonzero(scores > self.SCORE, as_tuple=True)
        boxes, scores = boxes[region], scores[region, label]
        keep = self.batched_nms(boxes, scores, label, self.NMS_IOU)[: self.KEEP]
        return Detections(boxes[keep], scores[keep], label[keep])


class Detector(nn.Module):
    """Backbone, proposals and region head.

    Args:
        ops: where the operators come from: ``opzoo`` or ``torchvision.ops``.
    """

    def __init__(self, ops: ModuleType) -> None:
        super().__init__()
        self.backbone = Backbone(ops)
        self.proposal_head = ProposalHead(ops)
        self.region_head = RegionHead(ops)

    def losses(self, images: Tensor, truths: list[Tensor], labels: list[Tensor]) -> dict[str, Tensor]:
        """The four losses of a batch.

        Args:
            images: ``Tensor[N, 3, H, W]`` in 0..1.
            truths: ``Tensor[G, 4]`` per image, ``G >= 1``.
            labels: int64 ``Tensor[G]`` per image.
        """
        features = self.backbone(images)
        output = self.proposal_head(features)
        proposals = self.proposal_head.proposals(output, *images.shape[-2:])
        return {
            **self.proposal_head.losses(output, truths),
            **self.region_head.losses(features, proposals, truths, labels),
        }

    @torch.no_grad()
    def forward(self, images: Tensor) -> list[Detections]:
        """Detect the digits of ``Tensor[N, 3, H, W]`` in 0..1."""
        height, width = images.shape[-2:]
        features = self.backbone(images)
        proposals = self.proposal_head.proposals(self.proposal_head(features), height, width)
        logits, deltas = self.region_head(features, proposals)
        counts = [boxes.shape[0] for boxes in proposals]
        rows = zip(logits.split(counts), deltas.split(counts), proposals, strict=True)
        return [self.region_head.detections(*row, height, width) for row in rows]


def sample(positive: Tensor, negative: Tensor, count: int, fraction: float) -> tuple[Tensor, Tensor]:
    """Pick at most ``count`` rows at random, positives at most ``fraction`` of that.

    Args:
        positive: bool ``Tensor[P]``.
        negative: bool ``Tensor[P]``; rows in neither are left out.

    Returns:
        The picked rows, int64 ``Tensor[S]``, and which of them are positive, bool ``Tensor[S]``.
    """
    positives, negatives = (torch.nonzero(mask).flatten() for mask in (positive, negative))
    positives = positives[torch.randperm(len(positives), device=positive.device)[: int(count * fraction)]]
    negatives = negatives[torch.randperm(len(negatives), device=positive.device)[: count - len(positives)]]
    is_positive = torch.arange(len(positives) + len(negatives), device=positive.device) < len(positives)
    return torch.cat([positives, negatives]), is_positive
