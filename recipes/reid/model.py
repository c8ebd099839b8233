"""The network that turns images into embeddings, and the classifier that it is trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional


class GeM(nn.Module):
    """Generalized mean over all places, ``mean(x^p)^(1/p)``, with p learned: Radenović et al. 2018, arXiv:1711.02512.

    p = 1 is the average; the greater p is, the nearer it comes to the maximum.
    """

    def __init__(self, p: float = 3.0, least: float = 1e-6) -> None:
        super().__init__()
        self.p, self.least = nn.Parameter(torch.tensor(p)), least

    def forward(self, maps: Tensor) -> Tensor:
        """Return (batch, channels) for (batch, channels, height, width)."""
        return maps.float().clamp(min=self.least).pow(self.p).mean((2, 3)).pow(1 / self.p)


def small_network(widths: Sequence[int] = (32, 64, 128)) -> nn.Sequential:
    """Return some convolutions. Group norm does not mix images, so ranks compute what one rank would."""
    layers: list[nn.Module] = []
    for before, width in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*layers)


class Embedder(nn.Module):
    """Turns images into embeddings of length 1; the cosine of two says how alike they are.

    Args:
        width: numbers in an embedding.
        backbone: a convolutional network of timm, by its name; None for a small one.
        pretrained: load timm's weights for it.
    """

    def __init__(self, width: int, backbone: str | None = None, *, pretrained: bool = False) -> None:
        super().__init__()
        if backbone is None:
            self.features, channels = small_network(), 128
        else:
            import timm

            try:
                self.features = timm.create_model(backbone, pretrained=pretrained, num_classes=0, global_pool="")
            except RuntimeError as error:
                raise SystemExit(f"error: timm cannot make --backbone {backbone}\n  why: {error}") from error
            channels = self.features.num_features
        self.pool = GeM()
        self.project = nn.Linear(channels, width)

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings (batch, width)."""
        maps = self.features(images)
        if maps.dim() != 4:
            raise SystemExit("error: --backbone gives no maps to pool\n  fix: a convolutional one, such as resnet50")
        return functional.normalize(self.project(self.pool(maps)))


def dynamic_margins(counts: Sequence[int]) -> Tensor:
    """Return the margin of each class, in radians: ``0.5 n^(-1/4) + 0.05`` for n images.

    Classes with few images get larger margins (Ha et al. 2020, arXiv:2010.05350, dynamic margins).
    """
    return 0.5 * torch.tensor(counts, dtype=torch.float32).pow(-0.25) + 0.05


class SubcenterArcFace(nn.Module):
    """The loss of embeddings by a classifier in which each class has several centers, of which the nearest counts.

    Sub-center ArcFace (Deng et al. 2020, "Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web
    Faces", section 3.2): cross entropy of ``scale * cos(angle)``, where the margin is added to the right class's angle.

    Args:
        counts: number of images of each class, for the margins.
        width: numbers in an embedding.
        device: device of this rank.
        centers: of each class.
        scale: of the cosines.
        seed: of the centers, the same on all ranks.
        split: each rank holds a part of the classes, and compares the embeddings of all ranks with it: the model
            parallelism of Partial FC (An et al. 2021, arXiv:2010.05222, section 3), with all classes in each step.
    """

    def __init__(
        self,
        counts: Sequence[int],
        width: int,
        *,
        device: torch.device,
        centers: int = 3,
        scale: float = 24.0,
        seed: int = 0,
        split: bool = False,
    ) -> None:
        super().__init__()
        self.scale, self.split, self.first = scale, split, 0
        self.register_buffer("margins", dynamic_margins(counts).to(device), persistent=False)
        # On the CPU, and with all classes on all ranks: so the centers do not depend on the number of ranks.
        weight = torch.randn(len(counts), centers, width, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(self._part_of(weight, device) if split else weight.to(device))

    def _part_of(self, weight: Tensor, device: torch.device) -> Tensor:
        """Return this rank's classes, as a tensor that checkpoints save as a whole, for any number of ranks."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        size = -(-len(weight) // ranks)
        self.first = rank * size
        mesh, mine = init_device_mesh(device.type, (ranks,)), weight[self.first : self.first + size].to(device)
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over this rank's samples, or over those of all ranks if the classes are split."""
        weight = self.weight
        if self.split:
            weight = weight.to_local()
            embeddings, labels = Gathered.apply(embeddings), gather(labels)
        cosines = torch.einsum("bw,ncw->bnc", embeddings, functional.normalize(weight, dim=2)).amax(2)
        places = labels - self.first
        here = ((places >= 0) & (places < len(weight))).nonzero()[:, 0]  # Samples whose class this rank has.
        right = (here, places[here])
        logits = self.scale * cosines.index_put(right, with_margin(cosines[right], self.margins[labels[here]]))
        if not self.split:
            return functional.cross_entropy(logits, labels)
        # -log softmax = highest + log(sum(exp(logit - highest))) - logit of the right class, over the classes of all.
        highest = functional.pad(logits.detach(), (0, 1), value=-math.inf).amax(1)  # Also of a rank without classes.
        distributed.all_reduce(highest, distributed.ReduceOp.MAX)
        own = torch.zeros_like(highest).index_put((here,), logits[right])
        summed, own = SummedOverRanks.apply(torch.stack([(logits - highest[:, None]).exp().sum(1), own]))
        return (highest + summed.log() - own).mean()


def with_margin(cosines: Tensor, margins: Tensor) -> Tensor:
    """Return ``cos(angle + margin)``, the target logit of ArcFace (Deng et al. 2019, arXiv:1801.07698, equation 3).

    Beyond 180 degrees it would rise again: there it is ``cos(angle) - margin * sin(margin)``, as in its authors' code.
    """
    sines = (1 - cosines.square()).clamp(min=1e-6).sqrt()
    moved = cosines * margins.cos() - sines * margins.sin()
    return torch.where(cosines > -margins.cos(), moved, cosines - margins * margins.sin())


def gather(tensor: Tensor) -> Tensor:
    """Return the rows of all ranks, in the order of ranks; all have equally many."""
    parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class Gathered(torch.autograd.Function):
    """The embeddings of all ranks; their gradient is the sum of what all ranks' classes give."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        return gather(mine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient)
        # The loss is a mean over the samples of all ranks, and each rank takes the gradient of it as if it were one
        # over its own: ctx.prepare() averages the gradients of the network over the ranks.
        ranks = distributed.get_world_size()
        return gradient.chunk(ranks)[distributed.get_rank()] * ranks


class SummedOverRanks(torch.autograd.Function):
    """A sum over ranks from which all compute the same loss: a part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
